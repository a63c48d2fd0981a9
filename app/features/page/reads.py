"""What the page counts over all sessions, its weight versions, and which sessions have changed since a place."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, and_, case, func, or_, select, tuple_

from app.store.dialect import oldest_tx
from app.store.feed import START, Position
from app.store.schema import events, open_turns, sessions

MAX_VERSIONS = 100


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


class Tail(NamedTuple):
    """Events after a position: their sessions (each once), the last position, and how many events.

    `holds` False: the event at the given position is gone, because a database crash undid it or it is another store.
    Earlier events may differ too.
    """

    session_ids: list[str]
    last: Position
    events: int
    holds: bool


def since(connection: Connection, after: Position, limit: int) -> Tail:
    """Events after `after`, at most `limit`."""
    query = (
        select(events.c.session_id, events.c.tx, events.c.position)
        .where(
            tuple_(events.c.tx, events.c.position) >= (after.tx, after.position),
            events.c.tx < oldest_tx(),
        )
        .order_by(events.c.tx, events.c.position)
        .limit(limit + (after != START))
    )
    rows = connection.execute(query).all()
    if after != START:
        if not rows or Position(rows[0][1], rows[0][2]) != after:
            return Tail([], after, 0, holds=False)
        rows = rows[1:]
    last = Position(rows[-1][1], rows[-1][2]) if rows else after
    return Tail(list(dict.fromkeys(row[0] for row in rows)), last, len(rows), holds=True)
