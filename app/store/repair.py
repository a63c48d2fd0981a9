"""Checks and repairs of a store: its heads against their logs, and whether it gives events back in order.

The rows of `sessions` and `open_turns` are compared with what a session's log implies, without a snapshot or cache.
Reads go through `Tx`, so the same code checks on a reading connection and repairs in a write transaction.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    String,
    Table,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    union,
    update,
)
from sqlalchemy.exc import DBAPIError

from app.domain import notes
from app.domain.events import Recorded, TurnCommitted, TurnOpened, UnknownEvent
from app.domain.session import OpenTurn, Session, fold
from app.errors import StoreUnavailable
from app.store import statements as sql
from app.store.damage import attempt_or
from app.store.database import Database
from app.store.dialect import CoreReads, Reads, Row, Tx, WriteConflict, current_tx, next_tx, now, oldest_runs, oldest_tx
from app.store.feed import PAUSE_S, SETTLE_S
from app.store.incarnations import heartbeat, require_unserved
from app.store.opening import require_head, unopened
from app.store.rollouts import note, note_groups, root_in_logs
from app.store.schema import events, incarnations, open_turns, sessions
from app.store.sessions import EventRow, decode_events

DERIVED = (sessions, events, open_turns)
"""The log, and the tables derived from it."""

PAGE = 500
"""Sessions listed in one query; one session at a time is in memory."""


class FoldedLog(NamedTuple):
    """All events of a session (at least one) and their fold.

    `root_id` also depends on the logs of its parents.
    """

    session: Session
    events: Sequence[Recorded]
    root_id: str | None


def _updated_at(log: FoldedLog) -> float:
    """Time of the last change; a claim is not a change."""
    return next(recorded.at for recorded in reversed(log.events) if not isinstance(recorded.event, TurnOpened))


def _committed(log: FoldedLog) -> Iterator[TurnCommitted]:
    """The turns that are not undone, in order."""
    events = (recorded.event for recorded in log.events)
    return (event for event in events if isinstance(event, TurnCommitted) and event.turn in log.session.turns)


def _weight_version(log: FoldedLog) -> int | None:
    """The largest numeric weight version of its committed turns, discarded ones too, but not of those undone."""
    versions = (version for turn in _committed(log) for version in turn.version_numbers)
    return max(versions, default=None)


def _engine(log: FoldedLog) -> str | None:
    """The engine of its newest committed turn, live or discarded."""
    engines = [turn.engine for turn in _committed(log)]
    return engines[-1] if engines else None


HEAD: Mapping[str, Callable[[FoldedLog], Any]] = {
    "version": lambda log: log.session.version,
    "status": lambda log: log.session.status,
    "open_turns": lambda log: len(_open_turns(log)),
    "turns": lambda log: len(log.session.turns),
    "group_id": lambda log: log.session.config.group_id,
    "reward": lambda log: None if log.session.reward is None else log.session.reward.reward,
    "created_at": lambda log: log.session.created_at,
    "updated_at": _updated_at,
    "body_hash": lambda log: log.session.body_hash,
    "closed_at": lambda log: log.session.closed_at,
    "attempt": lambda log: log.session.config.attempt,
    "weight_version": _weight_version,
    "engine": _engine,
    "root_id": lambda log: log.root_id,
    "last_turn": lambda log: log.session.last_turn,
    "note": lambda log: log.session.note,
    "tags": lambda log: notes.joined(log.session.tags),
    "spent_turns": lambda log: log.session.spent_turns,
    "spent_tokens": lambda log: log.session.spent_tokens,
    "name": lambda log: log.session.name,
    "generation": lambda log: log.session.generation,
    "run": lambda log: log.session.config.of_run,
    "group_size": lambda log: log.session.config.group_size,
    "failed": lambda log: log.session.failed and log.session.failed.kind,
    "evaluation": lambda log: log.session.config.evaluation is True,
    "annotated": lambda log: notes.joined(sorted(log.session.annotations.get(0, ()))),
    "engine_errors": lambda log: log.session.engine_errors,
    "tool_errors": lambda log: log.session.tool_errors,
}
"""How each column of `sessions` but the key follows from the log."""

OPEN_TURN: Mapping[str, Callable[[FoldedLog, OpenTurn], Any]] = {
    "turn": lambda log, open_turn: open_turn.turn,
    "parent_turn": lambda log, open_turn: open_turn.parent,
    "incarnation": lambda log, open_turn: open_turn.incarnation,
    "body_hash": lambda log, open_turn: open_turn.body_hash,
    "retry_key": lambda log, open_turn: open_turn.retry_key,
    "adapter": lambda log, open_turn: open_turn.adapter,
    "opened_at": lambda log, open_turn: log.events[open_turn.fence - 1].at,
    "reserved": lambda log, open_turn: open_turn.reserved,
}
"""How each column of `open_turns` but the key follows from the log."""


class Difference(msgspec.Struct, frozen=True):
    """A stored value that differs from the log's. `place` is `sessions.<column>` or `open_turns[<fence>].<column>`.

    Without a column, the whole row as an object; None if it is missing.
    """

    session_id: str
    place: str
    stored: Any
    from_log: Any

    def __str__(self) -> str:
        return f"{self.place} is {_shown(self.stored)}, the log says {_shown(self.from_log)}"


class Examined(msgspec.Struct, frozen=True):
    """The result for one session. `unreadable`: why its log cannot be folded; nothing is compared then.

    `has_log` False: rows without a log; they are left as they are.
    """

    session_id: str
    differences: tuple[Difference, ...] = ()
    unreadable: str | None = None
    has_log: bool = True

    @property
    def sound(self) -> bool:
        return not self.differences and self.unreadable is None

    @property
    def mendable(self) -> bool:
        return bool(self.differences) and self.has_log


_COLUMNS = tuple(HEAD)
_OPEN_COLUMNS = tuple(OPEN_TURN)

_head = select(*(sessions.c[name] for name in _COLUMNS)).where(sql.of_session(sessions))
_open = (
    select(open_turns.c.fence, *(open_turns.c[name] for name in _OPEN_COLUMNS))
    .where(sql.of_session(open_turns))
    .order_by(open_turns.c.fence)
)
_log = select(*(events.c[name] for name in EventRow._fields)).where(sql.of_session(events)).order_by(events.c.seq)
_set_head = (
    update(sessions).where(sql.of_session(sessions)).values({name: bindparam(f"new_{name}") for name in _COLUMNS})
)
_insert_head = insert(sessions)
_drop_open = delete(open_turns).where(sql.of_session(open_turns))
_insert_open = insert(open_turns)


def session_ids(connection: Connection, tables: Sequence[Table], after: str, limit: int) -> list[str]:
    """The next ids after `after` in any of the tables, in the database's own order.

    Each table is read a page at a time, so that a page costs no more than its sessions.
    """
    parts = [
        select(table.c.session_id)
        .where(table.c.session_id > after)
        .distinct()
        .order_by(table.c.session_id)
        .limit(limit)
        for table in tables
    ]
    named = union(*(select(part.subquery().c.session_id) for part in parts)).subquery()
    query = select(named.c.session_id).order_by(named.c.session_id).limit(limit)
    return list(connection.execute(query).scalars())


async def require_revision(database: Database) -> None:
    """Raises StartupError if the database cannot be opened or its schema is not that of this code."""
    try:
        await database.read(require_head)
    except DBAPIError as error:
        raise unopened(database.url, error) from error


def read_log(tx: Reads, session_id: str) -> FoldedLog | None:
    """The whole log, decoded and folded; None if there is none. Raises UnknownEvent, also for a gap."""
    recorded = decode_events(EventRow(*row) for row in tx.all(_log, {"sid": session_id}))
    return folded(session_id, recorded, partial(root_in_logs, tx))


def folded(
    session_id: str, recorded: Sequence[Recorded], root: Callable[[str, str | None], str | None]
) -> FoldedLog | None:
    """`root` returns the root of a session with a given parent. Raises UnknownEvent."""
    session = fold(session_id, recorded)
    if session is None:
        return None
    return FoldedLog(session, recorded, root(session_id, session.config.parent))


def examine(connection: Connection, session_id: str) -> Examined:
    """Compare a session's rows with its log, also while the store is being written.

    On PostgreSQL each statement sees its own state, so a session that changes meanwhile can seem wrong. A difference
    counts only if it is found twice.
    """
    tx = CoreReads(connection)
    result, _ = _examine(tx, session_id)
    while not result.sound:
        again, _ = _examine(tx, session_id)
        if again == result:
            break
        result = again
    return result


def mend(tx: Tx, session_id: str) -> Examined:
    """Write the log's values where others are stored; returns what was found before.

    A session without a readable log is left as it is. The groups that the head named before and after are noted as
    changed.
    """
    tx.lock(sql.lock_head, {"sid": session_id})
    examined, log = _examine(tx, session_id)
    if log is None or examined.sound:
        return examined
    head = head_row(log)
    stored = {difference.place: difference.stored for difference in examined.differences}
    before = {name: stored.get(f"sessions.{name}", head[name]) for name in ("run", "group_id", "root_id")}
    note_groups(tx, {(one["run"], one["group_id"]) for one in (before, head)})
    for root_id in {before["root_id"], head["root_id"]}:
        note(tx, head["run"], None, root_id)
    if not tx.run(_set_head, {"sid": session_id, **{f"new_{name}": value for name, value in head.items()}}):
        tx.insert(_insert_head, [{"session_id": session_id, **head}])
    tx.run(_drop_open, {"sid": session_id})
    rows = [{"session_id": session_id, "fence": fence, **row} for fence, row in open_rows(log).items()]
    tx.insert(_insert_open, rows)
    return examined


async def examined(database: Database) -> AsyncIterator[Examined]:
    """Every session named by the log, the heads or the open turns, ordered by id.

    The store may be in use. Raises StoreUnavailable.
    """
    after = ""
    while ids := await database.read(partial(session_ids, tables=DERIVED, after=after, limit=PAGE)):
        for session_id in ids:
            damaged = Examined(session_id, unreadable="its rows are on a damaged page")
            yield await database.read(lambda c: attempt_or(c, partial(examine, session_id=session_id), damaged))  # noqa: B023
        after = ids[-1]


async def mended(database: Database, session_id: str) -> Examined:
    """Write a session's rows as its log says, durably; returns the differences. Raises StoreFull, StoreUnavailable."""
    try:
        return await database.write(lambda tx: mend(tx, session_id), durable=True)
    except WriteConflict as error:
        raise StoreUnavailable(f"another process wrote to session {session_id} at the same time") from error


async def refuse_if_served(database: Database, lease_s: float) -> None:
    """Raises StartupError while a process may be serving the store, which is open.

    On SQLite the file's lock, taken when the store was opened, excludes other processes. On PostgreSQL a process is
    dead if it has ended or was silent for `lease_s` seconds. If a server starts later, the lock on each head keeps the
    two apart.
    """
    if not database.is_sqlite:
        await database.read(partial(require_unserved, lease_s=lease_s, todo=": stop them first"))


def differences(tx: Reads, session_id: str, log: FoldedLog | None) -> list[Difference]:
    head = tx.one(_head, {"sid": session_id})
    opened = tx.all(_open, {"sid": session_id})
    differing = _compared(session_id, "sessions", _named(_COLUMNS, head), None if log is None else head_row(log))
    stored = {row[0]: _named(_OPEN_COLUMNS, row[1:]) for row in opened}
    expected = {} if log is None else open_rows(log)
    for fence in sorted(stored.keys() | expected.keys()):
        differing += _compared(session_id, f"open_turns[{fence}]", stored.get(fence), expected.get(fence))
    return differing


def _examine(tx: Reads, session_id: str) -> tuple[Examined, FoldedLog | None]:
    try:
        log = read_log(tx, session_id)
    except UnknownEvent as error:
        return Examined(session_id, unreadable=str(error)), None
    return Examined(session_id, tuple(differences(tx, session_id, log)), has_log=log is not None), log


def _compared(
    session_id: str, table: str, stored: dict[str, Any] | None, expected: dict[str, Any] | None
) -> list[Difference]:
    if stored is None or expected is None:
        return [] if stored is expected else [Difference(session_id, table, stored, expected)]
    return [
        Difference(session_id, f"{table}.{name}", stored[name], value)
        for name, value in expected.items()
        if stored[name] != value
    ]


def _named(columns: Sequence[str], row: Row | None) -> dict[str, Any] | None:
    return None if row is None else dict(zip(columns, row, strict=True))


def _open_turns(log: FoldedLog) -> list[OpenTurn]:
    return list(log.session.open_turns.values())


def head_row(log: FoldedLog) -> dict[str, Any]:
    """Every column of `sessions` but the key."""
    return {name: derive(log) for name, derive in HEAD.items()}


def open_rows(log: FoldedLog) -> dict[int, dict[str, Any]]:
    """By fence every column of `open_turns` but the key."""
    return {
        open_turn.fence: {name: derive(log, open_turn) for name, derive in OPEN_TURN.items()}
        for open_turn in _open_turns(log)
    }


def _shown(value: Any) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()


# Proof that the database takes a write, and gives events back in the order of commits.
#
# Exports and `GET /events` end below the oldest transaction that runs. Where events carry other transactions' ids, as
# of several servers behind a sharding proxy or extension, or where a transaction's statements run apart from each
# other, as behind a pooler in statement mode, they would be empty, or miss events, without an error.
#
#     in one transaction      two events are written, read in order as a reader of all events does, and deleted again
#     once it is committed    the process's lease is renewed, which is seen on another connection, and the oldest
#                             running transaction has passed the first one

LOOKS = 5
"""So many, at least, have to miss a write before the database is refused."""

_probe = insert(events).values(tx=current_tx())
_forget = delete(events).where(events.c.session_id == bindparam("sid", type_=String()))
_in_order = (
    select(events.c.seq, events.c.tx)
    .where(
        events.c.session_id == bindparam("sid", type_=String()), events.c.tx >= bindparam("since", type_=BigInteger())
    )
    .order_by(events.c.tx, events.c.position)
)
_begun = select(current_tx(), now())
_seen = select(
    exists().where(
        incarnations.c.id == bindparam("me", type_=BigInteger()),
        incarnations.c.heartbeat_at >= bindparam("moment", type_=Double()),
    ),
    oldest_tx(),
    next_tx(),
    oldest_runs(),
    select(func.coalesce(func.max(events.c.tx), 0)).scalar_subquery(),
)


class StoreUnordered(StoreUnavailable):
    """Events do not come back in the order of commits: no export of this database can be trusted."""

    @classmethod
    def because(cls, why: str) -> StoreUnordered:
        return cls(
            f"the database does not give events back in the order of commits: {why}; is it a sharding proxy or "
            "extension (such as Citus), a replica, or a pooler in statement mode? TURNLOG_DATABASE_URL must "
            "name one PostgreSQL server, or a pooler in transaction or session mode in front of it"
        )


class Written(NamedTuple):
    """A transaction that wrote events, and a moment before its end by the database's clock."""

    tx: int
    moment: float


def write_probe(tx: Tx, incarnation: int) -> Written:
    """Write two events, read them and delete them. Raises StoreUnordered.

    No session's id has a `~`. Nobody else ever sees the events, since their transaction deletes them.
    """
    begun = tx.one(_begun, {})
    assert begun is not None
    written = Written(*begun)
    name = f"~{incarnation}.{written.tx}"  # another each time: one whose commit still waits would hold its key
    again = tx.one(_begun, {})
    if again is None or again[0] != written.tx:  # before anything is written: there is no transaction to take it back
        raise StoreUnordered.because("two statements of one transaction ran in two transactions")
    row = {"session_id": name, "type": "Probe", "version": 1, "at": 0.0, "data": b"{}"}
    for seq in (1, 2):
        # On SQLite the process numbers events. These take no number from others, so that a probe leaves no gap.
        tx.insert(_probe, [row | {"seq": seq} | ({} if tx.positions is None else {"position": seq - 3})])
    rows = [tuple(found) for found in tx.all(_in_order, {"sid": name, "since": written.tx})]
    tx.run(_forget, {"sid": name})
    if rows != [(1, written.tx), (2, written.tx)]:
        raise StoreUnordered.because(
            f"of two events that transaction {written.tx} wrote, {rows} are read as (number, its id)"
        )
    return written


async def prove(database: Database, incarnation: int) -> None:
    """Raises StoreUnordered, StoreUnavailable, StoreFull, WriteConflict."""
    written = await database.write(partial(write_probe, incarnation=incarnation), durable=True)
    # Apart: a commit that waits for its standby keeps its locks, and the process would lose its lease meanwhile.
    await database.write(partial(heartbeat, incarnation=incarnation), durable=False)
    clock = asyncio.get_running_loop().time
    deadline = clock() + SETTLE_S
    for look in itertools.count(1):
        why = await database.read(partial(unseen, written=written, incarnation=incarnation))
        if why is None:
            return
        # The oldest transaction may end while one look asks about it, and of a slow database there is one a second.
        if clock() >= deadline and look >= LOOKS:
            raise StoreUnordered.because(why)
        await asyncio.sleep(PAUSE_S)


def unseen(connection: Connection, written: Written, incarnation: int) -> str | None:
    """What keeps a committed transaction from readers; None: nothing, or another one that still runs."""
    row = connection.execute(_seen, {"me": incarnation, "moment": written.moment}).one()
    is_seen, oldest, following, runs, newest = row
    if not is_seen:
        return "another connection does not see a committed write"
    if following <= max(newest, written.tx):
        return (
            f"transaction {max(newest, written.tx)} has written events, and the next one has the id {following}; after "
            "a dump was loaded, run `turnlog restore`"
        )
    return None if oldest > written.tx or runs else f"the oldest transaction that runs is {oldest}, which has ended"
