"""The one writer of a process: operations that wait at the same time are committed together.

    submit ──▶ queue (bounded in count and bytes) ──▶ one transaction, one fsync ──▶ outcomes
                                                       │
                                                       ├─▶ deferred: retried in a later batch, for HELD_S
                                                       └─▶ file is locked: retried, for LOCKED_S from `submit`

An outcome is returned only after the transaction has ended. If one operation fails a batch, the batch is repeated one
by one, so that the others succeed. PostgreSQL takes several batches at a time (lanes): while one waits for the disk or
a standby, the next is filled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec

from app.domain.events import BlobsTombstoned, Recorded, RolledBack, TurnAbandoned, name_of
from app.errors import AppError, Overloaded, StoreDamaged, StoreLocked, StoreUnavailable
from app.store import reads
from app.store.batch import Deferred, apply_all
from app.store.dialect import Tx, WriteConflict
from app.store.log import Appended, Operation
from app.store.log_turns import AbandonDead
from app.store.ports import LOCKED_S, Database

Result = TypeVar("Result")

log = logging.getLogger("turnlog.writer")

MAX_BATCH = 512
"""Operations in one transaction. With 64 clients, limits of 8, 16 and 32 cost as much CPU a turn:
what bounds a batch is how many turns wait."""

MAX_BATCH_BYTES = 4 << 20
"""Bytes in one transaction: a larger one would delay the others' fsync. Limits from 64 KiB to 16 MiB made no difference
to turns of 64 KiB, of which few come together."""

CONFLICT_TRIES = 5
"""Attempts of a batch that conflicts with another process's transaction."""

HELD_S, HELD_PAUSE_S = 5.0, 0.01
"""How long an operation waits while another process locks its session's row, and the interval of retries."""

GATHER_S = 0.003
"""While a transaction is open, how long operations wait for others before a further one is opened for them. They wait
for nothing once that transaction has ended, and if none is open.

Against 0 it saves a tenth of the CPU of server and database with 64 clients, and changes no latency with four; 10 ms
save no more.
"""

MAX_INLINE = 8
"""Inline operations that together take less than a millisecond, without an fsync."""

MAX_QUEUE = 10_000
MAX_QUEUE_BYTES = 256 << 20
WAIT_S = 5.0
"""How long a request waits for room in the queue before it gets a 503."""


class EventCounters(msgspec.Struct):
    """What one process has appended since it began: events by type; abandoned claims, and turns that lost their replay
    payloads, by reason.

    `rolled_back`: turns that were live until a later one superseded them.
    """

    events: Counter[str] = msgspec.field(default_factory=Counter)
    abandoned: Counter[str] = msgspec.field(default_factory=Counter)
    tombstoned: Counter[str] = msgspec.field(default_factory=Counter)
    chunks_freed: int = 0
    rolled_back: int = 0

    def add(self, appended: Iterable[Recorded]) -> None:
        for recorded in appended:
            event = recorded.event
            self.events[name_of(event)] += 1
            if isinstance(event, TurnAbandoned):
                self.abandoned[event.reason] += 1
            elif isinstance(event, RolledBack):
                self.rolled_back += len(event.discarded)
            elif isinstance(event, BlobsTombstoned):
                self.tombstoned[event.reason] += len(event.turns)
                self.chunks_freed += len(event.freed)

    def abandoned_dead(self, count: int) -> None:
        """Count turns of dead processes, which are abandoned in batches."""
        self.events[TurnAbandoned.__name__] += count
        self.abandoned["owner_dead"] += count


class WriterCounters(msgspec.Struct):
    """What the writer has done since the process began."""

    operations: int = 0
    transactions: int = 0
    durable_transactions: int = 0


class _Entry(msgspec.Struct, eq=False):
    operation: Operation[Any]
    outcome: asyncio.Future[Any]
    size: int
    until: float
    held_until: float | None = None


class Writer:
    """Runs as one task per lane from `start` to `stop`."""

    def __init__(self, database: Database) -> None:
        self.counters = WriterCounters()
        self.tally = EventCounters()
        self._database = database
        self._queue: deque[_Entry] = deque()
        self._sessionless: deque[_Entry] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Condition()
        self._stopping = False
        self._is_writing = False
        self._waiting_for_room = 0
        self._lanes: list[asyncio.Task[None]] = []
        self._deferred = 0
        self._open = 0
        self._one_ended = asyncio.Event()
        self._gathering = asyncio.Lock()

    def start(self) -> None:
        lanes = self._database.lanes
        # Operations without a session may wait for rows; with several lanes they have one of their own.
        lane_queues = [self._sessionless], *([self._queue] for _ in range(lanes))
        runs = [self._run(*queues) for queues in (lane_queues if lanes > 1 else ([self._sessionless, self._queue],))]
        self._lanes = [asyncio.create_task(run, name=f"turnlog-writer-{number}") for number, run in enumerate(runs)]

    async def stop(self) -> None:
        """Commit what is queued and end; later operations are refused."""
        self._stopping = True
        self._ready.set()
        await asyncio.gather(*self._lanes)

    async def submit(self, operation: Operation[Result]) -> Result:
        """Queue `operation` and wait for its outcome.

        Raises Overloaded (the queue stayed full), StoreUnavailable, StoreFull. Only if the commit itself failed is it
        unknown whether the operation was written; the log tells. Raises SessionUnreadable if the session needs a
        damaged page: nothing was written then.
        """
        if self._stopping:
            raise StoreUnavailable("the server is stopping")
        loop = asyncio.get_running_loop()
        until = loop.time() + LOCKED_S
        if self._is_full():
            await self._wait_for_room()
            if self._stopping:
                raise StoreUnavailable("the server is stopping")
        entry = _Entry(operation, loop.create_future(), operation.size, until)
        if operation.is_alone and self._is_idle:
            await self._write_directly(entry)
        else:
            self._queue_of(entry).append(entry)
            self._bytes += entry.size
            self._ready.set()
        outcome: Result = await entry.outcome
        return outcome

    @property
    def _is_idle(self) -> bool:
        """Is nothing being written and nothing waiting? Several lanes are never idle."""
        return len(self._lanes) == 1 and not (self._is_writing or self._queue or self._sessionless or self._deferred)

    async def _write_directly(self, entry: _Entry) -> None:
        """Write in the caller's task: for a single client, waking another task is a good part of the latency."""
        self._is_writing = True
        try:
            await self._write([entry])
        finally:
            self._is_writing = False
            self._ready.set()

    @property
    def waiting(self) -> tuple[int, int]:
        """Operations that wait for a transaction, and their bytes."""
        return len(self._queue) + len(self._sessionless) + self._deferred, self._bytes

    def _queue_of(self, entry: _Entry) -> deque[_Entry]:
        return self._queue if entry.operation.session_id else self._sessionless

    def _is_full(self) -> bool:
        return len(self._queue) >= MAX_QUEUE or self._bytes >= MAX_QUEUE_BYTES

    async def _wait_for_room(self) -> None:
        self._waiting_for_room += 1
        try:
            async with asyncio.timeout(WAIT_S), self._room:
                await self._room.wait_for(lambda: not self._is_full())
        except TimeoutError:
            raise Overloaded(f"{len(self._queue)} writes are waiting") from None
        finally:
            self._waiting_for_room -= 1

    async def _run(self, *queues: deque[_Entry]) -> None:
        while True:
            queue = None if self._is_writing else next((queue for queue in queues if queue), None)
            if queue is None:
                if self._stopping and not self._deferred and not self._is_writing:
                    self._ready.set()
                    return
                self._ready.clear()
                await self._ready.wait()
                continue
            if queue is self._queue and self._open:
                await self._gather()
            batch = self._take(queue)
            if not batch:
                continue
            self._open += queue is self._queue
            try:
                await self._write(batch)
            finally:
                self._open -= queue is self._queue
                self._one_ended.set()
            if self._waiting_for_room and not self._is_full():
                async with self._room:
                    self._room.notify_all()

    async def _gather(self) -> None:
        """Wait until an open transaction has ended, at most GATHER_S. One lane at a time does: it takes all."""
        async with self._gathering:
            if self._queue and self._open:
                self._one_ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):
                        await self._one_ended.wait()

    def _take(self, queue: deque[_Entry]) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        most = MAX_BATCH if queue is self._queue else 1
        while queue and len(batch) < most and size < MAX_BATCH_BYTES:
            entry = queue.popleft()
            size += entry.size
            batch.append(entry)
        self._bytes -= size
        return batch

    async def _write(self, batch: list[_Entry]) -> None:
        operations = [entry.operation for entry in batch]
        try:
            outcomes = await self._commit(
                operations, sum(entry.size for entry in batch), min(entry.until for entry in batch)
            )
        except StoreLocked as error:
            self._give_up(batch, error)
        except StoreDamaged as error:
            await self._isolate_damage(batch, error)
        except AppError as error:
            for entry in batch:
                _fail(entry, error)
        except Exception as error:  # noqa: BLE001 - the outermost edge of the writer: it must outlive any fault
            if len(batch) == 1:
                conflict = isinstance(error, WriteConflict)
                _fail(batch[0], StoreUnavailable("other writers kept this one from its turn") if conflict else error)
                return
            for entry in batch:
                await self._write([entry])
        else:
            for entry, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, Deferred):
                    self._defer(entry)
                else:
                    self._count(entry.operation, outcome)
                    if not entry.outcome.done():
                        entry.outcome.set_result(outcome)

    def _give_up(self, batch: list[_Entry], error: StoreLocked) -> None:
        """Fail the operations whose time is up; the others are next again."""
        now = asyncio.get_running_loop().time()
        for entry in reversed(batch):
            if entry.until <= now:
                _fail(entry, error)
            else:
                self._queue_of(entry).appendleft(entry)
                self._bytes += entry.size

    async def _isolate_damage(self, batch: list[_Entry], error: StoreDamaged) -> None:
        """A damaged page fails only the sessions that need it, not the others of the batch."""
        if len(batch) > 1:
            for entry in batch:
                await self._write([entry])
            return
        session_id = batch[0].operation.session_id
        try:
            if session_id:
                read = partial(reads.read_all_rows, session_id=session_id)
                await self._database.read(read, session_id=session_id)
        except AppError as fault:
            _fail(batch[0], fault)
        else:
            _fail(batch[0], error)

    def _count(self, operation: Operation[Any], outcome: Any) -> None:
        if isinstance(outcome, Appended):
            self.tally.add(outcome.events)
        elif isinstance(operation, AbandonDead):
            self.tally.abandoned_dead(outcome[1])

    def _defer(self, entry: _Entry) -> None:
        """Queue it again a little later: no transaction or lane waits for a row that another process has locked."""
        loop = asyncio.get_running_loop()
        entry.held_until = entry.held_until or loop.time() + HELD_S
        if loop.time() >= entry.held_until:
            message = f"session {entry.operation.session_id}: somebody else holds its row in the database"
            _fail(entry, StoreUnavailable(message))
            return
        self._deferred += 1
        loop.call_later(HELD_PAUSE_S, self._requeue, entry)

    def _requeue(self, entry: _Entry) -> None:
        self._deferred -= 1
        self._queue.append(entry)
        self._bytes += entry.size
        self._ready.set()

    async def _commit(self, operations: list[Operation[Any]], size: int, until: float) -> list[Any]:
        def run(tx: Tx) -> list[Any]:
            return apply_all(tx, operations)

        durable = any(operation.durable for operation in operations)
        runs_inline = len(operations) <= MAX_INLINE and all(one.runs_inline or one.is_alone for one in operations)
        for tried in range(1, CONFLICT_TRIES + 1):
            try:
                outcomes = await self._database.write(
                    run, durable=durable, runs_inline=runs_inline, size=size, until=until
                )
                break
            except WriteConflict as error:
                log.info("a batch of %d met another process's and is tried again: %s", len(operations), error)
                if tried == CONFLICT_TRIES:
                    raise
        self.counters.operations += len(operations)
        self.counters.transactions += 1
        self.counters.durable_transactions += durable
        return outcomes


def _fail(entry: _Entry, error: BaseException) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        entry.outcome.set_exception(error)
