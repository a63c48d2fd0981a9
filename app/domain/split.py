"""A body's fields, and a field's items, as raw JSON: of what is long, and holds many values, a part at a time.

A decoder goes through 16 MiB of small values in 40 ms, for which it holds the interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from app.domain.bounds import FEW
from workers import scan

LONG = 1 << 20
"""Bytes that are decoded, and characters of a text that are encoded, in one go, whatever they hold."""

AT_ONCE = 256 << 10
"""Bytes of many small values that are decoded in one go: some milliseconds."""

LONGEST_NAME = 4096
"""Bytes within which a field's name is looked for."""

WHITE = b" \t\r\n"

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder(msgspec.Raw)
_NAMED = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:')


def fields(body: bytes, check: Callable[[str, bytes], None]) -> dict[str, msgspec.Raw]:
    """Of a JSON object. `check` is shown a long field, which may be no JSON, before it is decoded, and may refuse it.

    Raises msgspec.DecodeError, RecursionError.
    """
    text = _if_many(body)
    if not text.startswith(b"{") or not text.endswith(b"}"):
        return FIELDS.decode(body)
    found: dict[str, msgspec.Raw] = {}
    for member in scan.members(text):
        one = _long_field(member, check) if len(member) > LONG else FIELDS.decode(b"{" + member + b"}")
        if not one:
            return FIELDS.decode(body)
        found |= one
    return found


def items(raw: bytes) -> list[msgspec.Raw]:
    """Of a JSON list. Raises msgspec.DecodeError, RecursionError."""
    text = _if_many(raw)
    if not text.startswith(b"[") or not text.endswith(b"]"):
        return ITEMS.decode(raw)
    found: list[msgspec.Raw] = []
    for part in scan.members(text, AT_ONCE):
        some = ITEMS.decode(b"[" + part + b"]")
        if not some:
            return ITEMS.decode(raw)
        found += some
    return found


def quoted(text: str) -> bytes:
    """A text as JSON."""
    return b"".join(quoted_parts(text))


def quoted_parts(text: str) -> Iterator[bytes]:
    """A text as JSON, a long one in pieces: others may run between them."""
    if len(text) <= LONG:
        yield msgspec.json.encode(text)
        return
    yield b'"'
    for start in range(0, len(text), LONG):
        yield msgspec.json.encode(text[start : start + LONG])[1:-1]
    yield b'"'


def parts(text: bytes) -> Iterator[bytes]:
    """A text cut at commas, whatever they stand for, into parts of about AT_ONCE bytes."""
    start = 0
    while (end := text.find(b",", start + AT_ONCE)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _if_many(text: bytes) -> bytes:
    """The text without white space around it; nothing where a decoder has it in one go."""
    return text.strip(WHITE) if len(text) > LONG and scan.may_exceed(text, FEW) else b""


def _long_field(member: bytes, check: Callable[[str, bytes], None]) -> dict[str, msgspec.Raw]:
    """Raises msgspec.DecodeError also for a value that is none: what was cut in the wrong place."""
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
