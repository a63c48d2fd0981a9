"""Content as stored bytes: a typed msgpack map in one zstd frame that carries its size and checksum.

`Facts` is what a trainer reads, `Wire` what went over the wire and is given again to a retry. They are
kept apart so that an export of tokens does not read conversations.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, TypeVar

import msgspec
import zstandard

LEVEL = 1
"""zstd level: on turns of some KiB higher levels save nothing (measured: 602 against 601 bytes)."""

TOKEN_BYTES = 4
"""Bytes of a stored token id."""

MAX_RAW = 1 << 30
"""Bytes that one frame may unpack to; a frame that declares more is damaged."""


class CorruptContent(Exception):
    """Stored bytes that do not decode to what the log says was stored."""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn's tokens: new prompt ids and output ids as little-endian int32, output logprobs as float64."""

    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes


class Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn's messages and its reply.

    `messages` are the request's new messages, `message` the reply's, each raw JSON. `reply` is the engine's
    body; where `prompt_ids_at` is set, the JSON text of the prompt's ids was cut out there and is written
    again from the stored tokens with `separator` between them.
    """

    messages: list[bytes]
    message: bytes
    reply: bytes
    headers: list[tuple[str, str]]
    status: int = 200
    prompt_ids_at: int | None = None
    separator: str = ","
    rid: str = ""


Content = TypeVar("Content", Facts, Wire)

_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=True, write_content_size=True
        )
    return compressor


def compress(raw: bytes) -> bytes:
    return _compressor().compress(raw)


def decompress(frame: bytes | None) -> bytes:
    """Raises CorruptContent for a damaged, missing or oversized frame."""
    if frame is None:
        raise CorruptContent("the content is not there")
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= MAX_RAW:
            raise CorruptContent(f"a frame declares {size} bytes")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise CorruptContent(str(error)) from error


def pack(content: Any) -> bytes:
    """Facts, Wire or a snapshot as one compressed frame."""
    return compress(msgspec.msgpack.encode(content))


def unpack(frame: bytes | None, kind: type[Content]) -> Content:
    """Raises CorruptContent."""
    try:
        return msgspec.msgpack.decode(decompress(frame), type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptContent(f"not {kind.__name__}: {error}") from error


def content_hash(facts: bytes, wire: bytes) -> str:
    """What the log keeps of a turn's stored frames, so that a flipped bit is found: 128 bits as hex."""
    hasher = hashlib.sha256(facts)
    hasher.update(wire)
    return hasher.hexdigest()[:32]


def render_ids(ids: memoryview, separator: str) -> bytes:
    """Token ids (an int32 view) as the JSON list that an engine wrote."""
    return b"[" + separator.join(map(str, ids)).encode() + b"]"


def cut_prompt_ids(reply: bytes, text: bytes, count: int) -> tuple[bytes, int | None, str]:
    """Take the text of the prompt's `count` ids out of a reply: stored as tokens, they need no second copy.

    Returns (what is left, where they stood or None if they stay, separator). They stay where they could
    not be written again to the byte: a list of plain integers has one spelling for each separator.
    """
    rest = text.translate(None, b"0123456789,[]")
    if count > 1 and rest == b"":
        separator = ","
    elif count > 1 and len(rest) == count - 1 == text.count(b", ") and rest.isspace():
        separator = ", "
    else:
        return reply, None, ","
    at = reply.index(text)
    return reply[:at] + reply[at + len(text) :], at, separator


def paste_prompt_ids(wire: Wire, ids: memoryview) -> bytes:
    """The reply to the byte; `ids` is the turn's whole prompt as an int32 view."""
    if wire.prompt_ids_at is None:
        return wire.reply
    at = wire.prompt_ids_at
    return wire.reply[:at] + render_ids(ids, wire.separator) + wire.reply[at:]
