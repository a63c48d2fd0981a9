"""Reads chunks wherever they are: in the database, or in packs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from app.domain.events import ChunkKey
from app.errors import PayloadsUnavailable
from app.store import reads
from app.store.bulk import StoredSession
from app.store.packs.format import InPack
from app.store.packs.rows import live_chunks
from app.store.ports import Database

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

log = logging.getLogger("turnlog.packs")

Frames = dict[ChunkKey, bytes | None]


async def load_chunks(database: Database, session_id: str, keys: Collection[ChunkKey]) -> Frames:
    """Stored frames of chunks; None for a tombstone or a frame that is lost, nothing for a chunk that is not there.

    Raises PayloadsUnavailable, SessionUnreadable, StoreUnavailable.
    """
    found = await database.read(
        lambda connection: reads.load_chunks(connection, session_id, keys), session_id=session_id
    )
    frames: Frames = {key: one for key, one in found.items() if not isinstance(one, InPack)}
    places = {key: one for key, one in found.items() if isinstance(one, InPack)}
    return frames | await fetch_frames(database, session_id, places)


async def fetch_packed(database: Database, sessions: Iterable[StoredSession]) -> None:
    """Fetch the chunks of sessions that are in packs. Raises PayloadsUnavailable, StoreUnavailable."""
    for stored in sessions:
        if stored.packed:
            stored.chunks.update(await fetch_frames(database, stored.session_id, stored.packed))
            stored.packed.clear()


async def fetch_frames(database: Database, session_id: str, places: Mapping[ChunkKey, InPack]) -> Frames:
    """The frames in packs; None for one that is lost. One that is tombstoned meanwhile is left out.

    Between the look at a chunk's row and that at its pack, the chunk may be moved to another pack or into the database.
    It is then read where it is. Raises PayloadsUnavailable, SessionUnreadable,
    StoreUnavailable.
    """
    frames: Frames = {}
    while places:
        frames |= await _read(_bucket_of(database), places)
        missing = places.keys() - frames.keys()
        if not missing:
            break
        now = await database.read(
            partial(live_chunks, session_id=session_id, keys=missing),
            session_id=session_id,
        )
        for key, frame in now.items():
            if not isinstance(frame, InPack):
                frames[key] = frame
            elif frame == places[key]:
                log.error("session %s: chunk %s is not in pack %s", session_id, key, frame.pack)
                frames[key] = None
        places = {key: one for key, one in now.items() if isinstance(one, InPack) and key not in frames}
    return frames


def _bucket_of(database: Database) -> Bucket:
    if database.bucket is None:
        raise PayloadsUnavailable(
            "replay payloads are in object storage: set TURNLOG_PAYLOADS or TURNLOG_PAYLOADS_FROM"
        )
    return database.bucket


async def _read(bucket: Bucket, places: Mapping[ChunkKey, InPack]) -> Frames:
    """The frames that are there."""
    packs: dict[str, list[ChunkKey]] = {}
    for key, place in places.items():
        packs.setdefault(place.pack, []).append(key)

    async def of_pack(pack: str, keys: list[ChunkKey]) -> Frames:
        parts = await bucket.read_parts(pack, [(places[key].offset, places[key].length) for key in keys])
        return {} if parts is None else dict(zip(keys, parts, strict=True))

    found: Frames = {}
    for frames in await asyncio.gather(*(of_pack(pack, keys) for pack, keys in packs.items())):
        found |= frames
    return found
