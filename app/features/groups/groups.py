"""The list of groups with their progress and reward statistics, and how the groups table follows its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from app.domain import cursors
from app.domain.groups import GroupKey
from app.domain.selection import Selection
from app.errors import StoreDamaged
from app.features.groups import reads, rules
from app.features.groups.operations import Settle, SettleGroup
from app.features.groups.reads import FeedLease
from app.features.groups.rules import Attempt
from app.store.ports import Connection, Database, Writer
from app.store.selection import GroupFilter
from turnlog.replies import GroupPage, ListedGroup

AT_ONCE, LOOKED_AT = 500, 10_000
"""Groups that one read and one request look at with a filter by metadata."""

MAX_MISSING = 20
"""How many missing attempts are listed; the lowest ones."""


class GroupList:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, query: Selection, cursor: str | None, limit: int) -> GroupPage:
        """One page of groups, ordered by id, then by run; with a filter by metadata, those of which a rollout's root
        has it, and the page may be short though others follow. Raises InvalidRequest for an invalid cursor."""
        mark, after = cursors.mark(query, Selection.model_fields.keys()), None
        if cursor is not None:
            *place, given = cursors.decode(cursor, tuple[cursors.Text, cursors.Text, str], "this list")
            cursors.require_mark(given, mark)
            after = GroupKey(*reversed(place))
        size = AT_ONCE if query.metadata else limit
        rows: list[ListedGroup] = []

        def read(connection: Connection) -> tuple[list[ListedGroup], GroupKey | None]:
            page = reads.keys(connection, after, size + 1, GroupFilter(**query.run_and_group))
            last = page[size - 1] if len(page) > size else None
            page = page[:size]
            if query.metadata:
                fitting = reads.with_metadata(connection, page, query.metadata)
                page = [key for key in page if key in fitting]
            return rows_of(connection, page), last

        for _ in range(LOOKED_AT // AT_ONCE):
            found, after = await self._database.read(read)
            rows += found
            if after is None or len(rows) >= limit:
                break
        if len(rows) > limit:
            after = GroupKey(rows[limit - 1]["run"], rows[limit - 1]["group_id"])
        following = None if after is None else cursors.encode((after.group_id, after.run, mark))
        return GroupPage(groups=rows[:limit], next_cursor=following)


def rows_of(connection: Connection, keys: Sequence[GroupKey]) -> list[ListedGroup]:
    """These groups as the list has them."""
    attempts, leases = reads.attempts(connection, keys), reads.leases(connection, keys)
    return [_row(key, attempts[key], leases.get(key)) for key in keys]


def _row(key: GroupKey, attempts: Sequence[Attempt], lease: FeedLease | None) -> ListedGroup:
    outcome = rules.outcome(attempts)
    rewards = outcome.statistics
    return ListedGroup(
        run=key.run,
        group_id=key.group_id,
        group_size=outcome.size,
        arrived=outcome.arrived,
        sessions=outcome.rollouts,
        closed=outcome.closed,
        failed=outcome.failed,
        evaluation=outcome.evaluation,
        rewarded=rewards.count if rewards else 0,
        mean=rewards.mean if rewards else None,
        std=rewards.std if rewards else None,
        min=rewards.min if rewards else None,
        max=rewards.max if rewards else None,
        zero_variance=rewards is not None and rewards.count > 1 and rewards.zero_variance,
        missing_attempts=missing_attempts([one.attempt for one in attempts if one.attempt is not None], outcome.size),
        state=_state(outcome.complete, lease),
    )


def missing_attempts(attempts: Sequence[int], size: int | None = None) -> list[int]:
    """The lowest missing attempts, at most MAX_MISSING. Attempts count from 0 if attempt 0 exists, else from 1."""
    present = set(attempts)
    if not present:
        return []
    missing: list[int] = []
    first = min(1, min(present))
    for number in range(first, max(max(present), first + (size or 0))):
        if len(missing) == MAX_MISSING:
            break
        if number not in present:
            missing.append(number)
    return missing


def _state(is_complete: bool, lease: FeedLease | None) -> Literal["open", "complete", "leased", "acknowledged"]:
    if lease is not None and lease.is_acknowledged:
        return "acknowledged"
    if not is_complete:
        return "open"
    return "leased" if lease is not None and lease.is_leased else "complete"


NOTES_AT_ONCE = 100
"""Groups updated in one transaction, which then takes some milliseconds."""


async def settle_groups(database: Database, writer: Writer) -> None:
    """Update all groups whose sessions have changed."""
    more = await database.read(reads.has_notes)
    while more:
        try:
            more = await writer.submit(Settle(NOTES_AT_ONCE))
        except StoreDamaged:
            return await _settle_each(database, writer)
    return None


async def _settle_each(database: Database, writer: Writer) -> None:
    """Update each group in a transaction of its own. A group with a session on a damaged page stays as it was."""
    for key in await database.read(reads.noted):
        try:
            await writer.submit(SettleGroup(key))
        except StoreDamaged as error:
            database.unreadable.warn_of_group(key, error)
