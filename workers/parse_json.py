"""The JSON of a reply under the rules that hold everywhere in it: types, depth, duplicates, what can be read at all."""

from __future__ import annotations

import json
import re
from typing import Any, TypeGuard

import msgspec

from workers.depth import MAX_DEPTH, too_deep

Fields = dict[str, msgspec.Raw]

NULL = msgspec.Raw(b"null")

_OBJECT = msgspec.json.Decoder(Fields)
_OBJECTS = msgspec.json.Decoder(list[Fields])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_CHOICES = b'"choices":['
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


def is_object(raw: msgspec.Raw | None) -> TypeGuard[msgspec.Raw]:
    """Is it there, and an object?"""
    return raw is not None and bytes(memoryview(raw)[:1]) == b"{"


def count_is(raw: msgspec.Raw | None, found: int, where: str, of: str) -> None:
    """The engine's own count must be what was found. Raises Rejected."""
    count = value_at(raw, where)
    if isinstance(count, bool) or not isinstance(count, int):
        raise Rejected(f"{where} must be an integer")
    if count != found:
        raise Rejected(f"{where} is {count}, but {of} has {found} entries")


def no_duplicates(raw: bytes, fields: Fields, where: str) -> None:
    """Keys that stand twice. Raises Rejected."""
    if _accounted(fields) == len(raw):
        return
    pairs = _pairs(raw)
    if len(dict(pairs)) != len(pairs):
        raise Rejected(f"{where} has duplicate keys")


def no_contradiction(raw: msgspec.Raw | bytes, fields: Fields, where: str) -> None:
    """Keys that stand twice with different values: two readers would believe different ones. Raises Rejected.

    Numbers are the same where they are spelled alike, objects in whatever order.
    """
    if _accounted(fields) == len(memoryview(raw)):
        return
    seen: dict[str, Any] = {}
    for name, value in _pairs(bytes(raw)):
        if seen.setdefault(name, value) != value:
            raise Rejected(f"{where} has duplicate keys with different values")


def _accounted(fields: Fields) -> int:
    """How long a compact object is that has these fields once each, its keys without escapes."""
    values = sum([len(memoryview(value)) for value in fields.values()])
    return 1 + 4 * len(fields) + len("".join(fields)) + values if fields else 2


def unambiguous(body: bytes, choice: Fields, bulk: list[bytes]) -> None:
    """The reply and its `choice` contradict themselves nowhere. `bulk` are long lists. Raises Rejected."""
    if _each_once(body, choice, bulk):
        return
    compact = msgspec.json.format(body, indent=-1)
    if _each_once(compact, _OBJECTS.decode(_OBJECT.decode(compact)["choices"])[0], []):
        return
    root = object_at(body, "the reply")
    no_contradiction(body, root, "the reply")
    [whole] = _RAWS.decode(root["choices"])
    no_contradiction(whole, object_at(whole, "choices[0]"), "choices[0]")


def _each_once(body: bytes, choice: Fields, bulk: list[bytes]) -> bool:
    """Is each key there once, in a compact reply and its choice?

    The choice is cut out by the length that its fields account for, so that nobody reads it again. With a key more it
    would be longer: then a bracket too many is left, and the rest is no JSON.
    """
    start = body.find(_CHOICES) + len(_CHOICES)
    end = start + _accounted(choice)
    if body[end - 1 : end + 1] != b"}]":
        return False
    rest = body[:start] + body[end:]
    for text in bulk:
        if text:
            rest = rest.replace(text, b"0", 1)
    try:
        root = _OBJECT.decode(rest)
    except msgspec.DecodeError:
        return False
    return _accounted(root) == len(rest)


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
