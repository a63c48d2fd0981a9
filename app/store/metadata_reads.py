"""Reads the metadata of several sessions at once."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from app.store.reads import SPAN
from app.store.schema import blobs, sessions
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


def first_of_groups(connection: Connection, group_ids: Sequence[str]) -> dict[str, str]:
    """For each group the id of one of its sessions, the first by id, without erased ones."""
    found: dict[str, str] = {}
    for at in range(0, len(group_ids), SPAN):
        part = sessions.c.group_id.in_(group_ids[at : at + SPAN])
        query = select(sessions.c.group_id, func.min(sessions.c.session_id)).where(part, sessions.c.status != "erased")
        found.update((row[0], row[1]) for row in connection.execute(query.group_by(sessions.c.group_id)))
    return found
