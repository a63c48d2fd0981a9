"""Lists all groups of sessions by id, a page at a time, from an index."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, case, select

from app.store.dialect import now
from app.store.reads import SPAN
from app.store.rollouts import is_finished, is_root
from app.store.schema import groups, sessions


class RolloutSummary(msgspec.Struct, frozen=True):
    """A rollout of a group: its root; `finished` covers all of its sessions."""

    attempt: int | None
    reward: float | None
    status: str
    finished: bool


class FeedLease(msgspec.Struct, frozen=True):
    """The training feed's state of a group; `is_leased` as of now."""

    is_leased: bool
    is_acknowledged: bool


def ids(connection: Connection, after: str | None, limit: int) -> list[str]:
    """Group ids after `after` (None: from the first), in the database's own order."""
    query = (
        select(sessions.c.group_id)
        .where(sessions.c.group_id.is_not(None) if after is None else sessions.c.group_id > after)
        .distinct()
        .order_by(sessions.c.group_id)
        .limit(limit)
    )
    return [found for found in connection.execute(query).scalars() if found is not None]


def members(connection: Connection, group_ids: Sequence[str]) -> dict[str, list[RolloutSummary]]:
    """The rollouts of each group."""
    found: dict[str, list[RolloutSummary]] = {group_id: [] for group_id in group_ids}
    for at in range(0, len(group_ids), SPAN):
        query = select(
            sessions.c.group_id,
            sessions.c.attempt,
            sessions.c.reward,
            sessions.c.status,
            case((is_finished, True), else_=False),
        ).where(is_root())
        for row in connection.execute(query.where(sessions.c.group_id.in_(group_ids[at : at + SPAN]))):
            found[row[0]].append(RolloutSummary(*row[1:]))
    return found


def leases(connection: Connection, group_ids: Sequence[str]) -> dict[str, FeedLease]:
    """The feed's state of the groups that it has handed out."""
    found: dict[str, FeedLease] = {}
    for at in range(0, len(group_ids), SPAN):
        query = select(groups.c.group_id, groups.c.lease_until > now(), groups.c.acked_at.is_not(None))
        for row in connection.execute(query.where(groups.c.group_id.in_(group_ids[at : at + SPAN]))):
            found[row[0]] = FeedLease(bool(row[1]), bool(row[2]))
    return found
