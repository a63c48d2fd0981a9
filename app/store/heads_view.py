"""Lists of sessions for people: by any of their columns, a page at a time, counted up to a bound.

A page ends at a place, the last row's value in the order and its id, and the next begins behind it: what changes
meanwhile moves rows, but none is given twice that did not move. Only `created_at`, the group and a status by itself are
backed by an index: another order or filter looks at every head, and no turn pays for it (see `schema.sessions`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select, tuple_

from app.store.dialect import begins_with
from app.store.reads import SPAN
from app.store.schema import events, open_turns, sessions

Order = Literal["created_at", "updated_at", "reward", "turns", "weight_version"]

NULLABLE = frozenset({"reward", "weight_version"})
"""Orders in which some sessions have no value: they come last, whichever way the others go."""

COUNTED = 100_000
"""So many sessions are counted; whether there are more is all that is said beyond."""

LISTED = 10_000
"""Ids that one statement names: drivers take some thirty thousand parameters."""


class Row(msgspec.Struct, frozen=True):
    """A head, and since when it has an open turn. Times are seconds since the epoch."""

    session_id: str
    version: int
    status: str
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
    claimed_since: float | None = None


_ROW = tuple(sessions.c[name] for name in Row.__struct_fields__[:-1])


class Wanted(msgspec.Struct, frozen=True):
    """Which heads; None: any. `idle` says that they are without an open turn, and `but` names some that are not.

    `least_version` and `most_version` bound the weight version, `begins` is how the id does.
    """

    status: Literal["open", "closed", "erased"] | None = None
    idle: bool = False
    but: Collection[str] = ()
    group_id: str | None = None
    engine: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    unrewarded: bool = False
    most_version: int | None = None
    begins: str | None = None


Place = tuple[float | None, str]
"""Where a page ended: the last row's value in the order, and its id."""


def page(
    connection: Connection,
    wanted: Wanted,
    *,
    order: Order,
    newest_first: bool,
    after: Place | None,
    limit: int,
    many: bool = True,
) -> list[Row]:
    """The next heads behind `after`. `newest_first`: from the largest value down.

    `many` match, and are met on a walk along the order's index, if it has one. Few would be met late: they are found
    first, and sorted.
    """
    value = sessions.c[order] if many else sessions.c[order] + 0
    direction = [one.desc() if newest_first else one.asc() for one in (value, sessions.c.session_id)]
    if order in NULLABLE:
        direction[0] = direction[0].nulls_last()
    query = _filtered(select(*_ROW), wanted).order_by(*direction).limit(limit)
    if after is not None:
        query = query.where(_behind(value, after, newest_first=newest_first, nullable=order in NULLABLE))
    return _with_claims(connection, [Row(*row) for row in connection.execute(query)])


def count(connection: Connection, wanted: Wanted) -> int:
    """How many heads there are; COUNTED + 1 where they are more than are counted."""
    found = _filtered(select(sessions.c.session_id), wanted).limit(COUNTED + 1).subquery()
    counted: int = connection.execute(select(func.count()).select_from(found)).scalar_one()
    return counted


def of(connection: Connection, session_ids: Sequence[str], wanted: Wanted | None = None) -> list[Row]:
    """The heads of these sessions, those that are `wanted`; in no order."""
    found: list[Row] = []
    for at in range(0, len(session_ids), SPAN):
        query = _filtered(select(*_ROW), wanted or Wanted())
        part = sessions.c.session_id.in_(session_ids[at : at + SPAN])
        found += [Row(*row) for row in connection.execute(query.where(part))]
    return _with_claims(connection, found)


def claimed(connection: Connection, before: float | None, limit: int) -> list[str]:
    """Sessions with a turn that was opened at `before` or earlier, None: at any time; the oldest first."""
    query = select(open_turns.c.session_id).order_by(open_turns.c.opened_at, open_turns.c.session_id).limit(limit)
    if before is not None:
        query = query.where(open_turns.c.opened_at <= before)
    return list(connection.execute(query).scalars())


class Counts(msgspec.Struct, frozen=True):
    """How many sessions there are; of the open ones `changed` since a moment."""

    open: int
    closed: int
    erased: int
    changed: int


def counts(connection: Connection, since: float) -> Counts:
    """Looks at every head."""
    changed = and_(sessions.c.status == "open", sessions.c.turns > 0, sessions.c.updated_at >= since)
    query = select(sessions.c.status, func.count(), func.sum(case((changed, 1), else_=0))).group_by(sessions.c.status)
    found = {row[0]: (row[1], row[2]) for row in connection.execute(query)}
    opened, closed, erased = (found.get(status, (0, 0)) for status in ("open", "closed", "erased"))
    return Counts(opened[0], closed[0], erased[0], changed=opened[1])


class Claims(msgspec.Struct, frozen=True):
    """Open turns, and those of sessions that have otherwise not changed since a moment."""

    all: int
    newly_active: int


def claims(connection: Connection, since: float) -> Claims:
    new = and_(open_turns.c.opened_at >= since, or_(sessions.c.updated_at < since, sessions.c.turns == 0))
    query = select(func.count(), func.sum(case((new, 1), else_=0))).select_from(
        open_turns.join(sessions, sessions.c.session_id == open_turns.c.session_id)
    )
    row = connection.execute(query).one()
    return Claims(row[0], row[1] or 0)


def last_seq(connection: Connection, session_id: str) -> int:
    """The number of a log's last event; 0 where there is none."""
    return connection.execute(select(func.max(events.c.seq)).where(events.c.session_id == session_id)).scalar() or 0


def _filtered(query: Select[Any], wanted: Wanted) -> Select[Any]:
    head = sessions.c
    conditions: list[ColumnElement[bool] | None] = [
        None if wanted.status is None else head.status == wanted.status,
        head.open_turns == 0 if wanted.idle else None,
        head.session_id.not_in(list(wanted.but)[:LISTED]) if wanted.but else None,
        None if wanted.group_id is None else head.group_id == wanted.group_id,
        None if wanted.engine is None else head.engine == wanted.engine,
        None if wanted.min_reward is None else head.reward >= wanted.min_reward,
        None if wanted.max_reward is None else head.reward <= wanted.max_reward,
        head.reward.is_(None) if wanted.unrewarded else None,
        None if wanted.most_version is None else head.weight_version <= wanted.most_version,
        None if wanted.begins is None else begins_with(head.session_id, wanted.begins),
    ]
    return query.where(*(condition for condition in conditions if condition is not None))


def _behind(value: ColumnElement[float], after: Place, *, newest_first: bool, nullable: bool) -> ColumnElement[bool]:
    """Of heads: behind a place in the order, where those without a value stand last."""
    number, session_id = after
    own_id = sessions.c.session_id
    later_id = own_id < session_id if newest_first else own_id > session_id
    if number is None:
        return and_(value.is_(None), later_id)
    place = tuple_(value, own_id)
    later = place < (number, session_id) if newest_first else place > (number, session_id)
    return or_(later, value.is_(None)) if nullable else later


def _with_claims(connection: Connection, rows: Sequence[Row]) -> list[Row]:
    """Read behind the heads: a turn that is claimed between the two is in the next look at the session."""
    since: dict[str, float] = {}
    ids = [row.session_id for row in rows if row.status == "open"]
    for at in range(0, len(ids), SPAN):
        query = select(open_turns.c.session_id, func.min(open_turns.c.opened_at)).group_by(open_turns.c.session_id)
        part = query.where(open_turns.c.session_id.in_(ids[at : at + SPAN]))
        since |= {row[0]: row[1] for row in connection.execute(part)}
    return [
        msgspec.structs.replace(row, claimed_since=since[row.session_id]) if row.session_id in since else row
        for row in rows
    ]
