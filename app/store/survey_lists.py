"""The lists of sessions and groups where a damaged page is in the way of the ordinary ones.

Each is made from all heads that can be read or derived; see `survey`. A page of a list costs what all of it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, select, union

from app.store import group_reads, reads
from app.store.damaged import attempt_or, split
from app.store.figures import Figures
from app.store.group_reads import FeedLease
from app.store.heads_view import ClaimCounts, HeadCounts, HeadFilter, HeadRow
from app.store.schema import chunks, groups, refused_replies
from app.store.survey import all_heads


def rows(connection: Connection, wanted: HeadFilter, ids: Sequence[str] | None = None) -> list[HeadRow]:
    """Those of some sessions, or of all, that are wanted; in no order."""
    return [row for row in all_heads(connection, ids).rows.values() if _is_wanted(row, wanted)]


def _is_wanted(row: HeadRow, wanted: HeadFilter) -> bool:
    return (
        wanted.status in (None, row.status)
        and not (wanted.idle and row.claimed_since is not None)
        and row.session_id not in wanted.but
        and wanted.group_id in (None, row.group_id)
        and wanted.attempt in (None, row.attempt)
        and wanted.engine in (None, row.engine)
        and (wanted.min_reward is None or (row.reward is not None and row.reward >= wanted.min_reward))
        and (wanted.max_reward is None or (row.reward is not None and row.reward <= wanted.max_reward))
        and not (wanted.unrewarded and row.reward is not None)
        and (wanted.most_version is None or (row.weight_version or 0) <= wanted.most_version)
        and row.session_id.startswith(wanted.begins or "")
        and (wanted.tag is None or wanted.tag in row.tags)
    )


def counts(connection: Connection, since: float) -> HeadCounts:
    """As `heads_view.counts`."""
    found = all_heads(connection).rows.values()
    opened = [row for row in found if row.status == "open"]
    changed = sum(row.turns > 0 and row.updated_at >= since for row in opened)
    closed, erased = (sum(row.status == status for row in found) for status in ("closed", "erased"))
    return HeadCounts(len(opened), closed, erased, changed)


def claims(connection: Connection, since: float) -> ClaimCounts:
    """As `heads_view.claims`."""
    held = [row for row in all_heads(connection).rows.values() if row.claimed_since is not None]
    new = [row for row in held if (row.claimed_since or 0.0) >= since and (row.updated_at < since or not row.turns)]
    return ClaimCounts(len(held), len(new))


def figures(connection: Connection) -> Figures:
    """As `figures.figures`."""
    found = counts(connection, 0.0)
    aside = sum(row.status == "set_aside" for row in all_heads(connection).rows.values())
    by_status = {"open": found.open, "closed": found.closed, "erased": found.erased, "set_aside": aside}
    return Figures(by_status, claims(connection, 0.0).all, reads.database_bytes(connection))


def group_ids(connection: Connection, after: str | None, limit: int) -> list[str]:
    """As `group_reads.ids`, of the groups that count a rollout."""
    every = all_heads(connection)
    found = {row.group_id for row in every.rows.values() if every.root_of(row) is None}
    return sorted(one for one in found if one is not None and (after is None or one > after))[:limit]


def leases(connection: Connection, group_ids: Sequence[str]) -> dict[str, FeedLease]:
    """As `group_reads.leases`, as far as they can be read."""
    return split(connection, group_ids, group_reads.leases)[0]


def idle_sessions(connection: Connection, since: float, after: str) -> list[str]:
    """As `reads.idle_sessions`, all at once."""
    found = all_heads(connection).rows.values()
    idle = (row for row in found if row.status == "open" and row.claimed_since is None and row.updated_at <= since)
    return sorted(row.session_id for row in idle if row.session_id > after)


def closed_sessions(
    connection: Connection, cutoff: float, after: tuple[float, str], *, holding: bool, acknowledged: bool
) -> list[tuple[float, str]]:
    """As `reads.closed_sessions`, all at once."""
    found = [
        (row.closed_at, row.session_id)
        for row in all_heads(connection).rows.values()
        if row.status == "closed"
        and row.closed_at is not None
        and row.closed_at <= cutoff
        and (row.closed_at, row.session_id) > after
        and (not acknowledged or row.group_id is None or _is_consumed(connection, row.group_id))
    ]
    held = _holding(connection, [session_id for _, session_id in found]) if holding else None
    return sorted(place for place in found if held is None or place[1] in held)


def holding_sessions(connection: Connection, group_id: str, cutoff: float) -> list[str]:
    """As `group_reads.holding_sessions`."""
    found = rows(connection, HeadFilter(status="closed", group_id=group_id))
    return list(_holding(connection, [row.session_id for row in found if (row.closed_at or 0.0) <= cutoff]))


def _holding(connection: Connection, ids: Sequence[str]) -> Mapping[str, bool]:
    """Those that still hold a replay payload or a refused reply, as far as that can be read."""

    def read(again: Connection, part: Sequence[str]) -> Mapping[str, bool]:
        live = select(chunks.c.session_id).where(chunks.c.session_id.in_(part), chunks.c.tombstoned_by.is_(None))
        refused = select(refused_replies.c.session_id).where(refused_replies.c.session_id.in_(part))
        return dict.fromkeys(again.execute(union(live, refused)).scalars(), True)

    return split(connection, ids, read)[0]


def _is_consumed(connection: Connection, group_id: str) -> bool:
    """Where that cannot be read it counts as not consumed, and what it holds is kept."""
    query = select(groups.c.acked_at).where(groups.c.group_id == group_id)
    return attempt_or(connection, lambda again: again.execute(query).scalar(), None) is not None
