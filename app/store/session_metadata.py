"""Which sessions have given values in the metadata of their creation.

Metadata is a blob of each session without an index, so the callers bound how many sessions they look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from app.store.reads import SPAN
from app.store.schema import blobs
from workers import codec
from workers.codec import CorruptContent

Wanted = Sequence[tuple[str, str]]
"""Keys and their values as text."""

_MISSING = object()


def matches(connection: Connection, session_ids: Sequence[str], wanted: Wanted) -> dict[str, bool]:
    """For each of these sessions that has metadata in this database whether all of `wanted` is in it.

    Metadata that cannot be read matches nothing.
    """
    found: dict[str, bool] = {}
    for at in range(0, len(session_ids), SPAN):
        query = select(blobs.c.session_id, blobs.c.data).where(
            blobs.c.session_id.in_(session_ids[at : at + SPAN]), blobs.c.kind == "metadata"
        )
        for session_id, frame in connection.execute(query):
            found[session_id] = _has_all(frame, wanted)
    return found


def _has_all(frame: bytes | None, wanted: Wanted) -> bool:
    try:
        metadata = msgspec.json.decode(codec.decompress(frame))
    except (CorruptContent, msgspec.MsgspecError):
        return False
    return all(is_value(value_of(metadata, key), text) for key, text in wanted)


def value_of(metadata: object, key: str) -> object:
    """The value of a key; if there is no such key, a dot in it leads into an object."""
    if not isinstance(metadata, Mapping):
        return _MISSING
    if key in metadata:
        found: object = metadata[key]
        return found
    head, dot, rest = key.partition(".")
    return value_of(metadata.get(head), rest) if dot else _MISSING


def is_value(value: object, text: str) -> bool:
    """Is this the text, or the value that it is as JSON? `3` is both the number and the text."""
    if value is _MISSING:
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
