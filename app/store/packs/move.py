"""Moves replay payloads between the database and packs while turns go on."""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from app.errors import InvalidRequest
from app.store.packs import rows
from app.store.packs.format import Packed
from app.store.packs.rows import MoveChunks, Moved, TakeKeeping
from app.store.packs.writer import PACK_BYTES, PackWriter
from app.store.ports import Database, Writer
from workers import codec
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

log = logging.getLogger("turnlog.packs")

Key = tuple[str, int, int]
START: Key = ("", 0, 0)

READ_AT_ONCE = 8
"""Chunks, of at most 1 MiB each, read in one query."""

MOST = 64
"""Chunks of one step."""


class Step(msgspec.Struct, frozen=True):
    """What one step has moved, and the key that the next one begins behind; None at the end. `lost` chunks stay where
    they are: their packs are gone or damaged."""

    moved: int
    bytes: int
    after: Key | None
    lost: int = 0


class Mover:
    """Each step takes the collector's token: a step that meets a round of it in another process moves nothing and is
    repeated, and so is the round. `to_packs`: where new payloads go, and so these."""

    def __init__(self, database: Database, writer: Writer, packs: PackWriter | None, *, to_packs: bool) -> None:
        self._database = database
        self._writer = writer
        self._packs = packs
        self._to_packs = to_packs

    async def step(self, after: Key) -> Step:
        """Move some chunks behind a key to where new ones go. Raises InvalidRequest without object storage,
        PayloadsUnavailable, StoreUnavailable, StoreFull."""
        if self._packs is None:
            raise InvalidRequest("nothing to move: neither TURNLOG_PAYLOADS nor TURNLOG_PAYLOADS_FROM names a bucket")
        async with self._packs.keeping:
            token = secrets.token_hex(8)
            await self._writer.submit(TakeKeeping(token))
            if self._to_packs:
                return await self._into_packs(token, after, self._packs)
            return await self._into_database(token, after, self._packs.bucket)

    async def _into_packs(self, token: str, after: Key, packs: PackWriter) -> Step:
        found: list[tuple[str, int, int, bytes]] = []
        page = [(*after, b"")]
        while page and len(found) < MOST and sum(len(one[3]) for one in found) < PACK_BYTES:
            page = await self._database.read(
                partial(rows.in_database, after=found[-1][:3] if found else after, limit=READ_AT_ONCE)
            )
            found += page
        if not found:
            return Step(0, 0, None)
        places = await packs.put([Packed(*one) for one in found])
        moved = [Moved(one[0], one[1], one[2], None, place) for one, place in zip(found, places, strict=True)]
        return await self._moved(token, after, moved, sum(len(one[3]) for one in found))

    async def _into_database(self, token: str, after: Key, bucket: Bucket) -> Step:
        found = await self._database.read(partial(rows.in_packs, after=after, limit=READ_AT_ONCE))
        if not found:
            return Step(0, 0, None)
        moved: list[Moved] = []
        for row in found:
            frame = await bucket.read(row.place.pack, row.place.offset, row.place.length)
            if frame is None or not await asyncio.to_thread(_is_whole, frame):
                log.error("session %s: a chunk in pack %s is lost: it is not moved", row.session_id, row.place.pack)
            else:
                moved.append(Moved(row.session_id, row.fence, row.number, row.place, frame))
        step = await self._moved(token, after, moved, sum(row.place.length for row in found))
        if moved and step.after == after:
            return step
        last = found[-1]
        key = (last.session_id, last.fence, last.number)
        return msgspec.structs.replace(step, after=key, lost=len(found) - len(moved))

    async def _moved(self, token: str, after: Key, moved: list[Moved], size: int) -> Step:
        """Repeat from `after` if the token was taken meanwhile."""
        count = await self._writer.submit(MoveChunks(token, moved)) if moved else 0
        if moved and not count:
            return Step(0, 0, after)
        last = moved[-1] if moved else None
        return Step(count, size, after if last is None else (last.session_id, last.fence, last.number))


def _is_whole(frame: bytes) -> bool:
    try:
        codec.decompress(frame)
    except CorruptContent:
        return False
    return True
