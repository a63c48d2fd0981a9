"""Splits a body into fields, and a field into items, as raw JSON; long ones with many values in parts.

Decoding 16 MiB of small values takes 40 ms, during which it holds the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from app.domain.bounds import FEW
from workers import scan

LONG = 1 << 20
"""Bytes decoded, and characters encoded, in one step, whatever they hold."""

AT_ONCE = 256 << 10
"""Bytes of many small values decoded in one step: some milliseconds."""

LONGEST_NAME = 4096
"""Bytes in which a field's name is searched."""

WHITE = b" \t\r\n"
WHITES = (b" ", b"\t", b"\r", b"\n")

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder(msgspec.Raw)
_NAMED = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:')


def offset_in(text: bytes, raw: msgspec.Raw) -> int:
    """Where a raw value stands in the text that it was decoded from: it is a view of it."""
    [(start, _)] = scan.places_in(text, (raw,))
    return start


def fields(body: bytes, check: Callable[[str, bytes], None]) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object. `check` is called with each long field, perhaps invalid JSON, before it is decoded.

    Raises msgspec.DecodeError, RecursionError, and what `check` raises.
    """
    text = _if_many(body)
    if not text.startswith(b"{") or not text.endswith(b"}"):
        return FIELDS.decode(body)
    members: dict[str, msgspec.Raw] = {}
    for member in scan.members(text):
        decoded = _long_field(member, check) if len(member) > LONG else FIELDS.decode(b"{" + member + b"}")
        if not decoded:
            return FIELDS.decode(body)
        members |= decoded
    return members


def items(raw: bytes) -> list[msgspec.Raw]:
    """The items of a JSON list. Raises msgspec.DecodeError, RecursionError."""
    text = _if_many(raw)
    if not text.startswith(b"[") or not text.endswith(b"]"):
        return ITEMS.decode(raw)
    raws: list[msgspec.Raw] = []
    for part in scan.members(text, AT_ONCE):
        some = ITEMS.decode(b"[" + part + b"]")
        if not some:
            return ITEMS.decode(raw)
        raws += some
    return raws


def quoted(text: str) -> bytes:
    return b"".join(quoted_parts(text))


def quoted_parts(text: str) -> Iterator[bytes]:
    """A text as JSON, a long one in pieces, so that other threads can run between them."""
    if len(text) <= LONG:
        yield msgspec.json.encode(text)
        return
    yield b'"'
    for start in range(0, len(text), LONG):
        yield msgspec.json.encode(text[start : start + LONG])[1:-1]
    yield b'"'


def parts(text: bytes) -> Iterator[bytes]:
    """A text cut at commas, of any meaning, into parts of about AT_ONCE bytes."""
    start = 0
    while (end := text.find(b",", start + AT_ONCE)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _if_many(text: bytes) -> bytes:
    """The stripped text; empty if a decoder can take it in one step."""
    return text.strip(WHITE) if len(text) > LONG and scan.may_exceed(text, FEW) else b""


def _long_field(member: bytes, check: Callable[[str, bytes], None]) -> dict[str, msgspec.Raw]:
    """Raises msgspec.DecodeError also for an invalid value, cut in the wrong place."""
    named = _NAMED.match(member, 0, LONGEST_NAME)
    if named is None:
        return FIELDS.decode(b"{" + member + b"}")
    name, raw = msgspec.json.decode(named[1], type=str), member[named.end() :].strip(WHITE)
    check(name, raw)
    if raw.startswith(b"[") and raw.endswith(b"]"):
        for part in scan.members(raw, AT_ONCE):
            _ANY.decode(b"[" + part + b"]" if part.strip(WHITE) else raw)
    else:
        _ANY.decode(raw)
    return {name: msgspec.Raw(raw)}


def in_one_line(raw: bytes) -> bytes:
    """The same JSON without line breaks, which can only occur between tokens: for JSONL or an event stream."""
    return raw.replace(b"\n", b" ").replace(b"\r", b" ")
