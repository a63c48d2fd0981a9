"""What the database says of archives: which sessions may leave, the index of those that left, and the operations.

A row of `archived` names a session and a file that may hold it:

    writing     the file is being written; the session is in the database
    leaving     the session is in the file and nowhere else; some of its content still has to be deleted
    archived    it is in the file and nowhere else
    copy        the file has a copy of a session that is in the database: it changed meanwhile, or was imported
    erasing     the session must leave the file
    erased      the file it was in is gone, and the id is never used again

Every operation of a run checks the fence of the lease `archive`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)

from app.crash_points import reach
from app.domain.events import SessionClosed, decode
from app.domain.groups import GroupKey
from app.domain.patterns import ALL_RUNS
from app.domain.selection import Selection
from app.features.archive.schema import archived, marks_of
from app.features.groups.reads import ACKNOWLEDGEMENTS, uncounted_in
from app.features.groups.schema import groups, is_finished
from app.features.objects.schema import dead_objects, queue_erased, queue_objects
from app.store import pins, rollouts
from app.store import statements as sql
from app.store.content import matches
from app.store.dialect import StorePoints, Tx, oldest_tx
from app.store.feed import FORGOTTEN, Position, forgotten_place, select_forgotten
from app.store.incarnations import holds_lease
from app.store.log import BaseOperation
from app.store.log_sessions import Erase
from app.store.schema import (
    annotation_columns,
    blobs,
    chunks,
    events,
    refused_replies,
    sessions,
    snapshots,
    store_meta,
    turns,
)
from app.store.selection import GroupFilter

LEASE = "archive"

_NOT_IN_FILES = {"session_id", "tx", "position", "location", "written_at", "absorbed"}
CONTENT: dict[Any, list[Column[Any]]] = {
    table: [column for column in table.columns if column.name not in _NOT_IN_FILES]
    for table in (events, turns, blobs, chunks, annotation_columns, refused_replies)
}
"""The tables whose rows leave, and their columns that do: a place in the order of commits, when a turn was written and
which late attempts it took are the database's."""

LARGEST_BYTES = 256 << 20
"""A rollout with more content than this stays: it would be one transaction of an import."""

LARGEST_EVENTS = 64 << 20
"""So does one with more bytes of events."""

_ERASED = frozenset({"erasing", "erased"})
"""States of a session that no file may get again, and none brings back."""

DROPPED_AT_ONCE = 16
"""Rows of content, of at most about 1 MiB each, that one transaction deletes: SQLite overwrites what it frees."""


class StoredRows(NamedTuple):
    """A session's head, its group's row in the feed, and its rows by table: the columns of `CONTENT`."""

    head: dict[str, Any]
    feed: dict[str, Any] | None
    rows: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def session_id(self) -> str:
        return str(self.head["session_id"])

    @property
    def identity(self) -> tuple[str, float, int]:
        """As `identities` gives it."""
        return self.head["body_hash"], self.head["created_at"], self.head["version"]

    @property
    def size(self) -> int:
        """Bytes of its content, as stored."""
        values = (value for rows in self.rows.values() for row in rows for value in row.values())
        return sum(len(value) for value in values if isinstance(value, bytes))


class Rollout(NamedTuple):
    root_id: str
    sessions: Sequence[StoredRows]

    @property
    def size(self) -> int:
        return sum(session.size for session in self.sessions)


class Place(NamedTuple):
    """Where a walk over the roots goes on: behind this one, in the order in which they were closed."""

    closed_at: float
    session_id: str


class Candidates(NamedTuple):
    """Roots that may leave, how many may not, and the last root that was looked at; None at the end."""

    roots: list[Place]
    left: int
    after: Place | None


# Which may leave.

_is_closed = sessions.c.status == "closed"
_members = sessions.alias("members")


def _may_leave(points: StorePoints) -> ColumnElement[bool]:
    """Condition on roots: the rollout is finished, and nothing of it is in a checkpoint."""
    of_member = _members.c.root_id == sessions.c.session_id, _members.c.root_id.is_not(None)
    pinned_member = exists().where(*of_member, pins.is_pinned(points, _members))
    return is_finished & ~pins.is_pinned(points) & ~pinned_member


def candidates(
    connection: Connection, points: StorePoints, cutoff: float, after: Place, limit: int, wanted: Selection
) -> Candidates:
    """Roots of whole rollouts that may leave: closed at or before `cutoff`, with a reward or failed, in no checkpoint.
    Those of a group leave once it is acknowledged and all of its rollouts that count may; evaluations wait for no
    acknowledgement."""
    place, may_leave = tuple_(sessions.c.closed_at, sessions.c.session_id), _may_leave(points)
    query = (
        select(sessions.c.closed_at, sessions.c.session_id, sessions.c.run, sessions.c.group_id)
        .where(
            _is_closed,
            sessions.c.closed_at <= cutoff,
            place > after,
            rollouts.is_root(),
            may_leave,
            ACKNOWLEDGEMENTS.is_given,
            *GroupFilter(**wanted.run_and_group).of(sessions),
        )
        .order_by(sessions.c.closed_at, sessions.c.session_id)
        .limit(limit)
    )
    rows = connection.execute(query).all()
    last = Place(rows[-1][0], rows[-1][1]) if len(rows) == limit else None
    if wanted.metadata:
        matching = matches(connection, [row[1] for row in rows], wanted.metadata)
        rows = [row for row in rows if matching.get(row[1])]
    keys = sorted({GroupKey(row[2], row[3]) for row in rows if row[3] is not None})
    waiting = select(sessions.c.session_id, sessions.c.run, sessions.c.group_id).where(
        rollouts.among(keys),
        or_(sessions.c.status == "open", _is_closed),
        rollouts.is_root(),
        or_(sessions.c.status == "open", sessions.c.closed_at > cutoff, ~may_leave),
    )
    waiting_for = {row[0]: GroupKey(row[1], row[2]) for row in connection.execute(waiting)}
    gone = uncounted_in(connection, sorted(set(waiting_for.values())))
    held = {key for session_id, key in waiting_for.items() if session_id not in gone}
    roots = [Place(row[0], row[1]) for row in rows if (row[2], row[3]) not in held]
    return Candidates(roots, len(rows) - len(roots), last)


def _stored_bytes(connection: Connection, root_id: str) -> int:
    """About how many bytes of content a rollout has."""
    ids = _of_rollout(root_id).where(_is_closed)
    sizes = (
        (turns, func.coalesce(func.length(turns.c.tokens), 0) + func.coalesce(func.length(turns.c.exchange), 0)),
        (blobs, func.coalesce(func.length(blobs.c.data), 0)),
        (chunks, chunks.c.size),
        (annotation_columns, func.length(annotation_columns.c.data)),
        (refused_replies, func.length(refused_replies.c.data)),
    )
    of_each = (
        select(func.coalesce(func.sum(size), 0)).where(
            table.c.session_id.in_(ids), *((chunks.c.tombstoned_by.is_(None),) if table is chunks else ())
        )
        for table, size in sizes
    )
    return sum(int(connection.execute(query).scalar_one()) for query in of_each)


def read_rollout(connection: Connection, root_id: str) -> Rollout | None:
    """A rollout's closed sessions, the root first, with all rows but the bytes of chunks that are elsewhere.

    None if it has more than LARGEST_BYTES of content or LARGEST_EVENTS of events; if an erasure of one of them has
    begun and did not come to its end here; or if a transaction that began before its last event may still run: a reader
    of the log could then pass over what that one appends."""
    if _stored_bytes(connection, root_id) > LARGEST_BYTES:
        return None
    of_events = select(func.sum(func.length(events.c.data))).where(events.c.session_id.in_(_of_rollout(root_id)))
    if (connection.execute(of_events).scalar() or 0) > LARGEST_EVENTS:
        return None
    heads = connection.execute(select(sessions).where(sessions.c.session_id.in_(_of_rollout(root_id)), _is_closed))
    by_id = {head["session_id"]: dict(head) for head in heads.mappings()}
    oldest: int = connection.execute(select(oldest_tx())).scalar_one()
    newest = connection.execute(select(func.max(events.c.tx)).where(events.c.session_id.in_(list(by_id)))).scalar()
    if root_id not in by_id or newest is None or newest >= oldest:
        return None
    begun = select(archived.c.session_id).where(archived.c.session_id.in_(list(by_id)), archived.c.state.in_(_ERASED))
    if connection.execute(begun.limit(1)).first() is not None:
        return None
    of_group = groups.c.run == by_id[root_id]["run"], groups.c.group_id == by_id[root_id]["group_id"]
    feed = connection.execute(select(groups).where(*of_group)).mappings().first()
    content: dict[str, dict[str, list[dict[str, Any]]]] = {one: {table.name: [] for table in CONTENT} for one in by_id}
    for table, columns in CONTENT.items():
        rows = select(table.c.session_id, *columns).where(table.c.session_id.in_(list(by_id)))
        for row in connection.execute(rows.order_by(*table.primary_key.columns)).mappings():
            values = dict(row)
            content[values.pop("session_id")][table.name].append(values)
    ids = [root_id, *sorted(by_id.keys() - {root_id})]
    return Rollout(root_id, [StoredRows(by_id[one], None if feed is None else dict(feed), content[one]) for one in ids])


def _of_rollout(root_id: Any) -> Any:
    return select(sessions.c.session_id).where(
        or_(sessions.c.session_id == root_id, (sessions.c.root_id == root_id) & sessions.c.root_id.is_not(None))
    )


def identities(connection: Connection, session_ids: Sequence[str]) -> dict[str, tuple[str, float, int]]:
    """What tells apart two sessions of one id, and a session from what it was, for those that are there."""
    query = select(sessions.c.session_id, sessions.c.body_hash, sessions.c.created_at, sessions.c.version)
    rows = connection.execute(query.where(sessions.c.session_id.in_(session_ids)))
    return {row[0]: (row[1], row[2], row[3]) for row in rows}


# The index.


class Line(NamedTuple):
    """What the index says of a session: its rollout's root, which generation of its run's name it was, and what retries
    of its turns are told by."""

    session_id: str
    root_id: str
    name: str | None
    generation: int | None
    frees_name: bool | None
    run: str
    marks: bytes


class Indexed(NamedTuple):
    file: str
    state: str
    line: Line

    @property
    def session_id(self) -> str:
        return self.line.session_id


_line = [archived.c[name] for name in Line._fields]
_index = select(archived.c.file, archived.c.state, *_line)


def _indexed(rows: Iterable[Any]) -> list[Indexed]:
    return [Indexed(file, state, Line(*line)) for file, state, *line in rows]


def line_of(session: StoredRows, root_id: str) -> Line:
    """Of a closed session. Raises UnknownEvent."""
    head = session.head
    log = [decode(row["type"], row["version"], row["data"]) for row in session.rows[events.name]]
    frees_name = None
    if head["name"] is not None:
        frees_name = [event.reason for event in log if isinstance(event, SessionClosed)][-1] == "finished"
    return Line(session.session_id, root_id, head["name"], head["generation"], frees_name, head["run"], marks_of(log))


def _is(table: FromClause, *states: str) -> ColumnElement[bool]:
    """Spelled as the condition of the index, which SQLite compares as text."""
    return table.c.state.in_([literal_column(f"'{state}'") for state in states])


_is_unfinished = _is(archived, "writing", "leaving", "erasing")


def unfinished(connection: Connection, most: int = 10_000) -> list[Indexed]:
    """What a run or an erasure has left to do."""
    query = _index.where(_is_unfinished).order_by(archived.c.state.desc(), archived.c.session_id).limit(most)
    return _indexed(connection.execute(query))


def erasing_files(connection: Connection) -> set[str]:
    """The files that sessions must leave."""
    files = select(archived.c.file).where(_is_unfinished, _is(archived, "erasing")).distinct()
    return set(connection.execute(files).scalars())


def of_file(connection: Connection, file: str) -> list[Indexed]:
    return _indexed(connection.execute(_index.where(archived.c.file == file)))


def has_left(connection: Connection, file: str) -> bool:
    """Is the file the only place of a session?"""
    return connection.execute(_has_left, {"in_file": file}).first() is not None


def have_objects(connection: Connection, session_ids: Sequence[str]) -> bool:
    """Do replay payloads of these sessions, which are not in the database, wait for their deletion?"""
    gone = dead_objects.c.session_id.in_(session_ids) & ~exists().where(
        sessions.c.session_id == dead_objects.c.session_id
    )
    return connection.execute(select(dead_objects.c.name).where(gone).limit(1)).first() is not None


def of_session(connection: Connection, session_id: str) -> list[Indexed]:
    """A session in files, and for a root its whole rollout."""
    query = _index.where(or_(archived.c.session_id == session_id, archived.c.root_id == session_id))
    return _indexed(connection.execute(query))


def roots_of_run(connection: Connection, run: str) -> list[str]:
    """The roots of the run's rollouts that have left the database, or still have to leave a file."""
    left = select(archived.c.root_id).where(archived.c.run == run, _is(archived, "leaving", "archived", "erasing"))
    return list(connection.execute(left.distinct()).scalars())


_file_is = archived.c.file == bindparam("in_file")
_of_sid = archived.c.session_id == bindparam("sid")
_set_state = update(archived).values(state=bindparam("to"))
_turn = _set_state.where(_of_sid, _file_is, archived.c.state == bindparam("was"))
_turn_file = _set_state.where(_file_is, archived.c.state == bindparam("was"))
_drop_line = delete(archived).where(_of_sid, _file_is)
_drop_file = delete(archived).where(_file_is, archived.c.state == bindparam("was"))
_other = archived.alias("other")
_begin_erasing = (
    update(archived)
    .where(
        or_(_of_sid, archived.c.root_id == bindparam("sid")),
        or_(
            _is(archived, "leaving", "archived"),
            _is(archived, "writing", "copy")
            & ~exists().where(
                _other.c.session_id == archived.c.session_id, _is(_other, "leaving", "archived", "erasing")
            ),
        ),
    )
    .values(state="erasing")
)
_erase_copies = (
    update(archived)
    .where(
        _is(archived, "writing", "copy"),
        archived.c.session_id.in_(
            select(_other.c.session_id).where(_other.c.file == bindparam("in_file"), _is(_other, "erasing", "erased"))
        ),
    )
    .values(state="erasing")
)
_state_of = select(archived.c.state).where(_of_sid, _file_is).with_for_update()


class Fenced(BaseOperation, frozen=True):
    """An operation of the holder of the lease; without it nothing is written, and `apply` gives None."""

    fence: int

    def apply(self, tx: Tx) -> Any:
        return self.write(tx) if holds_lease(tx, LEASE, self.fence) else None

    def write(self, tx: Tx) -> Any:
        raise NotImplementedError


class Reserve(Fenced, frozen=True):
    """Say which sessions a file will hold, before it is written: an erasure finds them there."""

    file: str
    lines: Sequence[Line]

    def write(self, tx: Tx) -> bool:
        rows = [{**line._asdict(), "file": self.file, "state": "writing"} for line in self.lines]
        tx.insert(insert(archived), rows)
        return True


class Forget(BaseOperation, frozen=True):
    """A rollout is in the file: it leaves the database. False, and nothing is written, if anything was added since it
    was read, a checkpoint has it, or an erasure of it has begun.

    The many rows of a large one are deleted by `DropContent`, in steps.
    """

    root_id: str
    fence: int
    file: str
    versions: Mapping[str, int]
    """The rollout's sessions, and the last event of each."""

    @property
    def session_id(self) -> str:
        """One that locks several heads runs alone: a batch may wait for none but its own."""
        return self.root_id if len(self.versions) == 1 else ""

    @property
    def size(self) -> int:
        return 1 << 20

    def apply(self, tx: Tx) -> bool | None:
        if not holds_lease(tx, LEASE, self.fence):
            return None
        if pins.is_restoring(tx, ALL_RUNS):
            return False
        present = {row[0] for row in tx.all(_present, {"sid": self.root_id})}
        if present != self.versions.keys():
            return False
        for session_id in sorted(self.versions):
            tx.lock(sql.lock_head, {"sid": session_id})
            head = tx.one(sql.head, {"sid": session_id})
            if head is None or tuple(head[:3]) != (self.versions[session_id], "closed", 0):
                return False
            if pins.pinned_upto(tx, session_id):
                return False
            states = {file: state for file, state, _ in tx.all(_files_of, {"sid": session_id})}
            if states.get(self.file) != "writing" or not _ERASED.isdisjoint(states.values()):
                return False
        group = tx.one(_key_of, {"sid": self.root_id})
        tx.one(_lock_meta, {})  # Else of two rollouts that leave at once on PostgreSQL the lower place may be kept.
        gone = tx.one(select_forgotten, {})
        last = forgotten_place(None if gone is None else gone[0])
        for session_id in sorted(self.versions):
            place = tx.one(_last_place, {"sid": session_id})
            last = max(last, Position(*place)) if place is not None else last
            tx.run(_turn, {"sid": session_id, "in_file": self.file, "was": "writing", "to": "leaving"})
            for statement in _drop_at_once:
                tx.run(statement, {"sid": session_id})
            tx.run(queue_objects, {"sid": session_id})
            _drop_content(tx, session_id, self.file)
        tx.run(_forget_place, {})
        tx.insert(insert(store_meta), [{"key": FORGOTTEN, "value": f"{last.tx}.{last.position}"}])
        if group is not None:
            rollouts.note(tx, *group)
        reach("in_archive")
        return True


class DropContent(Fenced, frozen=True):
    """Delete some of what a session that has left still has in the database; True while there may be more."""

    durable: ClassVar[bool] = False
    file: str
    session_id: str

    @property
    def size(self) -> int:
        return DROPPED_AT_ONCE << 20

    def write(self, tx: Tx) -> bool:
        if tx.one(sql.head, {"sid": self.session_id}) is not None:
            return False  # one that is being erased, and has not left
        return _drop_content(tx, self.session_id, self.file)


class EndFile(Fenced, frozen=True):
    """A file that was being written: sessions that did not leave have a copy in it, unless none has left. Then it has
    been deleted, or is for those that are being erased."""

    file: str

    def write(self, tx: Tx) -> bool:
        if tx.one(_has_left, {"in_file": self.file}) is not None:
            tx.run(_turn_file, {"in_file": self.file, "was": "writing", "to": "copy"})
        else:
            tx.run(_drop_file, {"in_file": self.file, "was": "writing"})
        return True


class Move(Fenced, frozen=True):
    """A file was written anew as `new`, with the sessions that `Reserve` named: their lines move."""

    old: str
    new: str

    def write(self, tx: Tx) -> bool:
        for session_id, state in tx.all(_lines_of, {"in_file": self.old}):
            if tx.one(_state_of, {"sid": session_id, "in_file": self.new}) is not None:
                tx.run(_turn, {"sid": session_id, "in_file": self.new, "was": "writing", "to": state})
                tx.run(_drop_line, {"sid": session_id, "in_file": self.old})
        return True


class EraseCopies(Fenced, frozen=True):
    """The sessions that must leave the file must also leave those that hold what they were before. They come later: the
    log that says of an erasure is the one that the session left with, unless this file is damaged."""

    file: str

    def write(self, tx: Tx) -> bool:
        tx.run(_erase_copies, {"in_file": self.file})
        return True


class EndErasing(EraseCopies, frozen=True):
    """A file is gone, and with it the sessions that had to leave it."""

    def write(self, tx: Tx) -> bool:
        tx.run(_turn_file, {"in_file": self.file, "was": "erasing", "to": "erased"})
        return super().write(tx)


class BeginErasing(BaseOperation, frozen=True):
    """A session, and for a root its rollout, must leave every file. Durable: an erasure goes on after a crash."""

    session_id: str

    def apply(self, tx: Tx) -> None:
        tx.run(_begin_erasing, {"sid": self.session_id})
        for (session_id,) in tx.all(_without_head, {"sid": self.session_id}):
            queue_erased(tx, session_id)


Imported = Literal["imported", "there", "erased", "elsewhere"]
"""What became of a rollout of a file: it was written; it is in the database; it was erased; its sessions are archived
in another file, or in none: this one may hold what they were before."""


class Import(Fenced, frozen=True):
    """Write a rollout's rows again, with new places at the end of the order of commits, if `file` is the one that the
    index names for all of its sessions."""

    file: str
    rollout: Rollout

    @property
    def size(self) -> int:
        return min(self.rollout.size, 64 << 20)

    def write(self, tx: Tx) -> Imported:
        heads = [session.head for session in self.rollout.sessions]
        files = {head["session_id"]: tx.all(_files_of, {"sid": head["session_id"]}) for head in heads}
        states = {state for own in files.values() for file, state, root in own}
        if not _ERASED.isdisjoint(states):
            return "erased"
        lines = [
            {state for file, state, root in own if file == self.file and root == self.rollout.root_id}
            for own in files.values()
        ]
        if all("copy" in line for line in lines) and all(
            tx.one(sql.head, {"sid": head["session_id"]}) is not None for head in heads
        ):
            return "there"
        if len(files) != len(heads) or any(line.isdisjoint(("leaving", "archived")) for line in lines):
            return "elsewhere"
        pins.keep(tx)
        for session_id, own in files.items():
            for file, state, _ in own:
                while state == "leaving" and _drop_content(tx, session_id, file):
                    pass
            tx.run(_imported, {"sid": session_id})
        tx.insert(insert(sessions), heads)
        for table in CONTENT:
            for session in self.rollout.sessions:
                _insert_rows(tx, table, session)
        feed = self.rollout.sessions[0].feed
        if feed is not None and tx.one(_group, {"of_run": feed["run"], "gid": feed["group_id"]}) is None:
            tx.insert(insert(groups), [feed])
        rollouts.note(tx, heads[0]["run"], heads[0]["group_id"])
        reach("in_import")
        return "imported"


class TellErased(Fenced, frozen=True):
    """An archived session is erased: its log comes back without content, and ends with the event that says so. Else no
    follower of the log or of exports would learn of it. False if it is there already."""

    session: StoredRows
    at: float

    @property
    def size(self) -> int:
        return sum(len(row["data"]) for row in self.session.rows[events.name])

    def write(self, tx: Tx) -> bool:
        session_id = self.session.session_id
        if tx.one(sql.head, {"sid": session_id}) is not None:
            return False
        pins.keep(tx)
        tx.insert(insert(sessions), [self.session.head])
        _insert_rows(tx, events, self.session)
        Erase(session_id, self.at).apply(tx)
        return True


def _insert_rows(tx: Tx, table: Any, session: StoredRows) -> None:
    rows = [{**row, "session_id": session.session_id} for row in session.rows[table.name]]
    if table is events and tx.positions is not None:
        rows = [{**row, "position": next(tx.positions)} for row in rows]
    if rows:
        tx.insert(insert(table), rows)


def _drop_content(tx: Tx, session_id: str, file: str) -> bool:
    room = DROPPED_AT_ONCE
    for table in _IN_STEPS:
        rows = tx.all(_some[table.name], {"sid": session_id, "most": room})
        names = [f"key_{column.name}" for column in _key(table)]
        tx.run_all(_drop_some[table.name], [{"sid": session_id, **dict(zip(names, row, strict=True))} for row in rows])
        room -= len(rows)
        if not room:
            return True
    tx.run(_turn, {"sid": session_id, "in_file": file, "was": "leaving", "to": "archived"})
    return False


_without_head = (
    select(archived.c.session_id)
    .where(
        or_(_of_sid, archived.c.root_id == bindparam("sid")),
        ~exists().where(sessions.c.session_id == archived.c.session_id),
    )
    .distinct()
    .order_by(archived.c.session_id)
)
_files_of = (
    select(archived.c.file, archived.c.state, archived.c.root_id)
    .where(_of_sid)
    .order_by(archived.c.file)
    .with_for_update()
)
_imported = _set_state.where(_of_sid, archived.c.state == "archived").values(state="copy")
_group = select(groups.c.group_id).where(groups.c.run == bindparam("of_run"), groups.c.group_id == bindparam("gid"))
_key_of = select(sessions.c.run, sessions.c.group_id).where(sql.of_session(sessions))
_present = _of_rollout(bindparam("sid", type_=sessions.c.session_id.type)).where(
    or_(sessions.c.status == "open", _is_closed)
)
_last_place = (
    select(events.c.tx, events.c.position)
    .where(sql.of_session(events))
    .order_by(events.c.tx.desc(), events.c.position.desc())
    .limit(1)
)
_lock_meta = select(store_meta.c.value).where(store_meta.c.key == "epoch").with_for_update()
_forget_place = delete(store_meta).where(store_meta.c.key == FORGOTTEN)
_has_left = (
    select(archived.c.session_id)
    .where(_file_is, or_(archived.c.state == "leaving", archived.c.state == "archived"))
    .limit(1)
)
_lines_of = select(archived.c.session_id, archived.c.state).where(_file_is).order_by(archived.c.session_id)
_drop_at_once = [delete(table).where(sql.of_session(table)) for table in (events, refused_replies, snapshots, sessions)]
_IN_STEPS = (turns, blobs, chunks, annotation_columns)


def _key(table: Any) -> list[Any]:
    return list(table.primary_key.columns)[1:]


_some = {
    table.name: select(*_key(table)).where(sql.of_session(table)).order_by(*_key(table)).limit(bindparam("most"))
    for table in _IN_STEPS
}
_drop_some = {
    table.name: delete(table).where(
        sql.of_session(table), *(column == bindparam(f"key_{column.name}") for column in _key(table))
    )
    for table in _IN_STEPS
}
