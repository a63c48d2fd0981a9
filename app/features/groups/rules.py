"""When a group is complete, and the statistics of its rewards. Computed from the log, and never stored in it.

A group waits for `group_size` attempts, the largest that one of its sessions names; without any, for none. An attempt
has arrived once a rollout has its number; each rollout without a number is an attempt of its own. A rollout that has no
reward is replaced by a later one of its attempt (`app.domain.groups.replaced`), and does not count any more, nor does
one that was erased; both have arrived. A group is complete when all attempts have arrived and each rollout that counts
is closed and rewarded, or has failed. A group that has rollouts for training has no others: evaluations count only in a
group of evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from app.domain.events import Failure
from app.domain.groups import Played, Statistics, replaced, statistics


class Attempt(msgspec.Struct, frozen=True):
    """A rollout of a group, by its root. `reward` is null for one that was erased unrewarded.

    `finished`: it is closed and rewarded, or has failed, with all sessions of its agents and children. `group_size` is
    what it names. `engine_errors` and `tool_errors` are the root's.
    """

    session_id: str
    attempt: int | None
    reward: float | None
    status: str
    finished: bool
    group_size: int | None
    created_at: float
    updated_at: float
    evaluation: bool = False
    failed: Failure | None = None
    engine_errors: int = 0
    tool_errors: int = 0
    replaced: bool = False

    @property
    def counts(self) -> bool:
        return not (self.replaced or self.status == "erased")

    @property
    def played(self) -> Played:
        return Played(self.session_id, self.attempt, self.created_at, self.reward is not None, self.evaluation)


class GroupOutcome(msgspec.Struct, frozen=True):
    """What has become of a group's rollouts: those that count, erased ones, those that count and are not finished; how
    many attempts have arrived, and how many it waits for, None: it is not known. `statistics` are of the rewards of
    those that did not fail, None without one. `changed_at`: when one that counts was last changed, in seconds since the
    epoch. `evaluation`: it is a group of evaluations."""

    rollouts: int
    erased: int
    unfinished: int
    arrived: int
    size: int | None
    closed: int
    failed: int
    statistics: Statistics | None
    changed_at: float | None
    evaluation: bool

    @property
    def complete(self) -> bool:
        return self.rollouts > 0 and self.unfinished == 0 and self.arrived >= (self.size or 0)


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The rollouts of a group by their attempts, those without a number last; of each whether it is replaced."""
    every = sorted(attempts, key=lambda one: (one.attempt is None, one.attempt or 0, one.session_id))
    gone = replaced(one.played for one in every)
    return [msgspec.structs.replace(one, replaced=True) if one.session_id in gone else one for one in every]


def of_one_kind(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The rollouts for training; where there are none, the evaluations."""
    return [one for one in attempts if not one.evaluation] or list(attempts)


def outcome(attempts: Sequence[Attempt]) -> GroupOutcome:
    """Of a group's rollouts, as `in_order` gives them."""
    own = of_one_kind(attempts)
    counted = [one for one in own if one.counts]
    rewards = [one.reward for one in counted if one.reward is not None and one.failed is None]
    numbers = [one.attempt for one in own]
    return GroupOutcome(
        rollouts=len(counted),
        erased=sum(one.status == "erased" for one in attempts),
        unfinished=sum(not one.finished for one in counted),
        arrived=len({*numbers} - {None}) + numbers.count(None),
        size=max((one.group_size for one in attempts if one.group_size is not None), default=None),
        closed=sum(one.status == "closed" for one in counted),
        failed=sum(one.failed is not None for one in counted),
        statistics=statistics(rewards) if rewards else None,
        changed_at=max((one.updated_at for one in counted), default=None),
        evaluation=bool(own) and own[0].evaluation,
    )
