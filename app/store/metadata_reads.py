"""Reads the metadata of several sessions at once."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from app.store.reads import SPAN
from app.store.schema import blobs
from workers import codec
from workers.codec import CorruptContent

KIND = "metadata"


def metadata_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, bytes]:
    """The metadata's JSON by session. Sessions without any, erased ones, and damaged ones are missing."""
    found: dict[str, bytes] = {}
    for at in range(0, len(session_ids), SPAN):
        part = blobs.c.session_id.in_(session_ids[at : at + SPAN])
        query = select(blobs.c.session_id, blobs.c.data).where(part, blobs.c.number == 0, blobs.c.kind == KIND)
        for session_id, data in connection.execute(query):
            try:
                found[session_id] = codec.decompress(data)
            except CorruptContent:
                continue
    return found
