"""An engine's error that is compressed although nobody asked for that, as proxies before engines send it."""

from __future__ import annotations

import zlib

import msgspec

from app.upstream.body import Body
from app.upstream.client import EngineReply

LIMIT = 1 << 20
"""Bytes of an error once it is unpacked; a larger one is replaced by a line that says so."""

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_NAMES = frozenset({"gzip", "x-gzip", "deflate"})


def encoding_of(reply: EngineReply) -> str:
    """`identity` where none is named."""
    given = (value for name, value in reply.headers if name.lower() == "content-encoding")
    return next(given, "identity").strip().lower() or "identity"


def plain_error(reply: EngineReply) -> EngineReply:
    """The same status and headers with the body unpacked; a body that cannot be unpacked becomes an error of ours.

    What the client needs most, the status and `Retry-After`, does not hang on the body.
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
    """None for what is damaged, unfinished, empty or too large."""
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        found = reader.decompress(data, LIMIT)
    except zlib.error:
        return None
    return found if found and reader.eof else None
