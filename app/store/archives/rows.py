"""Moves sessions between the database and archives: which may be archived, and the operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Connection, bindparam, delete, exists, func, insert, or_, select, tuple_, update

from app.crash_points import reach
from app.domain.events import EXPORTED
from app.store import pins
from app.store import statements as sql
from app.store.archives.format import TABLES, ArchivedRows, ArchivedSession, Place
from app.store.dialect import Tx, now
from app.store.log import BaseOperation, StoreOperation, is_archived
from app.store.packs.rows import holds_token
from app.store.reads import Position
from app.store.schema import (
    archived_sessions,
    archives,
    checkpoint_sessions,
    checkpoints,
    chunks,
    events,
    incarnations,
    sessions,
    turns,
)

DROPPED_AT_ONCE = 16
"""Chunks, and as many times as many turns, that one transaction deletes: SQLite overwrites what it frees."""

MOST_BYTES = 64 << 20
"""The most bytes that a session which is brought back counts in the writer's queue, which holds 256 MiB."""

_roots = sessions.alias("roots")
_members = sessions.alias("members")
_changed_since_cut = exists().where(
    checkpoint_sessions.c.session_id == sessions.c.session_id,
    checkpoints.c.id == checkpoint_sessions.c.checkpoint_id,
    checkpoints.c.state != "deleting",
    checkpoint_sessions.c.seq < sessions.c.version,
)
"""Condition on heads: a restore of a checkpoint would take the session back."""

_root_is_settled = ~exists().where(
    _roots.c.session_id == sessions.c.root_id,
    or_(
        _roots.c.status == "open",
        (_roots.c.status == "closed")
        & _roots.c.reward.is_not(None)
        & _roots.c.reward.is_distinct_from(sessions.c.reward),
    ),
)
_members_are_settled = ~exists().where(
    _members.c.root_id == sessions.c.session_id,
    _members.c.root_id.is_not(None),
    or_(
        _members.c.status == "open",
        (_members.c.status == "closed")
        & sessions.c.reward.is_not(None)
        & _members.c.reward.is_distinct_from(sessions.c.reward),
    ),
)


def candidates(connection: Connection, cutoff: float, after: tuple[float, str], limit: int) -> list[tuple[float, str]]:
    """Sessions that may be archived, closed at or before `cutoff`, after `after` in the order of (closed_at, id).

    Their rollouts have ended and have their reward, and no checkpoint needs them.
    """
    place = tuple_(sessions.c.closed_at, sessions.c.session_id)
    query = (
        select(sessions.c.closed_at, sessions.c.session_id)
        .where(
            sessions.c.status == "closed",
            sessions.c.closed_at <= cutoff,
            place > after,
            sql.in_database,
            ~_changed_since_cut,
            _root_is_settled,
            _members_are_settled,
        )
        .order_by(sessions.c.closed_at, sessions.c.session_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def read_whole(connection: Connection, session_ids: Sequence[str]) -> list[ArchivedSession]:
    """These sessions with all of their rows. Chunks in packs still have their places instead of data."""
    heads = connection.execute(select(sessions).where(sessions.c.session_id.in_(session_ids)))
    found = {
        head["session_id"]: ArchivedSession(dict(head), {table.name: [] for table in TABLES})
        for head in heads.mappings()
    }
    for table in TABLES:
        of_table = select(table).where(table.c.session_id.in_(session_ids)).order_by(*table.primary_key.columns)
        for row in connection.execute(of_table).mappings():
            values = dict(row)
            if (session := found.get(values.pop("session_id"))) is not None:
                rows = session.rows[table.name]
                assert isinstance(rows, list)
                rows.append(values)
    return [found[session_id] for session_id in session_ids if session_id in found]


def live_bytes(connection: Connection, session_ids: Sequence[str]) -> dict[str, int]:
    """Bytes of the sessions' live replay payloads, before compression; nothing for a session without."""
    query = (
        select(chunks.c.session_id, func.sum(chunks.c.size))
        .where(chunks.c.session_id.in_(session_ids), chunks.c.tombstoned_by.is_(None))
        .group_by(chunks.c.session_id)
    )
    return {row[0]: int(row[1]) for row in connection.execute(query)}


class Listed(msgspec.Struct, frozen=True):
    """An archive. `created_at` is the database's clock; `sessions` counts those that are in it and nowhere else;
    `is_being_written` by a process that is alive."""

    id: int
    name: str
    created_at: float
    sessions: int
    is_being_written: bool


def listed(connection: Connection) -> list[Listed]:
    """All archives, oldest first."""
    columns = (archives.c.id, archives.c.name, archives.c.created_at)
    query = (
        select(*columns, func.count(archived_sessions.c.session_id), archives.c.writer)
        .select_from(archives.outerjoin(archived_sessions, archived_sessions.c.archive_id == archives.c.id))
        .group_by(*columns, archives.c.writer)
        .order_by(archives.c.id)
    )
    alive = set(connection.execute(select(incarnations.c.id).where(incarnations.c.ended_at.is_(None))).scalars())
    return [Listed(row[0], row[1], row[2], row[3], row[4] in alive) for row in connection.execute(query)]


def sessions_of(connection: Connection, archive: str) -> dict[str, int]:
    """The sessions that are in an archive and nowhere else, with their row groups."""
    query = (
        select(archived_sessions.c.session_id, archived_sessions.c.row_group)
        .join_from(archived_sessions, archives, archives.c.id == archived_sessions.c.archive_id)
        .where(archives.c.name == archive)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def has_archives(connection: Connection) -> bool:
    """Is any session archived?"""
    query = select(archived_sessions.c.session_id).where(sql.is_in_archive).limit(1)
    return connection.execute(query).first() is not None


def left_over(connection: Connection, after: str, limit: int) -> list[str]:
    """Archived sessions behind `after` of which rows are still in the database."""
    query = (
        select(archived_sessions.c.session_id)
        .where(
            archived_sessions.c.session_id > after,
            sql.is_in_archive,
            or_(
                *(exists().where(table.c.session_id == archived_sessions.c.session_id) for table in (turns, chunks)),
            ),
        )
        .order_by(archived_sessions.c.session_id)
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


class AddArchive(StoreOperation, frozen=True):
    """Name an archive before its sessions are read. Returns its id. Durable: an object that has no row is nobody's.

    `writer` is the process that will call `EndArchive`; None: it has no sessions that an erasure could miss.
    """

    name: str
    writer: int | None

    def apply(self, tx: Tx) -> int:
        tx.insert(insert(archives), [{"name": self.name, "created_at": _clock(tx), "writer": self.writer}])
        row = tx.one(_id_of, {"named": self.name})
        assert row is not None
        return int(row[0])


class EndArchive(StoreOperation, frozen=True):
    """An archive is not being written any more. False: no session is in it, and it is given up.

    A session may be going into it in another transaction, if its writer was stopped: that one is waited for.
    """

    archive_id: int

    def apply(self, tx: Tx) -> bool:
        tx.one(_lock, {"id": self.archive_id})
        if tx.one(_any_of, {"id": self.archive_id}) is not None:
            tx.run(_written, {"id": self.archive_id})
            return True
        tx.run(_forget, {"id": self.archive_id})
        return False


class Archive(BaseOperation, frozen=True):
    """A session's rows are in an archive: delete those in the database. False: nothing was written, because the session
    has changed, the archive was given up, or a checkpoint needs the session.

    `last` is the place of its last event, `exported` that of its last one in `EXPORTED`. `DropArchived` deletes what is
    left.
    """

    session_id: str
    version: int
    archive_id: int
    row_group: int
    last: Position
    exported: Position

    @property
    def size(self) -> int:
        return 4096

    def apply(self, tx: Tx) -> bool:
        pins.keep(tx)
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or (head[0], head[1], head[2]) != (self.version, "closed", 0):
            return False
        if tx.one(_archive, {"id": self.archive_id}) is None or tx.one(_needed, {"sid": self.session_id}) is not None:
            return False
        if is_archived(tx, self.session_id):
            return False
        place = {"tx": self.last.tx, "position": self.last.position}
        exported = {"exported_tx": self.exported.tx, "exported_position": self.exported.position}
        row = {"session_id": self.session_id, "archive_id": self.archive_id, "row_group": self.row_group}
        tx.run(_forget_line, {"sid": self.session_id})  # from an earlier archive
        tx.insert(insert(archived_sessions), [{**row, **place, **exported}])
        for statement in _drop_small:
            tx.run(statement, {"sid": self.session_id})
        drop_some(tx, self.session_id)
        reach("in_archive")
        return True


class DropArchived(BaseOperation, frozen=True):
    """Delete some of the rows that an archived session still has in the database; True while there may be more."""

    durable: ClassVar[bool] = False
    session_id: str

    @property
    def size(self) -> int:
        return DROPPED_AT_ONCE << 20

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        return is_archived(tx, self.session_id) and drop_some(tx, self.session_id)


class BringBack(BaseOperation, frozen=True):
    """Write an archived session's rows into the database again. False: it is not at `place` any more."""

    session_id: str
    place: Place
    session: ArchivedSession

    @property
    def size(self) -> int:
        return min(self.session.size, MOST_BYTES)

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        line = tx.one(_line, {"sid": self.session_id})
        if line is None or (line[0], line[1]) != self.place:
            return False
        for table in TABLES:
            tx.run(_drop[table.name], {"sid": self.session_id})
            rows = [{**row, "session_id": self.session_id} for row in self.session.rows[table.name]]
            if table is events and not line[2]:  # a restore of the store has moved it in front of all transactions
                rows = [{**row, "tx": 0} for row in rows]
            tx.insert(_insert[table.name], rows)
        tx.run(_bring_back, {"sid": self.session_id})
        reach("in_bring_back")
        return True


class MoveArchived(StoreOperation, frozen=True):
    """Archived sessions are in another archive now, in these row groups; only those that are still in the old one, and
    only with the current token (`packs.rows.TakeKeeping`). Durable, so that the old archive may be deleted."""

    token: str
    old_id: int
    new_id: int
    row_groups: Mapping[str, int]

    def apply(self, tx: Tx) -> None:
        if not holds_token(tx, self.token):
            return
        for session_id, row_group in sorted(self.row_groups.items()):
            tx.run(_move, {"sid": session_id, "old": self.old_id, "new": self.new_id, "into": row_group})


class ForgetArchive(StoreOperation, frozen=True):
    """An archive without sessions is given up: nothing refers to it from now on. True if its objects may be deleted."""

    token: str
    name: str

    def apply(self, tx: Tx) -> bool:
        if not holds_token(tx, self.token):
            return False
        row = tx.one(_locked, {"named": self.name})
        if row is None:
            return True
        if tx.one(_any_of, {"id": row[0]}) is not None:
            return False
        return bool(tx.run(_forget, {"id": row[0]}))


class Places(NamedTuple):
    """Where a session stands in the order of commits: its last event, and its last one in `EXPORTED`."""

    last: Position
    exported: Position


def places_in(rows: ArchivedRows) -> Places:
    """Of a closed session's rows: one of its events is its closing, which is exported."""
    log = rows[events.name]
    every = [Position(row["tx"], row["position"]) for row in log]
    return Places(max(every), max(place for place, row in zip(every, log, strict=True) if row["type"] in EXPORTED))


def drop_some(tx: Tx, session_id: str) -> bool:
    """Delete some of the turns and chunks of an archived session; are there more?"""
    more = False
    for name, most in ((turns.name, 4 * DROPPED_AT_ONCE), (chunks.name, DROPPED_AT_ONCE)):
        found = tx.all(_some[name], {"sid": session_id, "most": most})
        tx.run_all(_drop_one[name], [{"sid": session_id, "first": row[0], "second": row[1]} for row in found])
        more = more or len(found) == most
    return more


def _clock(tx: Tx) -> float:
    row = tx.one(_now, {})
    assert row is not None
    return float(row[0])


_now = select(now())
_id_of = select(archives.c.id).where(archives.c.name == bindparam("named"))
_locked = _id_of.with_for_update()
_archive = select(archives.c.id).where(archives.c.id == bindparam("id")).with_for_update(read=True, key_share=True)
_lock = select(archives.c.id).where(archives.c.id == bindparam("id")).with_for_update()
_written = update(archives).where(archives.c.id == bindparam("id")).values(writer=None)
_forget = delete(archives).where(archives.c.id == bindparam("id"))
_any_of = select(archived_sessions.c.session_id).where(archived_sessions.c.archive_id == bindparam("id")).limit(1)

_of_line = sql.of_session(archived_sessions)
_line = (
    select(archives.c.name, archived_sessions.c.row_group, archived_sessions.c.tx)
    .join_from(archived_sessions, archives, archives.c.id == archived_sessions.c.archive_id)
    .where(_of_line)
)
_forget_line = delete(archived_sessions).where(_of_line)
_bring_back = update(archived_sessions).where(_of_line).values(archive_id=None, row_group=0)
_move = (
    update(archived_sessions)
    .where(_of_line, archived_sessions.c.archive_id == bindparam("old", type_=BigInteger))
    .values(archive_id=bindparam("new", type_=BigInteger), row_group=bindparam("into"))
)
_needed = select(sessions.c.session_id).where(sql.of_session(sessions), _changed_since_cut)

_insert = {table.name: insert(table) for table in TABLES}
_drop = {table.name: delete(table).where(sql.of_session(table)) for table in TABLES}
_drop_small = (
    *(statement for name, statement in _drop.items() if name not in (turns.name, chunks.name)),
    sql.drop_snapshot,
)
_turn_key, _chunk_key = (turns.c.turn, turns.c.choice_index), (chunks.c.fence, chunks.c.number)
_some = {
    table.name: select(*key).where(sql.of_session(table)).order_by(*key).limit(bindparam("most"))
    for table, key in ((turns, _turn_key), (chunks, _chunk_key))
}
_drop_one = {
    table.name: delete(table).where(sql.of_session(table), first == bindparam("first"), second == bindparam("second"))
    for table, (first, second) in ((turns, _turn_key), (chunks, _chunk_key))
}
