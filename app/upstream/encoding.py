"""Unpacks compressed errors, which proxies before engines send unasked."""

from __future__ import annotations

import zlib

import msgspec

from app.upstream.body import Body
from app.upstream.client import EngineReply

LIMIT = 1 << 20
"""Largest unpacked error in bytes; a larger one is replaced by a message."""

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_NAMES = frozenset({"gzip", "x-gzip", "deflate"})


def encoding_of(reply: EngineReply) -> str:
    """The content encoding; `identity` if none is given."""
    given = (value for name, value in reply.headers if name.lower() == "content-encoding")
    return next(given, "identity").strip().lower() or "identity"


def plain_error(reply: EngineReply) -> EngineReply:
    """The same status and headers with the body unpacked, or replaced by an error of ours if it cannot be.

    The client still gets what matters most: the status and `Retry-After`.
    """
    encoding = encoding_of(reply)
    unpacked = _unpacked(reply.body.joined()) if encoding in _NAMES else None
    kept = [(name, value) for name, value in reply.headers if name.lower() not in ("content-encoding", "content-type")]
    if unpacked is None:
        message = f"the engine's error cannot be shown: its content-encoding is {encoding:.32}"
        unpacked = msgspec.json.encode({"error": {"message": message, "type": "upstream_error", "code": None}})
        kept.append(("content-type", "application/json"))
    else:
        kept += [(name, value) for name, value in reply.headers if name.lower() == "content-type"]
    return msgspec.structs.replace(reply, headers=kept, body=Body([unpacked]))


def _unpacked(data: bytes) -> bytes | None:
    """The unpacked data; None if it is damaged, incomplete, empty or too large."""
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        unpacked = reader.decompress(data, LIMIT)
    except zlib.error:
        return None
    return unpacked if unpacked and reader.eof else None
