"""The JSON of a reply under the rules that hold everywhere in it: types, depth, duplicates, what can be read at all."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from workers.depth import MAX_DEPTH, too_deep

Fields = dict[str, msgspec.Raw]

NULL = msgspec.Raw(b"null")

_OBJECT = msgspec.json.Decoder(Fields)
_PLACE = re.compile(r" - at `(.*)`$")


class Rejected(Exception):
    """A malformed reply. The message names the rule and the place, never content."""


def utf8(body: bytes) -> None:
    """msgspec does not look at the bytes of what it skips. Raises Rejected."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Rejected(f"not UTF-8 at byte {error.start}") from error


def object_at(raw: msgspec.Raw | bytes | None, where: str) -> Fields:
    """An object's fields, undecoded. Raises Rejected where it is none."""
    if raw is None:
        raise Rejected(f"{where} is missing")
    fields: Fields = typed(_OBJECT, raw, where, "an object")
    return fields


def value_at(raw: msgspec.Raw | bytes | None, where: str) -> Any:
    """Any value; None where there is none. Raises Rejected where it cannot be held."""
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{where} is not valid JSON") from error


def typed(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw | bytes | None, where: str, kind: str = "") -> Any:
    """What `decoder` makes of it; `kind` says what it should have been. Raises Rejected."""
    if raw is None:
        raise Rejected(f"{where} is missing")
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if kind:
            raise Rejected(f"{where} must be {kind}") from error
        place = _PLACE.search(str(error))
        inside = place.group(1).removeprefix("$") if place else ""
        raise Rejected(f"{where}{inside}: {str(error)[: place.start()] if place else error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{where} is not valid JSON: {error}") from error


def is_null(raw: msgspec.Raw | None) -> bool:
    """Is it missing, or null?"""
    return raw is None or bytes(memoryview(raw)[:5]) == b"null"


def count_is(raw: msgspec.Raw | None, found: int, where: str, of: str) -> None:
    """The engine's own count must be what was found. Raises Rejected."""
    count = value_at(raw, where)
    if isinstance(count, bool) or not isinstance(count, int):
        raise Rejected(f"{where} must be an integer")
    if count != found:
        raise Rejected(f"{where} is {count}, but {of} has {found} entries")


def no_duplicates(raw: bytes, fields: Fields, where: str) -> None:
    """Keys that stand twice: two readers would believe different values.

    Where the fields account for every byte of a compact object, none was dropped; else it is read slowly.
    """
    accounted = 1 + sum(len(name) + 4 + len(memoryview(value)) for name, value in fields.items())
    if accounted == len(raw):
        return

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise Rejected(f"{where} has duplicate keys")
        return found

    json.loads(raw, object_pairs_hook=unique, parse_int=str, parse_float=str)


def readable(body: bytes, bulk: list[bytes]) -> None:
    """Can whoever reads the reply hold all of it? `bulk` are long flat lists that their types have bounded."""
    rest = body
    for text in bulk:
        if text:
            rest = rest.replace(text, b"0", 1)
    value_at(rest, "the body")
    if too_deep(rest):
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels")


def flat(raw: msgspec.Raw, entries: int) -> list[bytes]:
    """A list of `entries` lists, where it holds nothing deeper; else it is left to be looked at whole."""
    text = bytes(raw)
    return [text] if text.count(b"[") == entries + 1 and b"{" not in text else []
