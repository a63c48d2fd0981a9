"""Sessions: their heads and lists of them, the log of one, and what a turn loads of one that is not in memory.

A list's page ends at a place (the last row's value and id); the next begins after it. A row is repeated only if its
value has changed meanwhile. Only `created_at`, the group and a status alone have an index: any other order or filter
reads every head, so that turns need not maintain more indexes (see `schema.sessions`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    CompoundSelect,
    Connection,
    Double,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    tuple_,
    union,
    union_all,
)
from sqlalchemy.types import TypeEngine

from app.domain import notes
from app.domain.events import DEFAULT_RUN, BlobsTombstoned, Failure, FailureKind, Recorded, UnknownEvent, decode
from app.domain.fleet import EngineVersions
from app.domain.groups import GroupKey, Played
from app.domain.session import Session, decode_session, fold
from app.errors import StoreDamaged
from app.store import pins, rollouts
from app.store.damage import SPAN, BrokenRow, Content, PageDamaged, as_bytes, attempt, attempt_or, of_readable, split
from app.store.dialect import CoreReads, Row, StorePoints, begins_with, contains, used_bytes
from app.store.ports import Database
from app.store.schema import (
    blobs,
    chunks,
    events,
    open_turns,
    refused_replies,
    sessions,
    snapshots,
    turns,
)
from app.store.selection import GroupFilter
from app.store.statements import ENDED, is_idle
from workers import codec
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparisonT

Status = Literal["open", "closed", "erased", "undone"]

SortOrder = Literal[
    "created_at",
    "updated_at",
    "reward",
    "turns",
    "engine_errors",
    "tool_errors",
    "weight_version",
    "running_since",
]

NULLABLE = frozenset({"reward", "weight_version"})
"""Columns that may be null: such sessions come last in either direction."""

COUNTED = 100_000
"""Counting stops here; beyond it only "more" is known."""

LISTED = 10_000
"""Ids in one statement: drivers accept some thirty thousand parameters."""


class HeadRow(msgspec.Struct, frozen=True):
    """A head: `version` is its last seq, times are seconds since the epoch, `running_since` of its oldest open turn."""

    session_id: str
    version: int
    status: Status
    turns: int
    group_id: str | None
    attempt: int | None
    reward: float | None
    weight_version: int | None
    engine: str | None
    created_at: float
    updated_at: float
    closed_at: float | None
    root_id: str | None
    name: str | None
    generation: int | None
    run: str
    evaluation: bool
    engine_errors: int
    tool_errors: int
    failed_kind: FailureKind | None
    note: str | None
    joined_tags: str | None
    running_since: float | None = None

    @property
    def tags(self) -> list[str]:
        return notes.parted(self.joined_tags)

    @property
    def failed(self) -> Failure | None:
        """Without its message, which only the log has."""
        return None if self.failed_kind is None else Failure(self.failed_kind)


_running_since = (
    select(func.min(open_turns.c.opened_at))
    .where(open_turns.c.session_id == sessions.c.session_id)
    .correlate(sessions)
    .scalar_subquery()
)
_STORED = HeadRow.__struct_fields__[:-4]
_ROW = (
    *(sessions.c[name] for name in _STORED),
    sessions.c.failed,
    sessions.c.note,
    sessions.c.tags,
    case((sessions.c.open_turns > 0, _running_since)),
)


RUNS_AT_ONCE = 100
"""Runs whose newest version one query reads."""


class HeadFilter(GroupFilter, frozen=True):
    """Conditions on heads; None: any. `idle`: without an open turn. `claimed_before`: with one that was claimed at or
    before this time. `among`: only these ids; `but`: ids to leave out; of both LISTED at most.

    `least_staleness`: the newest weight version is at least so many behind its run's, which is the newest of the run's
    sessions and of `engine_versions`. `begins` the beginning of the id, `tag` one of its tags, `annotated` the name of
    an annotation of the session itself, `unannotated` of one that it could have and has not.
    """

    status: Status | None = None
    idle: bool = False
    claimed_before: float | None = None
    among: Collection[str] | None = None
    but: Collection[str] = ()
    attempt: int | None = None
    engine: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    unrewarded: bool = False
    least_staleness: int | None = None
    engine_versions: EngineVersions = EngineVersions()
    begins: str | None = None
    tag: str | None = None
    annotated: str | None = None
    unannotated: str | None = None
    name: str | None = None
    generation: int | None = None
    evaluation: bool | None = None
    min_engine_errors: int | None = None
    min_tool_errors: int | None = None


Place = tuple[float | None, str]
"""The end of a page: the last row's value in the order, and its id."""


def list_heads(
    connection: Connection,
    wanted: HeadFilter,
    *,
    order: SortOrder,
    newest_first: bool,
    after: Place | None,
    limit: int,
    many: bool = True,
) -> list[HeadRow]:
    """The next heads after `after`. `newest_first`: descending.

    `many`: many heads match, so follow the order's index, if there is one. If few match, they are found first and then
    sorted.
    """
    value = _running_since if order == "running_since" else sessions.c[order] if many else sessions.c[order] + 0
    direction = [column.desc() if newest_first else column.asc() for column in (value, sessions.c.session_id)]
    if order in NULLABLE:
        direction[0] = direction[0].nulls_last()
    query = filtered(select(*_ROW), wanted).order_by(*direction).limit(limit)
    if after is not None:
        query = query.where(_after(value, after, newest_first=newest_first, nullable=order in NULLABLE))
    return [HeadRow(*row) for row in connection.execute(query)]


def load_head(connection: Connection, session_id: str) -> HeadRow | None:
    """One session's."""
    return next(iter(load_heads(connection, [session_id])), None)


def count_heads(connection: Connection, wanted: HeadFilter) -> int:
    """Number of heads; COUNTED + 1 if there are more."""
    matching = filtered(select(sessions.c.session_id), wanted).limit(COUNTED + 1).subquery()
    counted: int = connection.execute(select(func.count()).select_from(matching)).scalar_one()
    return counted


def some_ids(connection: Connection, wanted: HeadFilter, limit: int) -> list[str]:
    """The ids of at most `limit` sessions that match, in no order."""
    return list(connection.execute(filtered(select(sessions.c.session_id), wanted).limit(limit)).scalars())


def load_heads(connection: Connection, session_ids: Sequence[str], wanted: HeadFilter | None = None) -> list[HeadRow]:
    """The heads of these sessions that match `wanted`, in no order."""
    query = filtered(select(*_ROW), wanted or HeadFilter())
    parts = (session_ids[at : at + SPAN] for at in range(0, len(session_ids), SPAN))
    return [HeadRow(*row) for part in parts for row in connection.execute(query.where(sessions.c.session_id.in_(part)))]


def filtered(query: Select[Any], wanted: HeadFilter) -> Select[Any]:
    """The query, of heads that match."""
    head = sessions.c
    conditions: list[ColumnElement[bool] | None] = [
        *wanted.of(sessions),
        None if wanted.status is None else head.status == wanted.status,
        head.open_turns == 0 if wanted.idle else None,
        None if wanted.claimed_before is None else head.session_id.in_(_claimed(wanted.claimed_before)),
        None if wanted.among is None else head.session_id.in_(list(wanted.among)[:LISTED]),
        head.session_id.not_in(list(wanted.but)[:LISTED]) if wanted.but else None,
        None if wanted.attempt is None else head.attempt == wanted.attempt,
        None if wanted.engine is None else head.engine == wanted.engine,
        None if wanted.min_reward is None else head.reward >= wanted.min_reward,
        None if wanted.max_reward is None else head.reward <= wanted.max_reward,
        head.reward.is_(None) if wanted.unrewarded else None,
        None if wanted.least_staleness is None else _is_stale(wanted.least_staleness, wanted.engine_versions),
        None if wanted.begins is None else begins_with(head.session_id, wanted.begins),
        None if wanted.tag is None else _is_among(wanted.tag, head.tags),
        None if wanted.annotated is None else _is_among(wanted.annotated, head.annotated),
        None if wanted.unannotated is None else _lacks(wanted.unannotated),
        None if wanted.name is None else head.name.is_not(None) & (head.name == wanted.name),
        None if wanted.generation is None else head.generation == wanted.generation,
        None if wanted.evaluation is None else head.evaluation.is_(wanted.evaluation),
        None if wanted.min_engine_errors is None else head.engine_errors >= wanted.min_engine_errors,
        None if wanted.min_tool_errors is None else head.tool_errors >= wanted.min_tool_errors,
    ]
    return query.where(*(condition for condition in conditions if condition is not None))


def _is_among(one: str, of: ColumnElement[str]) -> ColumnElement[bool]:
    """Condition: a text from `notes.joined`, or null, has this one."""
    return of.is_not(None) & contains(of, notes.marked(one))


def _lacks(annotation: str) -> ColumnElement[bool]:
    """Condition on heads: the session could have an annotation of this name, and has none."""
    return sessions.c.status.in_(("open", "closed")) & ~_is_among(annotation, sessions.c.annotated)


def _is_stale(least: int, engines: EngineVersions) -> ColumnElement[bool]:
    """Condition on heads: the newest weight version is at least so many behind the run's."""
    head, of_run = sessions.c, sessions.alias("of_run")
    sampled = (
        select(func.max(of_run.c.weight_version))
        .where(of_run.c.run == head.run, of_run.c.evaluation.is_(False))
        .scalar_subquery()
    )
    conditions = [head.weight_version <= sampled - least]
    for run, version in engines.own.items():
        if version is not None:
            conditions.append(and_(head.run == run, head.weight_version <= version - least))
    if engines.shared is not None:
        conditions.append(and_(head.run.not_in(list(engines.own)), head.weight_version <= engines.shared - least))
    return or_(*conditions)


def _after(value: ColumnElement[float], after: Place, *, newest_first: bool, nullable: bool) -> ColumnElement[bool]:
    """Condition on heads: after a place in the order, in which nulls come last."""
    number, session_id = after
    own_id = sessions.c.session_id
    later_id = own_id < session_id if newest_first else own_id > session_id
    if number is None:
        return and_(value.is_(None), later_id)
    place = tuple_(value, own_id)
    later = place < (number, session_id) if newest_first else place > (number, session_id)
    return or_(later, value.is_(None)) if nullable else later


def _claimed(before: float) -> Select[Any]:
    return select(open_turns.c.session_id).where(open_turns.c.opened_at <= before)


# Sessions for background work, and figures of all.


def idle_sessions(
    connection: Connection,
    since: float,
    after: str,
    limit: int,
    among: Sequence[str] | None = None,
    *,
    where: ColumnElement[bool] | None = None,
) -> list[str]:
    """Open sessions after id `after` that have no turn in flight and have not changed since, nor has their rollout.

    `where`: only those for which this holds. `among`: only those of these, without a limit.
    """
    query = (
        select(sessions.c.session_id)
        .where(
            sessions.c.session_id > after,
            sessions.c.status == "open",
            is_idle(literal(since)),
            *([] if where is None else [where]),
            *of_these(among),
        )
        .order_by(sessions.c.session_id)
        .limit(limit if among is None else None)
    )
    return list(connection.execute(query).scalars())


def closed_sessions(
    connection: Connection,
    cutoff: float,
    after: tuple[float, str],
    limit: int | None,
    *,
    points: StorePoints,
    holding: bool,
    where: ColumnElement[bool] | None = None,
    among: Sequence[str] | None = None,
) -> list[tuple[float, str]]:
    """Sessions closed or undone at or before `cutoff`, after `after` in the order of (closed_at, id), without those
    that are pinned.

    `holding`: only those that still hold a replay payload or a refused reply. `where`: only those for which
    this holds. `among`: only those of these, without a limit.
    """
    place = tuple_(sessions.c.closed_at, sessions.c.session_id)
    query = (
        select(sessions.c.closed_at, sessions.c.session_id)
        .where(
            sessions.c.status.in_(ENDED),
            sessions.c.closed_at <= cutoff,
            place > after,
            ~pins.is_pinned(points),
            *of_these(among),
        )
        .order_by(sessions.c.closed_at, sessions.c.session_id)
        .limit(limit if among is None else None)
    )
    if holding:
        query = query.where(holds_payload())
    if where is not None:
        query = query.where(where)
    return [(row[0], row[1]) for row in connection.execute(query)]


class Acknowledgements(NamedTuple):
    """What the retention of payloads waits for: `is_given` is a condition on heads. `groups` lists times, runs and ids
    of acknowledged groups behind a place, in that order, as many as asked for."""

    is_given: ColumnElement[bool]
    groups: Callable[[Connection, tuple[float, str, str], int], list[tuple[float, str, str]]]


def of_these(session_ids: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """Condition on heads; None: any."""
    return [] if session_ids is None else [sessions.c.session_id.in_(session_ids)]


def holds_payload() -> ColumnElement[bool]:
    """Condition on sessions: still holds a replay payload or a refused reply."""
    live = exists().where(chunks.c.session_id == sessions.c.session_id, chunks.c.tombstoned_by.is_(None))
    return or_(live, exists().where(refused_replies.c.session_id == sessions.c.session_id))


def newest_version(connection: Connection) -> int | None:
    """The largest weight version of any session that is no evaluation."""
    query = select(func.max(sessions.c.weight_version)).where(sessions.c.evaluation.is_(False))
    version: int | None = connection.execute(query).scalar_one()
    return version


def newest_versions(connection: Connection, runs: Iterable[str]) -> dict[str, int]:
    """The largest weight version of any session of each of these runs that is no evaluation."""
    found: dict[str, int] = {}
    wanted = sorted(set(runs))
    head = sessions.c
    for some in (wanted[at : at + RUNS_AT_ONCE] for at in range(0, len(wanted), RUNS_AT_ONCE)):
        each = [
            select(
                literal(run),
                select(func.max(head.weight_version))
                .where(head.run == run, head.evaluation.is_(False))
                .scalar_subquery(),
            )
            for run in some
        ]
        found |= {run: version for run, version in connection.execute(union_all(*each)) if version is not None}
    return found


def newest_readable_versions(connection: Connection, run: str | None, *, evaluation: bool = False) -> dict[str, int]:
    """The largest weight version of any session of the run, None: of each run, that can be read; with `evaluation`
    also of evaluations."""

    def read(again: Connection, among: Sequence[str] | None) -> list[tuple[str, int]]:
        head = sessions.c
        query = select(head.run, func.max(head.weight_version)).where(
            head.weight_version.is_not(None), *of_these(among)
        )
        if run is not None:
            query = query.where(head.run == run)
        if not evaluation:
            query = query.where(head.evaluation.is_(False))
        return [(row[0], row[1]) for row in again.execute(query.group_by(head.run))]

    return dict(listed(connection, read))  # in order: of several of one run the largest


def count_by_status(connection: Connection) -> tuple[dict[str, int], int]:
    """Sessions by status, and turns with a claim. Reads every session's head: a second for some millions."""
    by_status = select(sessions.c.status, func.count()).group_by(sessions.c.status)
    claims = select(func.count()).select_from(open_turns)
    return {row[0]: row[1] for row in connection.execute(by_status)}, connection.execute(claims).scalar_one()


def database_bytes(connection: Connection) -> int:
    """The database's size in bytes, without free pages."""
    size: int = connection.execute(select(used_bytes())).scalar_one()
    return size


# Which sessions there are, where a list of them is damaged.

WALKED = 512
"""Ids that a walk around damaged pages reads together."""

LISTED_IN: Sequence[Table] = (sessions, events, turns)
"""A session whose page is lost in one of these tables is usually named by another."""


def listed(
    connection: Connection, read: Callable[[Connection, Sequence[str] | None], list[SupportsRichComparisonT]]
) -> list[SupportsRichComparisonT]:
    """What `read` lists, of all sessions (None); where a damaged page is in its way, of sets of readable ones."""
    try:
        return attempt(connection, lambda again: read(again, None))
    except PageDamaged:
        rows = of_readable(connection, readable_ids(connection), lambda again, ids: {ids[0]: read(again, ids)})
        return sorted(chain.from_iterable(rows.values()))


def readable_ids(connection: Connection, tables: Sequence[Table] = LISTED_IN) -> list[str]:
    """Every session that a readable page of these tables or of their keys still names."""
    known: set[str] = set()
    holes: list[Table] = []
    for table in tables:
        ids, is_whole = _walked(connection, table, ())
        known |= ids
        if not is_whole:
            holes.append(table)
    # Reading goes on behind a hole at the next id that another table names.
    for table in holes:
        known |= _walked(connection, table, sorted(known))[0]
    return sorted(known)


def _walked(connection: Connection, table: Table, known: Sequence[str]) -> tuple[set[str], bool]:
    """A table's sessions by its key, a damaged page skipped up to the next of `known`; was all of it readable?"""
    column = table.c.session_id
    ids: set[str] = set()
    is_whole = True
    where, after, limit = column > "", "", WALKED
    while True:
        query = select(column).where(where).distinct().order_by(column).limit(limit)
        page: Sequence[Any] | None = attempt_or(connection, lambda again: again.execute(query).scalars().all(), None)  # noqa: B023
        if page is not None and not _is_sound(connection, after, page):
            page = None
        if page is not None:
            ids.update(page)
            if len(page) < limit:
                return ids, is_whole
            after, limit = page[-1], min(WALKED, limit * 8)
            where = column > after
        elif limit > 1:
            limit = max(1, limit // 8)
        else:
            is_whole = False
            at = bisect_right(known, after)
            if at == len(known):
                return ids, is_whole
            after = known[at]
            where = column >= after


def _is_sound(connection: Connection, after: str, page: Sequence[Any]) -> bool:
    """Of changed bytes SQLite gives a blob as an id, or a key smaller than those before it: a walk would never end."""
    if not all(isinstance(session_id, str) for session_id in page):
        return False
    if not page or connection.dialect.name != "sqlite":  # PostgreSQL orders by its own collation
        return True
    return page[0] >= after and all(before < session_id for before, session_id in pairwise(page))


# One session.


def read_all_rows(connection: Connection, session_id: str, others: Iterable[Table]) -> None:
    """Read every row of a session without its content, to find a damaged page; `others` are features' tables."""
    for table in (sessions, open_turns, events, turns, blobs, chunks, refused_replies, *others):
        columns = [column for column in table.columns if not isinstance(column.type, Content)]
        connection.execute(select(*columns).where(table.c.session_id == session_id)).all()


class EventRow(NamedTuple):
    """A stored event, not yet decoded."""

    seq: int
    at: float
    type: str
    version: int
    data: bytes


def event_rows(connection: Connection, session_id: str, *, after: int = 0, limit: int | None = None) -> list[EventRow]:
    """A session's events after seq `after`, in order."""
    query = (
        select(*(events.c[name] for name in EventRow._fields))
        .where(events.c.session_id == session_id, events.c.seq > after)
        .order_by(events.c.seq)
    )
    if limit is not None:
        query = query.limit(limit)
    return [EventRow(*row) for row in connection.execute(query)]


def last_seq(connection: Connection, session_id: str) -> int:
    """The number of a log's last event; 0 where there is none."""
    return connection.execute(select(func.max(events.c.seq)).where(events.c.session_id == session_id)).scalar() or 0


def decode_events(rows: Iterable[EventRow]) -> list[Recorded]:
    """Raises UnknownEvent, also if a damaged page holds something else than an event."""
    return [_recorded(row) for row in rows]


def _recorded(row: EventRow) -> Recorded:
    if not (isinstance(row.seq, int) and isinstance(row.at, float) and isinstance(row.version, int)):
        raise UnknownEvent("a row that is not an event")
    return Recorded(row.seq, row.at, decode(row.type, row.version, row.data or b""))


def load_events(connection: Connection, session_id: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
    """Few events, read and decoded. Raises UnknownEvent."""
    return decode_events(event_rows(connection, session_id, after=after, limit=limit))


def session_rows(connection: Connection, session_id: str) -> tuple[Session | None, list[EventRow]]:
    """A session's snapshot, if any, and the events after it.

    A snapshot is ignored if its last event is not in the log, because a database crash undid it, and after a restore.
    """
    snapshot = load_snapshot(connection, session_id)
    if snapshot is not None:
        rows = event_rows(connection, session_id, after=snapshot.version - 1)
        if continues(snapshot, rows):
            return snapshot, rows[1:]
    return None, event_rows(connection, session_id)


def continues(snapshot: Session, rows: Sequence[EventRow]) -> bool:
    """Is the first of these events the snapshot's last, and does none go back to before it?"""
    is_last = bool(rows) and (rows[0].seq, rows[0].at) == (snapshot.version, snapshot.last_event_at)
    return is_last and all(row.type != "SessionRestored" for row in rows[1:])


def fold_rows(session_id: str, snapshot: Session | None, rows: Iterable[EventRow]) -> Session | None:
    """The fold of `session_rows`. Raises UnknownEvent."""
    return fold(session_id, decode_events(rows), snapshot)


def load_snapshot(connection: Connection, session_id: str) -> Session | None:
    """A cached fold, or None; a damaged or foreign one is ignored, because the log is the truth."""
    query = select(snapshots.c.format, snapshots.c.data).where(snapshots.c.session_id == session_id)
    row = connection.execute(query).first()
    return None if row is None or row[0] != SNAPSHOT_FORMAT else snapshot_of(row[1])


def snapshot_of(frame: bytes) -> Session | None:
    """The fold in a snapshot's frame, or None if it is damaged."""
    try:
        return decode_session(codec.decompress(frame))
    except (CorruptContent, msgspec.MsgspecError):
        return None


def last_tombstone(connection: Connection, session_id: str) -> int:
    """The seq of a session's newest `BlobsTombstoned`; 0 if it has none."""
    query = select(func.max(events.c.seq)).where(
        events.c.session_id == session_id, events.c.type == BlobsTombstoned.__name__
    )
    return connection.execute(query).scalar_one() or 0


SNAPSHOT_FORMAT = "session-5"
"""Changes with the structure of `Session`; snapshots of another format are ignored."""


# What a turn needs of a session that is not in memory, in one statement: its log, and its newest turns' content.
#
# A statement by itself sees one state of the database, so it needs no transaction. Most of a read's cost is that of its
# statements and transaction, not of its rows: two reads in transactions of their own took the process 0.74 ms and
# PostgreSQL 0.16 ms for a session of two turns, this one takes 0.06 and 0.03.

Frames = dict[int, tuple[bytes | None, bytes | None]]
"""A turn's stored tokens and exchange, by turn; None where not asked for or erased. A small turn's tokens are in its
exchange, which is read for either."""

NEWEST_TURNS = 32
"""The content of so many of a session's newest turns is read with its log. A linear session's turn needs that of all
earlier turns; in a tree only that of its own branch, so this bounds what is read in vain."""


class ContentColumns(Enum):
    """What is read beside the log: nothing, the turns' `exchange`, or also their `tokens`."""

    NONE = "none"
    EXCHANGE = "exchange"
    TOKENS = "tokens"


class LoadedSession(NamedTuple):
    """A snapshot, if any, the events after it, and the content of the newest turns, by number."""

    snapshot: Session | None
    rows: Sequence[EventRow]
    frames: Frames


async def load_session(database: Database, session_id: str, content: ContentColumns) -> LoadedSession:
    """A session. `frames` may be empty: the content must then be read by itself.

    Raises as `Database.read`.
    """
    try:
        frame, rows, frames = _parts(await database.read_autocommit(_STATEMENTS[content], {"sid": session_id}))
    except (StoreDamaged, BrokenRow):
        pass  # perhaps only content is damaged; else the next read tells which session it is
    else:
        if frame is None:
            return LoadedSession(None, rows, frames)
        snapshot = await asyncio.to_thread(snapshot_of, frame)
        if snapshot is not None and continues(snapshot, rows):
            return LoadedSession(snapshot, rows[1:], frames)
    read = partial(session_rows, session_id=session_id)
    return LoadedSession(*await database.read(read, session_id=session_id), {})


_RUN_OF = select(sessions.c.run).where(sessions.c.session_id == bindparam("sid"))


async def run_of(database: Database, session_id: str) -> str | None:
    """The run of a session; None if there is none with this id. Raises as `read`."""
    rows = await database.read_autocommit(_RUN_OF, {"sid": session_id})
    return rows[0][0] if rows else None


async def events_since(database: Database, session_id: str, seq: int) -> list[EventRow]:
    """The events from `seq` on, in order. Raises as `Database.read`."""
    try:
        rows = await database.read_autocommit(_EVENTS_SINCE, {"sid": session_id, "since": seq})
        return [_event(*row) for row in rows]
    except (StoreDamaged, BrokenRow):
        read = partial(event_rows, session_id=session_id, after=seq - 1)
        return await database.read(read, session_id=session_id)


_EVENT, _SNAPSHOT, _TURN = range(3)


def _parts(rows: Sequence[Row]) -> tuple[bytes | None, list[EventRow], Frames]:
    """The snapshot's frame, the events and the frames of the turns. Raises BrokenRow."""
    snapshot: bytes | None = None
    log: list[EventRow] = []
    frames: Frames = {}
    for part, number, at, name, version, data, tokens in rows:
        if part == _EVENT:
            log.append(_event(number, at, name, version, data))
        elif part == _TURN:
            frames[number] = as_bytes(tokens), as_bytes(data)
        else:
            snapshot = as_bytes(data)
    log.sort(key=_seq)
    return snapshot, log, frames


def _event(seq: int, at: float, name: str, version: int, data: bytes) -> EventRow:
    """Raises BrokenRow. The other columns are checked where the event is decoded."""
    if not isinstance(seq, int):
        raise BrokenRow("an event without a number")
    return EventRow(seq, at, name, version, as_bytes(data) or b"")


def _seq(row: EventRow) -> int:
    return row.seq


_sid = bindparam("sid", type_=String)
_snapshot_seq = (
    select(snapshots.c.seq)
    .where(snapshots.c.session_id == _sid, snapshots.c.format == SNAPSHOT_FORMAT)
    .scalar_subquery()
)
_event_columns = (events.c.seq, events.c.at, events.c.type, events.c.version, events.c.data)


def _no(kind: type[TypeEngine[Any]]) -> ColumnElement[None]:
    return cast(null(), kind())


def _statement(content: ContentColumns) -> CompoundSelect[Row]:
    """Rows of one shape: what the row is, and the columns of an event; a turn's are its number and frames."""
    log = select(literal(_EVENT, Integer), *_event_columns, _no(LargeBinary)).where(
        events.c.session_id == _sid, events.c.seq >= func.coalesce(_snapshot_seq, 0)
    )
    kept = select(
        literal(_SNAPSHOT, Integer),
        snapshots.c.seq,
        _no(Double),
        snapshots.c.format,
        _no(Integer),
        snapshots.c.data,
        _no(LargeBinary),
    ).where(snapshots.c.session_id == _sid, snapshots.c.format == SNAPSHOT_FORMAT)
    if content is ContentColumns.NONE:
        return union_all(log, kept)
    tokens = turns.c.tokens if content is ContentColumns.TOKENS else _no(LargeBinary)
    newest = (
        select(turns.c.turn, turns.c.exchange, tokens.label("tokens"))
        .where(turns.c.session_id == _sid)
        .order_by(turns.c.turn.desc())
        .limit(NEWEST_TURNS)
        .subquery()
    )
    of_turns = select(
        literal(_TURN, Integer),
        newest.c.turn,
        _no(Double),
        _no(String),
        _no(Integer),
        newest.c.exchange,
        newest.c.tokens,
    )
    return union_all(log, kept, of_turns)


_STATEMENTS = {content: _statement(content) for content in ContentColumns}

_EVENTS_SINCE = (
    select(*_event_columns)
    .where(events.c.session_id == _sid, events.c.seq >= bindparam("since", type_=BigInteger))
    .order_by(events.c.seq)
)


# What an export reads of heads.


class ExportHead(msgspec.Struct, frozen=True):
    """A session's number of committed turns (a measure of its size), and its rollout.

    `group_id` is the group that counts it. `root_id` is the rollout's root, None for the root itself. `is_known` False:
    neither head nor log can be read.
    """

    session_id: str
    group_id: str | None
    turns: int
    root_id: str | None = None
    run: str = DEFAULT_RUN
    attempt: int | None = None
    created_at: float = 0.0
    is_rewarded: bool = False
    evaluation: bool = False
    is_known: bool = True

    @property
    def rollout(self) -> str:
        return self.root_id or self.session_id

    @property
    def key(self) -> GroupKey | None:
        return None if self.group_id is None else GroupKey(self.run, self.group_id)

    @property
    def played(self) -> Played:
        """Of a root, in its group."""
        return Played(self.session_id, self.attempt, self.created_at, self.is_rewarded, self.evaluation)


def _heads() -> Select[Any]:
    return select(
        sessions.c.session_id,
        rollouts.group(),
        sessions.c.turns,
        case((rollouts.is_root(), None), else_=sessions.c.root_id),
        sessions.c.run,
        sessions.c.attempt,
        sessions.c.created_at,
        case((sessions.c.reward.is_(None), False), else_=True),
        sessions.c.evaluation,
    )


def export_heads(connection: Connection, session_ids: Sequence[str]) -> dict[str, ExportHead]:
    query = _heads().where(sessions.c.session_id.in_(session_ids))
    return {row[0]: ExportHead(*row) for row in connection.execute(query)}


def every_head(connection: Connection) -> dict[str, ExportHead]:
    """Of all sessions, around damaged pages: a lost head is what the log says.

    Where that is lost too, the session is in no known group (`is_known`).
    """
    ids = readable_ids(connection)
    every, _ = split(connection, ids, export_heads)
    lost = [session_id for session_id in ids if session_id not in every]
    for session_id in lost:
        every[session_id] = attempt_or(connection, partial(_head_by_log, session_id=session_id), None) or ExportHead(
            session_id, None, 0, is_known=False
        )
    for session_id in lost:
        head = every[session_id]
        root = every.get(head.rollout)
        if root is None:
            every[session_id] = msgspec.structs.replace(head, root_id=None)
        elif root is not head:
            every[session_id] = msgspec.structs.replace(head, run=root.run, group_id=root.group_id)
    return every


def _head_by_log(connection: Connection, session_id: str) -> ExportHead | None:
    try:
        session = fold(session_id, decode_events(event_rows(connection, session_id)))
    except UnknownEvent:
        return None
    if session is None:
        return None
    root_id = rollouts.root_in_logs(CoreReads(connection), session_id, session.config.parent)
    config, is_rewarded = session.config, session.reward is not None
    own = config.of_run, config.attempt, session.created_at, is_rewarded, config.evaluation is True
    return ExportHead(session_id, config.group_id, len(session.turns), root_id, *own)


def group_members(connection: Connection, key: GroupKey) -> list[ExportHead]:
    """All sessions of a group's rollouts, erased ones too."""
    return [ExportHead(*row) for row in connection.execute(_heads().where(rollouts.in_groups([key])))]


# A name's generations: the sessions that clients call alike, one after another.


_ATTEMPTS = ("TurnOpened", "TurnCommitted")


class Generation(NamedTuple):
    """A session of a name. `frees_name` is None unless it is archived: else its log says so."""

    session_id: str
    number: int
    status: str
    frees_name: bool | None


def generations(connection: Connection, points: StorePoints, run: str, name: str) -> list[Generation]:
    """The sessions that have had this name in the run, the newest first. In one statement: on PostgreSQL one that
    leaves or comes back between two would be in neither."""
    here = select(sessions.c.session_id, sessions.c.generation, sessions.c.status, cast(null(), Boolean)).where(
        sessions.c.name.is_not(None), sessions.c.name == name, sessions.c.run == run
    )
    rows = connection.execute(union_all(here, *(departed.generations(run, name) for departed in points.departed)))
    return sorted((Generation(*row) for row in rows), key=lambda one: one.number, reverse=True)


def called(name: str | None, generation: int | None) -> Select[tuple[str]]:
    """The ids of the sessions of a name, of a generation, or of both, in all runs."""
    query = select(sessions.c.session_id).where(sessions.c.name.is_not(None))
    if name is not None:
        query = query.where(sessions.c.name == name)
    return query if generation is None else query.where(sessions.c.generation == generation)


def attempted(
    connection: Connection, points: StorePoints, run: str, name: str, mark: str, agent: str = ""
) -> list[str]:
    """The generations of a run's name, the newest first, that have a turn whose event holds `mark`: the hash of a key
    or of a request's body. With `agent`, what the id of an agent's session has behind its root's, that agent's
    sessions.

    There is no index of marks: only a marked request that the newest generation does not know asks.
    """
    here = (
        select(events.c.session_id, sessions.c.generation)
        .join_from(sessions, events, events.c.session_id == sessions.c.session_id + agent)
        .where(
            sessions.c.name.is_not(None),
            sessions.c.name == name,
            sessions.c.run == run,
            sessions.c.status != "undone",
            events.c.type.in_(_ATTEMPTS),
            contains(events.c.data, literal(mark.encode(), LargeBinary)),
        )
    )
    left = (departed.attempted(run, name, mark, agent) for departed in points.departed)
    rows: Sequence[Row] = connection.execute(union(here, *left)).all()
    return [row[0] for row in sorted(rows, key=lambda row: row[1], reverse=True)]
