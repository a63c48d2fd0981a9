"""What `sessions` and `open_turns` must hold of a session, derived from its log alone, and what they hold.

Nothing here trusts a snapshot or a cache. What is read goes through `Tx`, so that the same code looks on a
reading connection and mends inside a write transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Table, bindparam, delete, insert, not_, select, union, update
from sqlalchemy.exc import DBAPIError

from app.domain.events import Recorded, TurnCommitted, TurnOpened, UnknownEvent
from app.domain.groups import largest_version
from app.domain.session import OpenTurn, Session, fold
from app.store import statements as sql
from app.store.dialect import AlchemyTx, Row, Tx
from app.store.engine import Database
from app.store.opening import unopened
from app.store.reads import EventRow, decode_events
from app.store.revision import require_head, revision_of
from app.store.rollouts import note, root_in_logs
from app.store.schema import events, group_changes, incarnations, open_turns, sessions

DERIVED = (sessions, events, open_turns)
"""The log and the rows that are derived from it."""


class Log(NamedTuple):
    """All events of a session, at least one, and the state that they fold to.

    `root_id` is what the logs of its line of parents say, too.
    """

    session: Session
    events: Sequence[Recorded]
    root_id: str | None


def _updated_at(log: Log) -> float:
    """When the session last changed; that a turn was claimed is no change."""
    return next(recorded.at for recorded in reversed(log.events) if not isinstance(recorded.event, TurnOpened))


def _weight_version(log: Log) -> int | None:
    """The largest of its committed turns, discarded ones too, that is a number."""
    turns = (recorded.event for recorded in log.events if isinstance(recorded.event, TurnCommitted))
    versions = (version for turn in turns if (version := largest_version(turn)) is not None)
    return max(versions, default=None)


def _engine(log: Log) -> str | None:
    """That of its newest committed turn, live or discarded."""
    turns = (recorded.event for recorded in reversed(log.events) if isinstance(recorded.event, TurnCommitted))
    return next((turn.engine for turn in turns), None)


HEAD: Mapping[str, Callable[[Log], Any]] = {
    "version": lambda log: log.session.version,
    "status": lambda log: log.session.status,
    "open_turns": lambda log: len(_held(log)),
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
}
"""Every column of `sessions` but the key, and how it follows from the log."""

OPEN_TURN: Mapping[str, Callable[[Log, OpenTurn], Any]] = {
    "turn": lambda log, held: held.turn,
    "parent_turn": lambda log, held: held.parent,
    "incarnation": lambda log, held: held.incarnation,
    "body_hash": lambda log, held: held.body_hash,
    "retry_key": lambda log, held: held.retry_key,
    "adapter": lambda log, held: held.adapter,
    "opened_at": lambda log, held: log.events[held.fence - 1].at,
}
"""Every column of `open_turns` but the key, and how it follows from the log."""


class Difference(msgspec.Struct, frozen=True):
    """A stored value that is not the log's. `place` is `sessions.<column>` or `open_turns[<fence>].<column>`.

    Without a column the whole row is meant, as an object of its columns: None where there is none.
    """

    session_id: str
    place: str
    stored: Any
    from_log: Any

    def __str__(self) -> str:
        return f"{self.place} is {_shown(self.stored)}, the log says {_shown(self.from_log)}"


class Examined(msgspec.Struct, frozen=True):
    """What was found of one session. `unreadable`: why its log cannot be folded; nothing is derived then.

    `has_log` False: rows of which the log knows nothing; they are left as they are.
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

_head = select(*(sessions.c[name] for name in _COLUMNS)).where(sessions.c.session_id == bindparam("sid"))
_open = (
    select(open_turns.c.fence, *(open_turns.c[name] for name in _OPEN_COLUMNS))
    .where(open_turns.c.session_id == bindparam("sid"))
    .order_by(open_turns.c.fence)
)
_log = (
    select(events.c.seq, events.c.at, events.c.type, events.c.version, events.c.data)
    .where(events.c.session_id == bindparam("sid"))
    .order_by(events.c.seq)
)
_set_head = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("sid"))
    .values({name: bindparam(f"new_{name}") for name in _COLUMNS})
)
_insert_head = insert(sessions)
_note_group = insert(group_changes)
_drop_open = delete(open_turns).where(open_turns.c.session_id == bindparam("sid"))
_insert_open = insert(open_turns)
_living = (
    select(incarnations.c.id, incarnations.c.pid, incarnations.c.host)
    .where(not_(sql.holder_is_dead))
    .order_by(incarnations.c.id)
)


def session_ids(connection: Connection, tables: Sequence[Table], after: str, limit: int) -> list[str]:
    """The next ids after `after` that any of the tables holds, in the database's own order.

    Each table is asked for a page of its own, so that a page costs no more than its sessions do.
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
    """Raises StartupError where the database cannot be opened, or its tables are not those that this code reads."""
    try:
        found = await database.read(revision_of)
    except DBAPIError as error:
        raise unopened(database.url, error) from error
    require_head(found)


def read_log(tx: Tx, session_id: str) -> Log | None:
    """The whole log, decoded and folded; None where there is none. Raises UnknownEvent, also for a gap."""
    recorded = decode_events(EventRow(*row) for row in tx.all(_log, {"sid": session_id}))
    return folded(session_id, recorded, partial(root_in_logs, tx))


def folded(session_id: str, recorded: Sequence[Recorded], root: Callable[[str, str | None], str | None]) -> Log | None:
    """`root` says which is the root of a session with that parent. Raises UnknownEvent."""
    session = fold(session_id, recorded)
    if session is None:
        return None
    return Log(session, recorded, root(session_id, session.config.parent))


def examine(connection: Connection, session_id: str) -> Examined:
    """Compare a session's rows with its log; on a store that is being written too.

    PostgreSQL reads each statement as of its own moment, so a session that moves meanwhile can look wrong. The log
    is read first: what differed only for that reason cannot be found a second time just as it was.
    """
    tx = AlchemyTx(connection)
    found, _ = _examine(tx, session_id)
    while not found.sound:
        again, _ = _examine(tx, session_id)
        if again == found:
            break
        found = again
    return found


def mend(tx: Tx, session_id: str) -> Examined:
    """Write what the log says, where something else is stored; returns what was found before.

    A session without a log, or with one that cannot be read, is left as it is. The groups that the head named and
    now names are noted as changed.
    """
    tx.lock(sql.lock_head, {"sid": session_id})
    found, log = _examine(tx, session_id)
    if log is None or found.sound:
        return found
    head = head_row(log)
    before = {one.stored for one in found.differences if one.place == "sessions.group_id"}
    tx.insert(_note_group, [{"group_id": group} for group in before | {head["group_id"]} if group is not None])
    for root_id in {one.stored for one in found.differences if one.place == "sessions.root_id"} | {head["root_id"]}:
        note(tx, None, root_id)
    if not tx.run(_set_head, {"sid": session_id, **{f"new_{name}": value for name, value in head.items()}}):
        tx.insert(_insert_head, [{"session_id": session_id, **head}])
    tx.run(_drop_open, {"sid": session_id})
    rows = [{"session_id": session_id, "fence": fence, **row} for fence, row in open_rows(log).items()]
    tx.insert(_insert_open, rows)
    return found


def living(connection: Connection, lease_s: float) -> list[tuple[int, int, str]]:
    """Processes that may be serving this store: incarnation, pid, host. They have beaten within `lease_s` seconds."""
    return [(row[0], row[1], row[2]) for row in connection.execute(_living, {"lease_s": lease_s})]


def differences(tx: Tx, session_id: str, log: Log | None) -> list[Difference]:
    """Where the stored rows are not what follows from the log."""
    head = tx.one(_head, {"sid": session_id})
    opened = tx.all(_open, {"sid": session_id})
    found = _compared(session_id, "sessions", _named(_COLUMNS, head), None if log is None else head_row(log))
    stored = {row[0]: _named(_OPEN_COLUMNS, row[1:]) for row in opened}
    expected = {} if log is None else open_rows(log)
    for fence in sorted(stored.keys() | expected.keys()):
        found += _compared(session_id, f"open_turns[{fence}]", stored.get(fence), expected.get(fence))
    return found


def _examine(tx: Tx, session_id: str) -> tuple[Examined, Log | None]:
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


def _held(log: Log) -> list[OpenTurn]:
    return [] if log.session.open_turn is None else [log.session.open_turn]


def head_row(log: Log) -> dict[str, Any]:
    """Every column of `sessions` but the key."""
    return {name: derive(log) for name, derive in HEAD.items()}


def open_rows(log: Log) -> dict[int, dict[str, Any]]:
    """By fence every column of `open_turns` but the key."""
    return {held.fence: {name: derive(log, held) for name, derive in OPEN_TURN.items()} for held in _held(log)}


def _shown(value: Any) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()
