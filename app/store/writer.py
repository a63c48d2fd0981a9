"""The one writer of a process: operations that wait at the same time are committed together.

    submit ──▶ queue (bounded in count and bytes) ──▶ one transaction, one fsync ──▶ outcomes
                                                       │
                                                       ├─▶ deferred: retried in a later batch, for LOCK_RETRY_S
                                                       └─▶ file is locked: retried, for LOCKED_S from `submit`

What has been submitted when the loop comes round is one batch; what comes while it is being written is the next. An
outcome is returned only after the transaction has ended. If one operation fails a batch, the batch is repeated one by
one, so that the others succeed. PostgreSQL takes several batches at a time (lanes): while one waits for the disk or a
standby, the next is filled.

There a head is locked without waiting, before anything else of its session. An operation on a head that another
transaction has locked is `DEFERRED` to a later batch. So no session waits for another's row, and two batches cannot
deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ARRAY, String, any_, bindparam, select

from app.domain.events import BlobsTombstoned, Recorded, RolledBack, SessionClosed, TurnAbandoned, TurnCommitted
from app.errors import AppError, Overloaded, StoreDamaged, StoreLocked, StoreUnavailable
from app.store.dialect import Tx, WriteConflict
from app.store.log import DEFERRED, Appended, Deferred, Operation
from app.store.log_sessions import Create
from app.store.log_turns import AbandonDead, Claim, Commit, look_and_write, write
from app.store.ports import LOCKED_S, Database
from app.store.schema import sessions
from app.store.sessions import read_all_rows

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

CROWDED_OUT = "other processes' writes kept this one waiting too long"
"""After the last of these attempts."""

LOCK_RETRY_S, LOCK_RETRY_PAUSE_S = 5.0, 0.01
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
    payloads, by reason; closes that say why their rollout failed, by kind.

    `rolled_back`: turns that were live until a later one superseded them. `tool_errors` as in `TurnCommitted`.
    """

    events: Counter[str] = msgspec.field(default_factory=Counter)
    abandoned: Counter[str] = msgspec.field(default_factory=Counter)
    tombstoned: Counter[str] = msgspec.field(default_factory=Counter)
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    chunks_freed: int = 0
    rolled_back: int = 0
    tool_errors: int = 0

    def add(self, appended: Iterable[Recorded]) -> None:
        for recorded in appended:
            event = recorded.event
            self.events[type(event).__name__] += 1
            if isinstance(event, TurnCommitted):
                self.tool_errors += event.tool_errors
            elif isinstance(event, TurnAbandoned):
                self.abandoned[event.reason] += 1
            elif isinstance(event, RolledBack):
                self.rolled_back += len(event.discarded)
            elif isinstance(event, BlobsTombstoned):
                self.tombstoned[event.reason] += len(event.turns)
                self.chunks_freed += len(event.freed)
            elif isinstance(event, SessionClosed) and event.failed is not None and event.reason != "root":
                self.failed[event.failed.kind] += 1

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
    """An operation that waits. `until`: how long it waits for SQLite's lock, and `held_until`: for its session's row,
    by the loop's time."""

    operation: Operation[Any]
    outcome: asyncio.Future[Any]
    size: int
    until: float
    held_until: float | None = None


class Writer:
    """Runs from `start` to `stop`: each batch is a task."""

    def __init__(self, database: Database) -> None:
        self.counters = WriterCounters()
        self.tally = EventCounters()
        self._database = database
        self._queue: deque[_Entry] = deque()
        # Operations without a session may wait for rows: each runs alone, with several lanes in one of its own.
        self._sessionless: deque[_Entry] = deque()
        self._bytes = 0
        self._room = asyncio.Condition()
        self._waiting_for_room = 0
        self._stopping = False
        self._is_scheduled = True  # Nothing begins before `start`.
        self._gathering: asyncio.TimerHandle | None = None
        self._open = 0
        self._is_sessionless_open = False
        self._deferred = 0
        self._one_ended = asyncio.Event()
        self._batches: set[asyncio.Task[None]] = set()
        self._lanes = 0
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = self._database.lanes
        self._loop.call_soon(self._begin)

    async def stop(self) -> None:
        """Commit what is queued and end; later operations are refused."""
        self._stopping = True
        while self._open or self._is_sessionless_open or self._deferred or self._queue or self._sessionless:
            self._one_ended.clear()
            await self._one_ended.wait()

    async def submit(self, operation: Operation[Result]) -> Result:
        """Queue `operation` and wait for its outcome.

        Raises Overloaded (the queue stayed full), StoreUnavailable, StoreFull. Only if the commit itself failed is it
        unknown whether the operation was written; the log tells. Raises SessionUnreadable if the session needs a
        damaged page: nothing was written then.
        """
        if not self._stopping and (len(self._queue) >= MAX_QUEUE or self._bytes >= MAX_QUEUE_BYTES):
            await self._wait_for_room()
        if self._stopping:
            raise StoreUnavailable("the server is stopping")
        loop, size = asyncio.get_running_loop(), operation.size
        entry = _Entry(operation, loop.create_future(), size, loop.time() + LOCKED_S)
        if (
            operation.is_alone
            and self._lanes == 1
            and not (self._open or self._is_sessionless_open or self._queue or self._sessionless or self._deferred)
        ):
            # In the caller's task: for a single client, waking another one is a good part of the latency.
            self._open += 1
            await self._write_batch(self._queue, [entry])
        else:
            (self._queue if operation.session_id else self._sessionless).append(entry)
            self._bytes += size
            if not self._is_scheduled:
                self._is_scheduled = True
                loop.call_soon(self._begin)
        outcome: Result = await entry.outcome
        return outcome

    @property
    def waiting(self) -> tuple[int, int]:
        """Operations that wait for a transaction, and their bytes."""
        return len(self._queue) + len(self._sessionless) + self._deferred, self._bytes

    async def _wait_for_room(self) -> None:
        self._waiting_for_room += 1
        try:
            async with asyncio.timeout(WAIT_S), self._room:
                await self._room.wait_for(self._has_room)
        except TimeoutError:
            raise Overloaded(f"{len(self._queue)} writes are waiting already") from None
        finally:
            self._waiting_for_room -= 1

    def _has_room(self) -> bool:
        return len(self._queue) < MAX_QUEUE and self._bytes < MAX_QUEUE_BYTES

    def _begin(self) -> None:
        """Begin what may begin. With a transaction open, a further one first gathers operations for GATHER_S."""
        self._is_scheduled = False
        is_single = self._lanes == 1
        if self._sessionless and not self._is_sessionless_open and not (is_single and self._open):
            self._begin_batch(self._sessionless, 1)
        if not self._queue or (is_single and self._is_sessionless_open):
            return
        if not self._open:
            self._begin_batch(self._queue, MAX_BATCH)
        elif self._open < self._lanes and self._gathering is None:
            self._gathering = self._loop.call_later(GATHER_S, self._begin_next)

    def _begin_next(self) -> None:
        """A transaction has ended, or GATHER_S has passed: what has gathered is a batch."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._queue and 0 < self._open < self._lanes:
            self._begin_batch(self._queue, MAX_BATCH)
        else:
            self._begin()

    def _begin_batch(self, queue: deque[_Entry], most: int) -> None:
        batch: list[_Entry] = []
        size = 0
        while queue and len(batch) < most and size < MAX_BATCH_BYTES:
            entry = queue.popleft()
            size += entry.size
            batch.append(entry)
        self._bytes -= size
        if queue is self._queue:
            self._open += 1
        else:
            self._is_sessionless_open = True
        task = self._loop.create_task(self._write_batch(queue, batch), name="turnlog-writer")
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _write_batch(self, queue: deque[_Entry], batch: list[_Entry]) -> None:
        try:
            await self._write(batch)
        finally:
            if queue is self._queue:
                self._open -= 1
            else:
                self._is_sessionless_open = False
            self._one_ended.set()
            if self._queue or self._sessionless:
                # Not before those that have their outcomes have gone on: what they submit belongs to this batch.
                self._loop.call_soon(self._begin_next)
            if self._waiting_for_room and self._has_room():
                async with self._room:
                    self._room.notify_all()

    async def _write(self, batch: list[_Entry]) -> None:
        """Write the batch in one transaction, and give each operation its outcome."""
        operations: list[Operation[Any]] = []
        size, until, durable, runs_inline = 0, math.inf, False, len(batch) <= MAX_INLINE
        for entry in batch:
            operation = entry.operation
            operations.append(operation)
            size += entry.size
            until = min(until, entry.until)
            durable = durable or operation.durable
            runs_inline = runs_inline and (operation.runs_inline or operation.is_alone)
        run = partial(apply_all, operations=operations)
        tries = 1
        while True:
            try:
                outcomes = await self._database.write(
                    run, durable=durable, runs_inline=runs_inline, size=size, until=until
                )
            except WriteConflict as error:
                log.info("a batch of %d writes conflicted with another process, retrying: %s", len(batch), error)
                if tries < CONFLICT_TRIES:
                    tries += 1
                    continue
                await self._write_each(batch, StoreUnavailable(CROWDED_OUT))
            except StoreLocked as error:
                self._give_up(batch, error)
            except StoreDamaged as error:
                await self._isolate_damage(batch, error)
            except AppError as error:
                for entry in batch:
                    _fail(entry, error)
            except Exception as error:  # noqa: BLE001 - the outermost edge of the writer: it must outlive any fault
                await self._write_each(batch, error)
            else:
                break
            return
        self.counters.operations += len(batch)
        self.counters.transactions += 1
        self.counters.durable_transactions += durable
        for entry, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Deferred):
                self._defer(entry)
                continue
            if isinstance(outcome, Appended):
                self.tally.add(outcome.events)
            elif isinstance(entry.operation, AbandonDead):
                self.tally.abandoned_dead(outcome[1])
            if not entry.outcome.done():
                entry.outcome.set_result(outcome)

    async def _write_each(self, batch: list[_Entry], error: BaseException) -> None:
        """Write a batch that failed one by one, so that the fault stays with its owner."""
        if len(batch) == 1:
            _fail(batch[0], error)
            return
        for entry in batch:
            await self._write([entry])

    def _give_up(self, batch: list[_Entry], error: StoreLocked) -> None:
        """Fail the operations whose time is up; the others are next again."""
        now = self._loop.time()
        for entry in reversed(batch):
            if entry.until <= now:
                _fail(entry, error)
            else:
                (self._queue if entry.operation.session_id else self._sessionless).appendleft(entry)
                self._bytes += entry.size

    async def _isolate_damage(self, batch: list[_Entry], error: StoreDamaged) -> None:
        """A damaged page fails only the sessions that need it, not the others of the batch."""
        if len(batch) > 1:
            await self._write_each(batch, error)
            return
        session_id = batch[0].operation.session_id
        try:
            if session_id:
                read = partial(read_all_rows, session_id=session_id, others=self._database.points.tables)
                await self._database.read(read, session_id=session_id)
        except AppError as fault:
            _fail(batch[0], fault)
        else:
            _fail(batch[0], error)

    def _defer(self, entry: _Entry) -> None:
        """Queue it again a little later: no transaction or lane waits for a row that another process has locked."""
        now = self._loop.time()
        entry.held_until = entry.held_until or now + LOCK_RETRY_S
        if now >= entry.held_until:
            message = f"session {entry.operation.session_id}: another program holds a lock on its row in the database"
            _fail(entry, StoreUnavailable(message))
            return
        self._deferred += 1
        self._loop.call_later(LOCK_RETRY_PAUSE_S, self._requeue, entry)

    def _requeue(self, entry: _Entry) -> None:
        self._deferred -= 1
        self._queue.append(entry)
        self._bytes += entry.size
        self._begin()


def _fail(entry: _Entry, error: BaseException) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        entry.outcome.set_exception(error)


# One transaction

_known = select(sessions.c.session_id).where(sessions.c.session_id == any_(bindparam("sids", type_=ARRAY(String))))
_lock_heads = _known.order_by(sessions.c.session_id).with_for_update(skip_locked=True)


def apply_all(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """Apply operations in one transaction; the outcomes in the same order. An operation without a session runs alone.

    First come claims and commits of sessions that are as their process knows them: a few statements for all. The other
    ones are decided behind one look at all their sessions. Then come creations, and the rest one by one, in its order.
    """
    ids = [operation.session_id for operation in operations]
    repeated: set[str] = set()
    if len(ids) > 1 and len(set(ids)) < len(ids):
        repeated = {session_id for session_id, count in Counter(ids).items() if count > 1}
    claims: list[Claim] = []
    commits: list[Commit] = []
    for operation in operations:
        if operation.session_id in repeated:
            continue
        if isinstance(operation, Commit):
            if not operation.needs_look:
                commits.append(operation)
        elif type(operation) is Claim and not operation.needs_look:
            claims.append(operation)
    outcomes: dict[str, Any] = {}
    if claims or commits:
        outcomes |= write(tx, claims, commits)
        if len(outcomes) == len(operations):
            return [outcomes[session_id] for session_id in ids]
    if tx.is_remote and ids[0]:
        outcomes |= dict.fromkeys(_locked_by_others(tx, set(ids) - outcomes.keys()), DEFERRED)
    others = [one for one in operations if one.session_id not in outcomes and one.session_id not in repeated]
    # A feature's claim may look at other sessions too: it is decided by itself, when all before it is written.
    turns = [one for one in others if type(one) is Claim or isinstance(one, Commit)]
    if turns:
        outcomes |= look_and_write(tx, turns)
    creations = [one for one in others if isinstance(one, Create) and one.is_of_set]
    if creations:
        outcomes |= zip([one.session_id for one in creations], Create.apply_set(tx, creations), strict=True)
    return [outcomes[one.session_id] if one.session_id in outcomes else one.apply(tx) for one in operations]


def _locked_by_others(tx: Tx, session_ids: set[str]) -> set[str]:
    """Lock the heads of sessions; returns those that another transaction has locked."""
    ids = sorted(session_ids)
    locked = {row[0] for row in tx.all(_lock_heads, {"sids": ids})}
    tx.add_locked(locked)
    missing = [session_id for session_id in ids if session_id not in locked]
    return {row[0] for row in tx.all(_known, {"sids": missing})} if missing else set()
