"""Rules for all JSON of a reply: types, depth, duplicate keys, readable values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec
import orjson

from workers import scan
from workers.depth import MAX_DEPTH, too_deep

Fields = dict[str, msgspec.Raw]

NULL = msgspec.Raw(b"null")

_OBJECT = msgspec.json.Decoder(Fields)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_PLACE = re.compile(r" - at `(.*)`$")


class Rejected(Exception):
    """A malformed reply. The message names the rule and the place, never content."""


def utf8(body: bytes) -> None:
    """msgspec does not check the bytes that it skips. Raises Rejected."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Rejected(f"not UTF-8 at byte {error.start}") from error


def object_at(raw: msgspec.Raw | bytes | None, where: str) -> Fields:
    """An object's fields, undecoded. Raises Rejected if it is not an object."""
    if raw is None:
        raise Rejected(f"{where} is missing")
    fields: Fields = typed(_OBJECT, raw, where, "an object")
    return fields


def value_at(raw: msgspec.Raw | bytes | None, where: str) -> Any:
    """Any value; None if it is missing. Raises Rejected if it cannot be decoded."""
    if raw is None:
        return None
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


def is_object(raw: msgspec.Raw | None) -> TypeGuard[msgspec.Raw]:
    """Is it there, and an object?"""
    return raw is not None and bytes(memoryview(raw)[:1]) == b"{"


def count_is(raw: msgspec.Raw | None, actual: int, where: str, of: str) -> None:
    """Require that the engine's own count is `actual`. Raises Rejected."""
    count = value_at(raw, where)
    if isinstance(count, bool) or not isinstance(count, int):
        raise Rejected(f"{where} must be an integer")
    if count != actual:
        raise Rejected(f"{where} is {count}, but {of} has {actual} entries")


_Check = Callable[[msgspec.Raw | bytes, Fields, str], None]


class Keys:
    """Checks that objects do not have a key twice, each where it is read.

    `is_late`: all of them at the end, and only for a reply that differs when it is decoded and encoded again. One that
    does not has each key once.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._late: list[tuple[_Check, msgspec.Raw | bytes, Fields, str]] | None = [] if is_late else None

    def stand_once(self, raw: msgspec.Raw | bytes, fields: Fields, where: str) -> None:
        """Raises Rejected for a duplicate key."""
        if self._late is None:
            _no_duplicates(raw, fields, where)
        else:
            self._late.append((_no_duplicates, raw, fields, where))

    def do_not_differ(self, raw: msgspec.Raw | bytes, fields: Fields, where: str) -> None:
        """Raises Rejected for duplicate keys with different values, which two readers would read differently.

        Numbers are equal if they are spelled alike, objects in any order.
        """
        if self._late is None:
            no_contradiction(raw, fields, where)
        else:
            self._late.append((no_contradiction, raw, fields, where))

    def finish(self, body: bytes, bulk: list[bytes], payloads: list[bytes]) -> None:
        """Require that the reply and its choice have no contradicting keys either, and that all of it can be decoded.
        `bulk` are long lists that were checked, `payloads` have rules of their own. Raises Rejected."""
        rest = _without(body, bulk)
        if self._late is None or not _is_plain(rest):
            for check, raw, fields, where in self._late or ():
                check(raw, fields, where)
            root = object_at(body, "the reply")
            no_contradiction(body, root, "the reply")
            [choice] = _RAWS.decode(root["choices"])
            no_contradiction(choice, object_at(choice, "choices[0]"), "choices[0]")
            rest = _without(rest, payloads)
            value_at(rest, "the body")
        if too_deep(rest):
            raise Rejected(f"nests deeper than {MAX_DEPTH} levels")


def _is_plain(text: bytes) -> bool:
    try:
        return orjson.dumps(orjson.loads(text)) == text
    except (ValueError, TypeError):  # Also for what nests too deep for it.
        return False


def _no_duplicates(raw: msgspec.Raw | bytes, fields: Fields, where: str) -> None:
    if _compact_length(fields) != len(memoryview(raw)):
        pairs = _pairs(bytes(raw))
        if len(dict(pairs)) != len(pairs):
            raise Rejected(f"{where} has duplicate keys")


def no_contradiction(raw: msgspec.Raw | bytes, fields: Fields, where: str) -> None:
    """As `Keys.do_not_differ`."""
    if _compact_length(fields) == len(memoryview(raw)):
        return
    seen: dict[str, Any] = {}
    for name, value in _pairs(bytes(raw)):
        if seen.setdefault(name, value) != value:
            raise Rejected(f"{where} has duplicate keys with different values")


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


def _without(text: bytes, bulk: list[bytes]) -> bytes:
    """The text with 0 in place of each of these parts. What follows something else may be in a key or a string."""
    for part in filter(None, bulk):
        at = scan.find(text, part)
        while at > 0 and text[at - 1] not in b": \t\r\n":
            at = scan.find(text, part, at + 1)
        if at >= 0:
            text = b"%b0%b" % (text[:at], text[at + len(part) :])
    return text


def flat(raw: msgspec.Raw, entries: int) -> list[bytes]:
    """A list of `entries` flat lists; empty if it is nested deeper, so that it is checked as a whole."""
    text = bytes(raw)
    return [text] if text.count(b"[") == entries + 1 and b"{" not in text else []
