"""The metadata of several sessions: a blob of each without an index, so callers bound how many they look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from app.store.reads import SPAN
from app.store.schema import blobs
from workers import codec
from workers.codec import CorruptContent

KIND = "metadata"


def metadata_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, bytes]:
    """The metadata's JSON by session. Sessions without any, erased ones, and damaged ones are missing."""
    by_session: dict[str, bytes] = {}
    for at in range(0, len(session_ids), SPAN):
        part = blobs.c.session_id.in_(session_ids[at : at + SPAN])
        query = select(blobs.c.session_id, blobs.c.data).where(part, blobs.c.number == 0, blobs.c.kind == KIND)
        for session_id, data in connection.execute(query):
            try:
                by_session[session_id] = codec.decompress(data)
            except CorruptContent:
                continue
    return by_session


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
