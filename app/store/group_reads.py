"""Weight versions over all sessions, and the sessions whose group the training feed's consumer has acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select, tuple_

from app.store import pins, reads
from app.store.damaged import of_readable
from app.store.rollouts import in_groups
from app.store.schema import groups, sessions


def newest_version(connection: Connection) -> int | None:
    """The largest weight version of any session."""
    version: int | None = connection.execute(select(func.max(sessions.c.weight_version))).scalar_one()
    return version


def newest_version_of_each(connection: Connection) -> int | None:
    """The same, of the sessions that can be read."""

    def read(again: Connection, session_ids: Sequence[str]) -> list[int | None]:
        query = select(func.max(sessions.c.weight_version)).where(sessions.c.session_id.in_(session_ids))
        return [again.execute(query).scalar_one()]

    versions = (version for version in of_readable(connection, read) if version is not None)
    return max(versions, default=None)


def acknowledged(connection: Connection, after: tuple[float, str], limit: int) -> list[tuple[float, str]]:
    """Acknowledgement times and ids of groups, after `after` in that order."""
    place = tuple_(groups.c.acked_at, groups.c.group_id)
    query = (
        select(groups.c.acked_at, groups.c.group_id)
        .where(place > after)
        .order_by(groups.c.acked_at, groups.c.group_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def holding_sessions(
    connection: Connection, group_id: str, cutoff: float, among: Sequence[str] | None = None
) -> list[str]:
    """A group's sessions, closed at or before `cutoff`, that still hold a replay payload or a refused reply.

    `among`: only those of these.
    """
    query = select(sessions.c.session_id).where(
        in_groups([group_id]),
        sessions.c.status == "closed",
        sessions.c.closed_at <= cutoff,
        ~pins.is_pinned(),
        reads.holds_payload(),
        *reads.of_these(among),
    )
    return list(connection.execute(query).scalars())
