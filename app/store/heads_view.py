"""Lists of sessions by any column, a page at a time, counted up to a limit.

A page ends at a place (the last row's value and id); the next begins after it. A row is repeated only if its value has
changed meanwhile. Only `created_at`, the group and a status alone have an index: any other order or filter reads every
head, so that turns need not maintain more indexes (see `schema.sessions`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select, tuple_

from app.domain import notes
from app.store.dialect import begins_with, contains
from app.store.reads import SPAN
from app.store.schema import open_turns, sessions

Status = Literal["open", "closed", "erased", "undone"]

SortOrder = Literal["created_at", "updated_at", "reward", "turns", "weight_version", "running_since"]

NULLABLE = frozenset({"reward", "weight_version"})
"""Columns that may be null: such sessions come last in either direction."""

COUNTED = 100_000
"""Counting stops here; beyond it only "more" is known."""

MAX_VERSIONS = 100

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
    note: str | None
    joined_tags: str | None
    running_since: float | None = None

    @property
    def tags(self) -> list[str]:
        return notes.parted(self.joined_tags)


_running_since = (
    select(func.min(open_turns.c.opened_at))
    .where(open_turns.c.session_id == sessions.c.session_id)
    .correlate(sessions)
    .scalar_subquery()
)
_STORED = HeadRow.__struct_fields__[:-2]
_ROW = (
    *(sessions.c[name] for name in _STORED),
    sessions.c.tags,
    case((sessions.c.open_turns > 0, _running_since)),
)


class HeadFilter(msgspec.Struct, frozen=True):
    """Conditions on heads; None: any. `idle`: without an open turn. `claimed_before`: with one that was claimed at or
    before this time. `among`: only these ids; `but`: ids to leave out; of both LISTED at most.

    `most_version` is the largest weight version, `begins` the beginning of the id, `tag` one of its tags.
    """

    status: Status | None = None
    idle: bool = False
    claimed_before: float | None = None
    among: Collection[str] | None = None
    but: Collection[str] = ()
    group_id: str | None = None
    attempt: int | None = None
    engine: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    unrewarded: bool = False
    most_version: int | None = None
    begins: str | None = None
    tag: str | None = None
    name: str | None = None
    generation: int | None = None


Place = tuple[float | None, str]
"""The end of a page: the last row's value in the order, and its id."""


def page(
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


def head(connection: Connection, session_id: str) -> HeadRow | None:
    """One session's."""
    return next(iter(of(connection, [session_id])), None)


def count(connection: Connection, wanted: HeadFilter) -> int:
    """Number of heads; COUNTED + 1 if there are more."""
    matching = filtered(select(sessions.c.session_id), wanted).limit(COUNTED + 1).subquery()
    counted: int = connection.execute(select(func.count()).select_from(matching)).scalar_one()
    return counted


def some(connection: Connection, wanted: HeadFilter, limit: int) -> list[str]:
    """The ids of at most `limit` sessions that match, in no order."""
    return list(connection.execute(filtered(select(sessions.c.session_id), wanted).limit(limit)).scalars())


def of(connection: Connection, session_ids: Sequence[str], wanted: HeadFilter | None = None) -> list[HeadRow]:
    """The heads of these sessions that match `wanted`, in no order."""
    rows: list[HeadRow] = []
    for at in range(0, len(session_ids), SPAN):
        query = filtered(select(*_ROW), wanted or HeadFilter())
        part = sessions.c.session_id.in_(session_ids[at : at + SPAN])
        rows += [HeadRow(*row) for row in connection.execute(query.where(part))]
    return rows


class HeadCounts(msgspec.Struct, frozen=True):
    """Sessions by status; `changed`: open ones that changed since a given time."""

    open: int
    closed: int
    erased: int
    changed: int


def counts(connection: Connection, since: float) -> HeadCounts:
    """Reads every head."""
    changed = and_(sessions.c.status == "open", sessions.c.turns > 0, sessions.c.updated_at >= since)
    query = select(sessions.c.status, func.count(), func.sum(case((changed, 1), else_=0))).group_by(sessions.c.status)
    by_state = {row[0]: (row[1], row[2]) for row in connection.execute(query)}
    opened, closed, erased = (by_state.get(status, (0, 0)) for status in ("open", "closed", "erased"))
    return HeadCounts(opened[0], closed[0], erased[0], changed=opened[1])


class VersionRow(msgspec.Struct, frozen=True):
    """The sessions of a weight version, which is that of their newest weights. `mean_reward`: of the rewarded ones."""

    version: int
    sessions: int
    open: int
    turns: int
    rewarded: int
    mean_reward: float | None
    updated_at: float


def versions(connection: Connection) -> list[VersionRow]:
    """The newest MAX_VERSIONS weight versions, newest first."""
    head = sessions.c
    sums = (
        func.count(),
        func.sum(case((head.status == "open", 1), else_=0)),
        func.sum(head.turns),
        func.count(head.reward),
        func.avg(head.reward),
        func.max(head.updated_at),
    )
    query = select(head.weight_version, *sums).where(head.weight_version.is_not(None)).group_by(head.weight_version)
    newest = query.order_by(head.weight_version.desc()).limit(MAX_VERSIONS)
    return [VersionRow(*row) for row in connection.execute(newest)]


class ClaimCounts(msgspec.Struct, frozen=True):
    """Number of open turns; `newly_active`: of sessions otherwise unchanged since a given time."""

    all: int
    newly_active: int


def claims(connection: Connection, since: float) -> ClaimCounts:
    new = and_(open_turns.c.opened_at >= since, or_(sessions.c.updated_at < since, sessions.c.turns == 0))
    query = select(func.count(), func.sum(case((new, 1), else_=0))).select_from(
        open_turns.join(sessions, sessions.c.session_id == open_turns.c.session_id)
    )
    row = connection.execute(query).one()
    return ClaimCounts(row[0], row[1] or 0)


def filtered(query: Select[Any], wanted: HeadFilter) -> Select[Any]:
    """The query, of heads that match."""
    head = sessions.c
    conditions: list[ColumnElement[bool] | None] = [
        None if wanted.status is None else head.status == wanted.status,
        head.open_turns == 0 if wanted.idle else None,
        None if wanted.claimed_before is None else head.session_id.in_(_claimed(wanted.claimed_before)),
        None if wanted.among is None else head.session_id.in_(list(wanted.among)[:LISTED]),
        head.session_id.not_in(list(wanted.but)[:LISTED]) if wanted.but else None,
        None if wanted.group_id is None else head.group_id == wanted.group_id,
        None if wanted.attempt is None else head.attempt == wanted.attempt,
        None if wanted.engine is None else head.engine == wanted.engine,
        None if wanted.min_reward is None else head.reward >= wanted.min_reward,
        None if wanted.max_reward is None else head.reward <= wanted.max_reward,
        head.reward.is_(None) if wanted.unrewarded else None,
        None if wanted.most_version is None else head.weight_version <= wanted.most_version,
        None if wanted.begins is None else begins_with(head.session_id, wanted.begins),
        None if wanted.tag is None else head.tags.is_not(None) & contains(head.tags, notes.marked(wanted.tag)),
        None if wanted.name is None else head.name.is_not(None) & (head.name == wanted.name),
        None if wanted.generation is None else head.generation == wanted.generation,
    ]
    return query.where(*(condition for condition in conditions if condition is not None))


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
