"""When a group is complete, and the statistics of its rewards. Computed from the log, and never stored in it.

A group that has rollouts for training has no others: evaluations count only in a group of evaluations.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import msgspec

from app.domain.events import Failure
from app.domain.groups import spread_of


class Attempt(msgspec.Struct, frozen=True):
    """A rollout of a group, by its root. `reward` is null for one that was erased unrewarded.

    `finished`: it is closed and rewarded, or has failed, with all sessions of its agents and children.
    """

    session_id: str
    attempt: int | None
    reward: float | None
    status: str
    finished: bool
    evaluation: bool = False
    failed: Failure | None = None


class Statistics(msgspec.Struct, frozen=True):
    """Statistics of a group's rewards; `std` is the sample's (n − 1), by which `advantage=grpo` divides; 0 for one."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    zero_variance: bool


class GroupOutcome(msgspec.Struct, frozen=True):
    """What has become of a group's rollouts, of which erased ones do not count; no statistics without a reward.

    `statistics` are of those that did not fail. `evaluation`: it is a group of evaluations.
    """

    rollouts: int
    closed: int
    failed: int
    statistics: Statistics | None
    complete: bool
    evaluation: bool


def is_complete(rollouts: int, unfinished: int) -> bool:
    """Has a group a rollout, and is each of them finished? Erased ones do not count."""
    return rollouts > 0 and unfinished == 0


def of_one_kind(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The rollouts for training; where there are none, the evaluations."""
    return [one for one in attempts if not one.evaluation] or list(attempts)


def outcome(attempts: Sequence[Attempt]) -> GroupOutcome:
    own = of_one_kind(attempts)
    counted = [one for one in own if one.status not in ("erased", "undone")]
    rewards = [one.reward for one in counted if one.reward is not None and one.failed is None]
    return GroupOutcome(
        rollouts=len(counted),
        closed=sum(one.status == "closed" for one in counted),
        failed=sum(one.failed is not None for one in counted),
        statistics=statistics(rewards) if rewards else None,
        complete=is_complete(len(counted), sum(not one.finished for one in counted)),
        evaluation=bool(own) and own[0].evaluation,
    )


def statistics(rewards: Sequence[float]) -> Statistics:
    """Statistics of at least one finite reward. Raises ValueError for none."""
    if not rewards:
        raise ValueError("no rewards have no statistics")
    lowest, highest = min(rewards), max(rewards)
    spread = spread_of(rewards)
    std = spread.length / math.sqrt(max(len(rewards) - 1, 1))
    return Statistics(
        count=len(rewards),
        mean=min(max(math.ldexp(spread.mean, spread.exponent), lowest), highest),
        std=0.0 if lowest == highest else _float64(std, spread.exponent),
        min=lowest,
        max=highest,
        zero_variance=lowest == highest,
    )


def _float64(fraction: float, exponent: int) -> float:
    """The largest finite number where the value would be beyond it."""
    try:
        return math.ldexp(fraction, exponent)
    except OverflowError:
        return sys.float_info.max
