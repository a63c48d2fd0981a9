"""Uploads chunks before the commits that refer to them: those of turns that end at the same time in one pack.

    store ──▶ waiting ──▶ pack of up to PACK_BYTES ──▶ upload ──▶ places
                           at most UPLOADS at a time, more only of full packs

While few turns end, each has a pack of its own at once; under load the packs fill while others are uploaded. A small
pack waits for the one before it, for at most SMALL_EVERY_S: small ones cost the bucket and the database most.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from app.crash_points import reach
from app.errors import AppError, Overloaded
from app.store import reads
from app.store.log import StoredChunk
from app.store.packs.format import InPack, Packed, build
from app.store.ports import Database
from app.tasks import cancelled

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

log = logging.getLogger("turnlog.packs")

PACK_BYTES = 8 << 20
"""A pack is closed at this size; it is larger by at most one turn's chunks."""

UPLOADS, FULL_UPLOADS = 4, 32
"""Packs uploaded at a time, and those of them that are full: a slow bucket needs many at a time."""

SMALL_BYTES, SMALL_EVERY_S = 1 << 20, 0.05
"""While a pack is being uploaded, a smaller one than this begins so long after it."""

WAITING_BYTES = 512 << 20
"""Bytes that wait for an upload; past it turns get a 503."""


class _Waiting(msgspec.Struct, eq=False):
    chunks: Sequence[Packed]
    size: int
    places: asyncio.Future[list[InPack]]


class PackWriter:
    """Packs of this process. `incarnation` is its number in the store, which with the epoch makes names unique.

    `keeping` is held during a round of the collector and a step of a move: each would take the token from the other.
    """

    def __init__(self, database: Database, bucket: Bucket, incarnation: Callable[[], int]) -> None:
        self.bucket = bucket
        self.keeping = asyncio.Lock()
        self._database = database
        self._incarnation = incarnation
        self._epoch: str | None = None
        self._numbers = itertools.count(1)
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._uploads: set[asyncio.Task[None]] = set()
        self._next_small_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait or are being uploaded."""
        return self._bytes

    async def stored(self, session_id: str, fence: int, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """The chunks with their places: they are durable in the bucket. Raises Overloaded, PayloadsUnavailable,
        StoreFull, StoreUnavailable."""
        packed = [Packed(session_id, fence, chunk.number, chunk.data) for chunk in chunks]
        places = await self.put(packed)
        return [
            msgspec.structs.replace(chunk, data=b"", place=place) for chunk, place in zip(chunks, places, strict=True)
        ]

    async def put(self, chunks: Sequence[Packed]) -> list[InPack]:
        """Upload chunks; their places in the same order. Raises as `stored`."""
        size = sum(len(chunk.frame) for chunk in chunks)
        if self._bytes + size > WAITING_BYTES and self._bytes:
            raise Overloaded(f"{self._bytes} bytes of replay payloads wait for {self.bucket.url}")
        if self._epoch is None:
            self._epoch = await self._database.read(reads.epoch)
        one = _Waiting(chunks, size, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._bytes += size
        self._start_uploads()
        return await one.places

    async def stop(self) -> None:
        """End the uploads; no turn waits for one any more."""
        self._stop_timer()
        await cancelled(*self._uploads)

    def _start_uploads(self) -> None:
        loop = asyncio.get_running_loop()
        self._stop_timer()
        while self._waiting:
            batch_bytes = sum(one.size for one in itertools.islice(self._waiting, 256))
            if len(self._uploads) >= (FULL_UPLOADS if batch_bytes >= PACK_BYTES else UPLOADS):
                return
            if self._uploads and batch_bytes < SMALL_BYTES and loop.time() < self._next_small_at:
                self._timer = loop.call_at(self._next_small_at, self._start_uploads)
                return
            self._next_small_at = loop.time() + SMALL_EVERY_S
            task = asyncio.create_task(self._upload(self._take()), name="turnlog-pack")
            self._uploads.add(task)
            task.add_done_callback(self._ended)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._uploads.discard(task)
        if not task.cancelled():
            self._start_uploads()

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and size < PACK_BYTES:
            taken.append(self._waiting.popleft())
            size += taken[-1].size
        return taken

    async def _upload(self, taken: Sequence[_Waiting]) -> None:
        try:
            pack = await asyncio.to_thread(build, self._stem(), [chunk for one in taken for chunk in one.chunks])
            reach("before_put")
            await self.bucket.put(pack.name, pack.body)
            reach("after_put")
        except BaseException as error:
            log.warning("replay payloads of %d turns were not stored: %r", len(taken), error)
            for one in taken:
                if not one.places.done():
                    one.places.set_exception(error)
            if not isinstance(error, AppError):
                raise
        else:
            places = iter(pack.places)
            for one in taken:
                own = list(itertools.islice(places, len(one.chunks)))
                if not one.places.done():
                    one.places.set_result(own)
        finally:
            self._bytes -= sum(one.size for one in taken)

    def _stem(self) -> str:
        return f"{self._epoch}/{self._incarnation()}/{next(self._numbers):08d}"
