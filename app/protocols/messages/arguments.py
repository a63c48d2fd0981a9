"""A tool call's arguments: text in a chat, an object in Messages.

What the model sampled is spliced into the reply as it is, if clients can read it as an object and send it back.
Anything else travels inside `{"INVALID_JSON": text}`, which Anthropic documents for arguments that are not valid JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain import bounds
from workers.depth import MAX_DEPTH, too_deep

_INVALID = "INVALID_JSON"

_AROUND = 10
"""Levels of nesting left for what is around the arguments in the request that returns them."""


def as_input(arguments: Any) -> msgspec.Raw:
    """The input of a `tool_use` block as raw JSON."""
    if arguments is None:
        return msgspec.Raw(b"{}")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    if not text.strip():
        return msgspec.Raw(b"{}")
    raw = text.encode()
    return msgspec.Raw(raw if _returns(raw) else msgspec.json.encode({_INVALID: text}))


def as_arguments(raw: bytes) -> str:
    """The arguments of an input, which is a JSON object: its own spelling without the white space."""
    if _INVALID.encode() in raw:
        text = _wrapped(_decoded(raw))
        if text is not None:
            return text
    return msgspec.json.format(raw, indent=-1).decode()


def _returns(raw: bytes) -> bool:
    """Is it an object that every client can read, and that comes back as one?"""
    if bounds.is_too_much(raw) or too_deep(raw, MAX_DEPTH - _AROUND):
        return False
    value = _decoded(raw)
    return isinstance(value, dict) and _wrapped(value) is None


def _decoded(raw: bytes) -> Any:
    """None if it cannot be read."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _wrapped(value: Any) -> str | None:
    """The text of `{"INVALID_JSON": text}`, with nothing else in it."""
    text = value.get(_INVALID) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None
