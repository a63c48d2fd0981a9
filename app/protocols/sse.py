"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.split import in_one_line
from app.domain.surrogates import decoded
from workers.codec import describe

SEARCHED = 64 << 10
"""A longer body is decoded without being searched first, which takes longer."""

KEEPALIVE = b": keep-alive\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event; `data` may hold raw JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + in_one_line(msgspec.json.encode(data)) + b"\n\n"


def comment(text: str) -> bytes:
    """A comment, which clients skip, for a stream whose headers were already sent."""
    return b": " + text.encode() + b"\n\n"


class _Flag(msgspec.Struct):
    stream: bool | None = None


describe(_Flag)
_FLAG = msgspec.json.Decoder(_Flag)


def is_set(stream: msgspec.Raw | None) -> bool:
    """Is a request's field `stream` true? False for an invalid one, which the turn rejects later."""
    return stream is not None and bytes(stream) == b"true"


def wants_stream(body: bytes) -> bool:
    """Does the request ask for a stream? False for an invalid body, which the turn rejects later."""
    if len(body) <= SEARCHED and b'"stream"' not in body:
        return False
    try:
        return bool(decoded(_FLAG, body).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
