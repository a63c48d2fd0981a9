"""Rules for all JSON of a reply: types, depth, duplicate keys, readable values."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import orjson

from workers import scan

MAX_DEPTH = 100
"""Templates, schemas and replies stay far below; a deeper body is rejected."""

LONG = 64 << 10
"""Bytes of payloads that are decoded with their reply."""

MATCHED = 12 << 10
"""A longer text is not searched with a regular expression, which takes twice as long as numpy, and holds the GIL."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

Fields = dict[str, msgspec.Raw]

NULL, MISSING = msgspec.Raw(b"null"), msgspec.Raw(b"")
"""What stands for a field that an object does not have: where null means the same, and where it does not."""

_OBJECT = msgspec.json.Decoder(Fields)
_PLACE = re.compile(r" - at `(.*)`$")


class Rejected(Exception):
    """A malformed reply. The message names the rule and the place, never content."""


def object_at(raw: msgspec.Raw | bytes | None, where: str) -> Fields:
    """An object's fields, undecoded. Raises Rejected if it is not an object."""
    if raw is None:
        raise Rejected(f"{where} is missing")
    fields: Fields = typed(_OBJECT, raw, where, "an object")
    return fields


def value_at(raw: msgspec.Raw | bytes, where: str) -> Any:
    """Any value. Raises Rejected if it cannot be decoded."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{where} is not valid JSON") from error


def typed(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw | bytes | None, where: str, kind: str = "") -> Any:
    """The decoded value; `kind` describes the expected type in errors. Raises Rejected."""
    if raw is None:
        raise Rejected(f"{where} is missing")
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        if kind and place is None:
            raise Rejected(f"{where} must be {kind}") from error
        inside = place.group(1).removeprefix("$") if place else ""
        raise Rejected(f"{where}{inside}: {str(error)[: place.start()] if place else error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if raw == MISSING:
            raise Rejected(f"{where} is missing") from error
        raise Rejected(f"{where} is not valid JSON: {error}") from error


def is_null(raw: msgspec.Raw | None) -> bool:
    """Is it missing, or null?"""
    return raw is None or bytes(memoryview(raw)[:5]) in (b"null", b"")


def is_object(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"{"


def count_is(raw: msgspec.Raw, actual: int, where: str, of: str) -> None:
    """Require that the engine's own count is `actual`. Raises Rejected."""
    count = value_at(raw, where)
    if isinstance(count, bool) or not isinstance(count, int):
        raise Rejected(f"{where} must be an integer")
    if count != actual:
        raise Rejected(f"{where} is {count}, but {of} has {actual} entries")


def no_duplicates(raw: msgspec.Raw, where: str) -> None:
    """Raises Rejected if an object has a key twice."""
    if _compact_length(object_at(raw, where)) != len(memoryview(raw)):
        pairs = _pairs(bytes(raw))
        if len(dict(pairs)) != len(pairs):
            raise Rejected(f"{where} has duplicate keys")


def no_contradiction(raw: msgspec.Raw | bytes, where: str) -> Fields:
    """An object's fields. Raises Rejected if it has a key twice with different values, which two readers would read
    differently.

    Numbers are equal if they are spelled alike, objects in any order.
    """
    fields = object_at(raw, where)
    if _compact_length(fields) != len(memoryview(raw)):
        seen: dict[str, Any] = {}
        for name, value in _pairs(bytes(raw)):
            if seen.setdefault(name, value) != value:
                raise Rejected(f"{where} has duplicate keys with different values")
    return fields


def plain_object(text: bytes) -> Any:
    """The object, if it is what its values encode to; else None. Then each key stands once, each text is UTF-8 and each
    number in range."""
    try:
        value = orjson.loads(text)
        return value if orjson.dumps(value) == text else None
    except (ValueError, TypeError):  # Also for what nests too deep for it.
        return None


def _compact_length(fields: Fields) -> int:
    """Length of a compact object with these fields once each and no escapes in keys."""
    values = sum([len(memoryview(value)) for value in fields.values()])
    return 1 + 4 * len(fields) + len("".join(fields)) + values if fields else 2


def _pairs(raw: bytes) -> list[tuple[str, Any]]:
    """An object's members in order; slow."""
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal outermost
        outermost = pairs
        return dict(pairs)

    def spelling(number: str) -> tuple[str]:
        return (number,)

    json.loads(raw, object_pairs_hook=keep, parse_int=spelling, parse_float=spelling)
    return outermost


def too_deep(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Does this JSON nest deeper than `limit`? For invalid JSON the answer may be wrong.

    It is measured from the text alone: without recursion, and including duplicate keys.
    """
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    if len(text) > MATCHED:
        return scan.extent(text, len(text)).depth > limit
    brackets = _STRING.sub(b"", text).translate(_AS_ONE_KIND, _NOT_BRACKETS)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level, everywhere
    return bool(brackets)
