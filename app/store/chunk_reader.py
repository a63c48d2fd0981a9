"""Reads chunks wherever they are: in the database, or in objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection, select

from app.domain.events import ChunkKey
from app.errors import PayloadsUnavailable
from app.store import reads
from app.store.bulk import StoredSession
from app.store.ports import Database
from app.store.schema import chunks

log = logging.getLogger("turnlog.objects")

is_live = chunks.c.tombstoned_by.is_(None) & chunks.c.location.is_not(None)
"""Condition on chunks: in an object that nobody may delete."""

Frames = dict[ChunkKey, bytes | None]

READ_AT_ONCE = 32
"""Objects read at the same time for one reader."""


async def load_chunks(database: Database, session_id: str, keys: Collection[ChunkKey]) -> Frames:
    """Stored frames of chunks; None for a tombstone or a frame that is lost, nothing for a chunk that is not there.

    Raises PayloadsUnavailable, SessionUnreadable, StoreUnavailable.
    """
    stored = await database.read(
        lambda connection: reads.load_chunks(connection, session_id, keys), session_id=session_id
    )
    frames: Frames = {key: frame for key, frame in stored.items() if not isinstance(frame, str)}
    objects = {key: name for key, name in stored.items() if isinstance(name, str)}
    return frames | await _fetched(database, session_id, objects)


async def fetch_objects(database: Database, sessions: Iterable[StoredSession]) -> None:
    """Fetch the chunks of sessions that are in objects. Raises PayloadsUnavailable, StoreUnavailable."""
    for stored in sessions:
        if stored.objects:
            stored.chunks.update(await _fetched(database, stored.session_id, stored.objects))
            stored.objects.clear()


async def _fetched(database: Database, session_id: str, objects: Mapping[ChunkKey, str]) -> Frames:
    """The frames in objects; None for one that is lost. One that was tombstoned since is left out."""
    if not objects:
        return {}
    bucket = database.bucket
    if bucket is None:
        raise PayloadsUnavailable("replay payloads are in object storage: set TURNLOG_PAYLOADS")
    room = asyncio.Semaphore(READ_AT_ONCE)

    async def read(name: str) -> bytes | None:
        async with room:
            return await bucket.read(name)

    frames = dict(zip(objects, await asyncio.gather(*map(read, objects.values())), strict=True))
    missing = [key for key, frame in frames.items() if frame is None]
    if missing:
        live = await database.read(partial(live_objects, session_id=session_id, keys=missing), session_id=session_id)
        for key in missing:
            if key in live:
                log.error("session %s: the object %s is gone", session_id, live[key].name)
            else:
                del frames[key]
    return frames


class LiveObject(NamedTuple):
    name: str
    kind: str
    number: int


def live_objects(
    connection: Connection, session_id: str, keys: Collection[ChunkKey] | None = None
) -> dict[ChunkKey, LiveObject]:
    """The objects that chunks of a session refer to; of these keys, if any are given."""
    query = select(chunks.c.fence, chunks.c.number, chunks.c.location, chunks.c.kind)
    rows = connection.execute(query.where(chunks.c.session_id == session_id, is_live))
    objects = {(row[0], row[1]): LiveObject(row[2], row[3], row[1]) for row in rows}
    return objects if keys is None else {key: objects[key] for key in keys if key in objects}
