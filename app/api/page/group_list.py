"""The list of groups: how far each is, and whether its rewards differ."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from app.domain.groups import statistics
from app.errors import InvalidRequest
from app.store import group_list, survey_lists
from app.store.engine import Database
from app.store.group_list import FeedLease, RolloutSummary
from app.store.reads import Connection

MAX_MISSING = 20
"""Missing attempts that are named: the lowest."""

GroupState = Literal["open", "complete", "leased", "acknowledged"]
"""`complete`: each rollout that is not erased is closed and rewarded. The feed leases such, until acknowledged."""


class GroupRow(msgspec.Struct, frozen=True):
    """`sessions` are the rollouts, by their roots, that are not erased; of their rewards are mean, deviation (the
    population's) and range.

    `zero_variance`: there are several rewards, all alike. `missing_attempts`: numbers between the first (0 or 1) and
    the largest that no session has, an erased one neither.
    """

    group_id: str
    sessions: int
    closed: int
    rewarded: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_variance: bool
    missing_attempts: Sequence[int]
    state: GroupState


class GroupPage(msgspec.Struct, frozen=True):
    groups: Sequence[GroupRow]
    next_cursor: str | None


class GroupList:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, cursor: str | None, limit: int) -> GroupPage:
        """In the order of their ids. Raises InvalidRequest for a cursor that is not one of these."""
        after = None if cursor is None else _decoded(cursor)

        def read(connection: Connection) -> GroupPage:
            found = group_list.ids(connection, after, limit + 1)
            shown = found[:limit]
            return page(found, group_list.members(connection, shown), group_list.leases(connection, shown))

        def page(
            found: Sequence[str], members: Mapping[str, Sequence[RolloutSummary]], leases: Mapping[str, FeedLease]
        ) -> GroupPage:
            return GroupPage(
                groups=[_row(one, members[one], leases.get(one)) for one in found[:limit]],
                next_cursor=_encoded(found[limit - 1]) if len(found) > limit else None,
            )

        return await self._database.read(
            read, or_else=lambda connection: page(*survey_lists.groups_page(connection, after, limit + 1))
        )


def _row(group_id: str, members: Sequence[RolloutSummary], lease: FeedLease | None) -> GroupRow:
    there = [one for one in members if one.status != "erased"]
    closed = [one for one in there if one.status == "closed"]
    rewards = [one.reward for one in there if one.reward is not None]
    found = statistics(rewards) if rewards else None
    is_complete = bool(there) and all(one.finished for one in there)
    return GroupRow(
        group_id=group_id,
        sessions=len(there),
        closed=len(closed),
        rewarded=len(rewards),
        mean=found.mean if found else None,
        std=found.std if found else None,
        min=found.min if found else None,
        max=found.max if found else None,
        zero_variance=found is not None and found.count > 1 and found.zero_variance,
        missing_attempts=missing_attempts([one.attempt for one in members if one.attempt is not None]),
        state=_state(is_complete, lease),
    )


def missing_attempts(attempts: Sequence[int]) -> list[int]:
    """Attempts are counted from 0 where there is one of that number, else from 1. At most MAX_MISSING."""
    there = set(attempts)
    if not there:
        return []
    missing: list[int] = []
    for number in range(min(1, min(there)), max(there)):
        if len(missing) == MAX_MISSING:
            break
        if number not in there:
            missing.append(number)
    return missing


def _state(is_complete: bool, lease: FeedLease | None) -> GroupState:
    if lease is not None and lease.is_acknowledged:
        return "acknowledged"
    if not is_complete:
        return "open"
    return "leased" if lease is not None and lease.is_leased else "complete"


def _encoded(group_id: str) -> str:
    return base64.urlsafe_b64encode(group_id.encode()).decode().rstrip("=")


def _decoded(cursor: str) -> str:
    """Raises InvalidRequest."""
    try:
        found = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("cursor is not one that this list gave") from error
    if "\0" in found:
        raise InvalidRequest("cursor is not one that this list gave")
    return found
