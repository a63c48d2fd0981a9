"""Filters on sessions' metadata: keys and values, where a dot in a key leads into an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.store.content import metadata_of
from app.store.ports import Connection

Wanted = Sequence[tuple[str, str]]
"""Keys and their values as text."""

MISSING = object()


def matches(connection: Connection, session_ids: Sequence[str], wanted: Wanted) -> dict[str, bool]:
    """Of these sessions, those with metadata: is all of `wanted` in it? What cannot be read matches nothing."""
    stored = metadata_of(connection, session_ids)
    return {session_id: _has_all(metadata, wanted) for session_id, metadata in stored.items()}


def _has_all(stored: bytes, wanted: Wanted) -> bool:
    try:
        metadata = msgspec.json.decode(stored)
    except msgspec.MsgspecError:
        return False
    return all(is_value(value_of(metadata, key), text) for key, text in wanted)


def value_of(metadata: object, key: str) -> object:
    """The value of a key; if there is no such key, a dot in it leads into an object."""
    if not isinstance(metadata, Mapping):
        return MISSING
    if key in metadata:
        value: object = metadata[key]
        return value
    head, dot, rest = key.partition(".")
    return value_of(metadata.get(head), rest) if dot else MISSING


def is_value(value: object, text: str) -> bool:
    """Is this the text, or the value that it is as JSON? `3` is both the number and the text."""
    if value is MISSING:
        return False
    if isinstance(value, str):
        return value == text
    try:
        given: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return False
    return _canonical(value) == _canonical(given)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
