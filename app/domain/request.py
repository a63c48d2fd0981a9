"""A chat request's body: what Turnlog must know of it, the rest as the raw JSON that goes on to the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from app.errors import InvalidRequest, Unsupported
from workers.depth import MAX_DEPTH, too_deep

OURS = frozenset({"stream", "stream_options", "n", "rid"})
"""Fields that Turnlog answers for itself; the engine is always asked for one whole reply."""


class ChatRequest(msgspec.Struct, frozen=True):
    """`params` are all other top-level fields, raw and in the client's order; `messages[i]` is raw JSON."""

    messages: list[msgspec.Raw]
    tools: msgspec.Raw | None
    params: dict[str, msgspec.Raw]
    stream: bool
    body_hash: str


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])


def hash_body(body: bytes) -> str:
    """What tells a retry from another request: 128 bits over the body's bytes, as hex."""
    return hashlib.sha256(body).hexdigest()[:32]


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest, which names the field, and Unsupported for `n` other than 1.

    Messages are only split here; `history.Incoming.check` judges those that are new.
    """
    fields = _split(body)
    messages = _messages(fields.pop("messages", None))
    tools = fields.pop("tools", None)
    stream = _flag(fields.pop("stream", None), "stream")
    _one_choice(fields.pop("n", None))
    for name in OURS:
        fields.pop(name, None)
    for name, raw in (("tools", tools), *fields.items()):
        if raw is not None and too_deep(bytes(raw)):
            raise InvalidRequest(f"{name} nests deeper than {MAX_DEPTH} levels")
    if tools is not None and bytes(tools) == b"null":
        tools = None
    return ChatRequest(messages, tools, fields, stream, hash_body(body))


def _split(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        if not body.isascii():
            body.decode()
        return _FIELDS.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}") from error
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels") from error


def _messages(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    if raw is None:
        raise InvalidRequest("messages is missing")
    try:
        messages = _MESSAGES.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest("messages must be a list") from error
    if not messages:
        raise InvalidRequest("messages must not be empty")
    return messages


def _value(raw: msgspec.Raw | None, name: str) -> Any:
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not a value that can be read") from error


def _flag(raw: msgspec.Raw | None, name: str) -> bool:
    value = _value(raw, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false")


def _one_choice(raw: msgspec.Raw | None) -> None:
    value = _value(raw, "n")
    if value is None or (value == 1 and isinstance(value, int) and not isinstance(value, bool)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        raise Unsupported("n must be 1: a session has one continuation")
    raise InvalidRequest("n must be 1")


def join_object(fields: Mapping[str, bytes]) -> bytes:
    """A JSON object from raw values."""
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in fields.items()) + b"}"
