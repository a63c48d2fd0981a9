"""Writes objects before the commits that refer to them, and deletes them when nothing does any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from app.crash_points import reach
from app.domain.events import ChunkKey
from app.errors import AppError, ClaimLost, Overloaded
from app.features.objects import names, rows
from app.features.objects.rows import DeadObject
from app.features.objects.schema import take_copies
from app.process import cancelled
from app.store.content import live_objects
from app.store.dialect import Tx
from app.store.incarnations import ReleaseLease, TakeLease
from app.store.log import StoredChunk
from app.store.ports import Database, Writer

if TYPE_CHECKING:
    from app.features.objects.bucket import Bucket

log = logging.getLogger("turnlog.objects")

SMALL_BYTES = 16 << 10
"""A frame below this stays in the database."""

WRITES, DELETES = 64, 32
"""Objects written, and deleted, at the same time."""

WAITING_BYTES = 512 << 20
"""Bytes that wait for an upload; past it turns get a 503."""

EVERY_S, RETRY_S = 1.0, 5.0
"""Pauses between two looks at the queue, and after one that failed."""

SWEEP_EVERY_S, OWNER_EVERY_S = 1800.0, 60.0

LEASE_S = 30.0
DELETED_AT_ONCE = 256


class Copies(msgspec.Struct, frozen=True):
    """A fork's copies of objects, by its own chunks' keys; all names begin with `prefix`."""

    prefix: str
    names: Mapping[ChunkKey, str]

    def take(self, tx: Tx, fork_id: str) -> bool:
        """The fork refers to them from now on; False if they have been given up."""
        return tx.run(take_copies, {"sid": fork_id, "object": self.prefix}) > 0


class Objects:
    """Runs as one task from `start` to `stop`. `incarnation` is this process's number in the store, `lease_s` after how
    many seconds without a heartbeat a process is dead. An object that nothing refers to any more is kept for `keep_s`
    seconds, so that backups and URLs from before still find it."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        bucket: Bucket,
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
        *,
        keep_s: float,
    ) -> None:
        self.bucket = bucket
        self._database = database
        self._writer = writer
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._keep_s = keep_s
        self._room = asyncio.Semaphore(WRITES)
        self._waiting_bytes = 0
        self._uploads: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._given_up: set[tuple[str, int]] = set()  # turns that lost their claim: they may upload no more
        self._forks = itertools.count(1)
        self._lease: tuple[int, float] | None = None  # fence, and when to renew it
        self._is_owner = False
        self._ask_owner_at = 0.0
        self._next_sweep = 0.0
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-objects")

    async def stop(self) -> None:
        await cancelled(self._task)
        if self._lease is not None:
            with contextlib.suppress(AppError):
                await self._writer.submit(ReleaseLease(rows.LEASE, self._lease[0]))

    async def finish_uploads(self) -> None:
        await cancelled(*self._uploads.values())

    async def is_erased(self, root_id: str) -> bool:
        """Are the objects of an erased rollout gone? Otherwise the queue is looked at now."""
        self._hurried.set()
        return not await self._database.read(partial(rows.is_being_erased, root_id=root_id))

    async def stored(self, session_id: str, fence: int, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """The chunks, of which the large ones are durable in the bucket. Raises ClaimLost, Overloaded,
        PayloadsUnavailable, StoreFull.

        An upload that has begun goes on if its turn is cancelled: whoever erases the session waits for its end.
        """
        large = {chunk.number: chunk for chunk in chunks if len(chunk.data) >= SMALL_BYTES}
        if not large:
            return list(chunks)
        turn = (session_id, fence)
        if turn in self._given_up:
            self._given_up.discard(turn)
            raise ClaimLost(f"the claim on session {session_id} was taken over during the turn")
        size = sum(len(chunk.data) for chunk in large.values())
        if self._waiting_bytes and self._waiting_bytes + size > WAITING_BYTES:
            raise Overloaded(f"{self._waiting_bytes} bytes of replay payloads wait for {self.bucket.url}")
        prefix = names.of_turn(session_id, self._incarnation(), fence)
        located = {number: f"{prefix}{chunk.kind}.{number}" for number, chunk in large.items()}
        self._waiting_bytes += size
        puts = [self.bucket.put(located[number], chunk.data) for number, chunk in large.items()]
        reach("before_put")
        task = self._uploads[turn] = asyncio.create_task(_all(puts, self._room), name="turnlog-upload")

        def ended(_: asyncio.Task[None]) -> None:
            self._waiting_bytes -= size
            del self._uploads[turn]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("session %s: replay payloads were not stored: %r", session_id, error)

        task.add_done_callback(ended)
        await asyncio.shield(task)
        reach("after_put")
        return [
            msgspec.structs.replace(chunk, data=b"", location=located[chunk.number]) if chunk.number in large else chunk
            for chunk in chunks
        ]

    async def copied(self, source_id: str, fork_id: str, chunks: Mapping[ChunkKey, ChunkKey]) -> Copies | None:
        """Copy the objects of a fork's chunks, given the source's key of each; None if there are none, or if the fork
        exists already. Raises PayloadsUnavailable, StoreFull, StoreUnavailable.

        The caller ends it with `end_copies`, unless the fork was created."""
        live = await self._database.read(partial(live_objects, session_id=source_id), session_id=source_id)
        wanted = {key: live[old] for key, old in chunks.items() if old in live}
        if not wanted or await self._database.read(partial(rows.has_head, session_id=fork_id)):
            return None
        me = self._incarnation()
        prefix = names.of_copies(fork_id, me, next(self._forks))
        copies = Copies(
            prefix, {key: f"{prefix}{key[0]}.{source.kind}.{source.number}" for key, source in wanted.items()}
        )
        await self._writer.submit(rows.BeginCopies(prefix, fork_id, me))
        try:
            pairs = [(source.name, copies.names[key]) for key, source in wanted.items()]
            await _all([self.bucket.copy(*pair) for pair in pairs], self._room)
        except BaseException:
            await self.end_copies(fork_id, copies)
            raise
        reach("after_copied")
        return copies

    async def end_copies(self, fork_id: str, copies: Copies) -> None:
        """The copies belong to no fork: they may be deleted."""
        await self._writer.submit(rows.EndWriting([DeadObject(copies.prefix, fork_id)], self._incarnation()))

    async def _run(self) -> None:
        pause = EVERY_S
        while True:
            try:
                async with asyncio.timeout(pause):
                    await self._hurried.wait()
            except TimeoutError:
                pass
            self._hurried.clear()
            try:
                await self.look()
                pause = EVERY_S
            except AppError as error:
                log.warning("objects could not be deleted: %s", error)
                pause = RETRY_S
            except Exception:
                log.exception("unexpected error while deleting objects")
                pause = RETRY_S

    async def look(self) -> None:
        """Say which uploads have ended; with the lease, delete what is due, and sweep from time to time. Raises
        PayloadsUnavailable, StoreUnavailable, StoreFull."""
        await self._end_writing()
        if await self._fence() is None:
            return
        is_due = partial(rows.has_due, keep_s=self._keep_s, lease_s=self._lease_s())
        if await self._database.read(is_due) and await self._owns_place():
            await self._delete_due()
        now = asyncio.get_running_loop().time()
        if now >= self._next_sweep and await self._owns_place():
            self._next_sweep = now + SWEEP_EVERY_S
            await self.sweep()

    async def _end_writing(self) -> None:
        """A turn whose claim was taken may be uploading. When that has ended, or has not begun, it uploads no more."""
        me = self._incarnation()
        ended: list[DeadObject] = []
        for dead in await self._database.read(partial(rows.written_by, incarnation=me)):
            fence = names.fence_of(dead.name)
            if fence is not None and (dead.session_id, fence) not in self._uploads:
                self._given_up.add((dead.session_id, fence))
                ended.append(dead)
        if ended:
            await self._writer.submit(rows.EndWriting(ended, me))

    async def _fence(self) -> int | None:
        """The fence of the lease, which is renewed in time; None if another process has it."""
        now = asyncio.get_running_loop().time()
        if self._lease is None or now >= self._lease[1]:
            fence = await self._writer.submit(TakeLease(rows.LEASE, self._incarnation(), LEASE_S, self._lease_s()))
            self._lease = None if fence is None else (fence, now + LEASE_S / 3)
        return None if self._lease is None else self._lease[0]

    async def _owns_place(self) -> bool:
        """Do the objects here belong to this store? A copy of a database must not delete what its original needs."""
        now = asyncio.get_running_loop().time()
        if not self._is_owner and now >= self._ask_owner_at:
            self._ask_owner_at = now + OWNER_EVERY_S
            own = await self._database.read(rows.owner_name)
            self._is_owner = await self.bucket.owner(own) == own
            if not self._is_owner:
                log.warning(
                    "%s belongs to another store, or to this one before a restore: Turnlog deletes nothing "
                    "there, and erasures wait; if no other store uses it, delete its object %s",
                    self.bucket.url,
                    names.OWNER,
                )
        return self._is_owner

    async def _delete_due(self) -> None:
        await self._writer.submit(rows.EndWritingOfDead(self._lease_s()))
        while (fence := await self._fence()) is not None:
            due = await self._writer.submit(rows.TakeDue(fence, self._keep_s, DELETED_AT_ONCE))
            room = asyncio.Semaphore(DELETES)
            outcomes = await asyncio.gather(*(self._gone(dead, room) for dead in due), return_exceptions=True)
            done = [dead for dead, outcome in zip(due, outcomes, strict=True) if outcome is True]
            await self._writer.submit(rows.ForgetDead(done))
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            if not done:
                return

    async def _gone(self, dead: DeadObject, room: asyncio.Semaphore) -> bool:
        """Delete what the queue names. A name that no object can have is told of and forgotten: it may keep nothing
        else from being deleted."""
        async with room:
            try:
                if names.is_prefix(dead.name):
                    return await self._empty(dead)
                await self.bucket.delete(dead.name)
            except (ValueError, TypeError) as error:  # obstore's for a path that is none
                log.error("%.200r is not an object's name, and is not deleted: %s", dead.name, type(error).__name__)
                return True
            reach("after_object_deleted")
            return True

    async def _empty(self, dead: DeadObject) -> bool:
        """Delete all objects whose names begin so; False if there may be more later.

        Of an erased session nothing may be left: it is listed again after the deletion, when no upload can begin any
        more.
        """
        folder = names.folder_of(dead.session_id)
        if dead.name == folder and await self._database.read(partial(rows.being_written, session_id=dead.session_id)):
            await self._deleted(await self._listed(folder))
            return False
        while left := [name for name in await self._listed(folder) if name.startswith(dead.name)]:
            await self._deleted(left)
        return True

    async def _listed(self, folder: str) -> list[str]:
        return [name async for page in self.bucket.list(folder.rstrip("/")) for name in page]

    async def _deleted(self, objects: Iterable[str]) -> None:
        deletions = [self.bucket.delete(name) for name in objects]
        await _all(deletions, asyncio.Semaphore(DELETES))
        if deletions:
            reach("after_object_deleted")

    async def sweep(self) -> None:
        """Queue the objects that nothing has ever referred to. Those of an open turn or of a fork that is being made
        are left. Raises PayloadsUnavailable, StoreUnavailable, StoreFull."""
        async for page in self.bucket.list():
            fence = await self._fence()
            if fence is None:
                return
            objects = {name: parsed for name in page if (parsed := names.parsed(name)) is not None}
            if count := await self._writer.submit(rows.QueueUnreferenced(fence, objects)):
                log.info("%d unreferenced objects will be deleted", count)


async def _all(calls: Iterable[Coroutine[Any, Any, None]], room: asyncio.Semaphore) -> None:
    """Make all calls; what the first of them raised is raised only when all have ended."""

    async def in_turn(call: Coroutine[Any, Any, None]) -> None:
        async with room:
            await call

    for outcome in await asyncio.gather(*map(in_turn, calls), return_exceptions=True):
        if outcome is not None:
            raise outcome
