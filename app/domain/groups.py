"""Groups of sessions (attempts at one task): reward statistics, GRPO advantage, age.

All of it is computed from the log and never stored in it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from app.domain.events import Event, Failure, RolledBack, SessionCreated, TurnCommitted, is_number

EPSILON = 1e-6
"""Added to the standard deviation, as verl and slime do; in the rewards' own unit."""


class GroupKey(NamedTuple):
    """A group of a run; two runs may have groups of one id."""

    run: str
    group_id: str


REPLACED = "replaced"
"""Why a rollout that a later one of its attempt replaces is left out."""


class Played(NamedTuple):
    """A rollout's place in its group: its attempt, None for none, and when its root was created."""

    session_id: str
    attempt: int | None
    created_at: float
    is_rewarded: bool
    evaluation: bool


def replaced(rollouts: Iterable[Played]) -> frozenset[str]:
    """The rollouts of a group that have no reward, and whose attempt a later one of their kind has: that one replaces
    them."""
    every = [one for one in rollouts if one.attempt is not None]
    newest: dict[tuple[int | None, bool], tuple[float, str]] = {}
    for one in every:
        place, at = (one.attempt, one.evaluation), (one.created_at, one.session_id)
        newest[place] = max(at, newest.get(place, at))
    return frozenset(
        one.session_id
        for one in every
        if not one.is_rewarded and newest[one.attempt, one.evaluation] > (one.created_at, one.session_id)
    )


class Root(msgspec.Struct, frozen=True):
    """The root of a session's rollout, and the group that counts it; None also where the root does not exist."""

    session_id: str
    exists: bool
    group_id: str | None


OnFailed = Literal["drop", "keep"]
"""What advantages make of a failed rollout: they leave it out, or take the reward that it has."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a rollout."""

    reward: float | None = None
    failed: Failure | None = None

    def left_out(self, on_failed: OnFailed) -> str | None:
        """Why advantages leave out a rollout that has failed; None: they do not, or it has not."""
        if self.failed is None or (on_failed == "keep" and self.reward is not None):
            return None
        return f"failed: {self.failed.kind}" + (", and it has no reward" if on_failed == "keep" else "")

    def counted(self, on_failed: OnFailed) -> float | None:
        """The reward that advantages are made of, if they count the rollout."""
        return self.reward if self.left_out(on_failed) is None else None


class Spread(msgspec.Struct, frozen=True):
    """Rewards and their deviations from the mean, in units of 2 ** `exponent`; `length` is that of the deviations."""

    exponent: int
    mean: float
    deviations: Sequence[float]
    length: float


def grpo(rewards: Mapping[str, float]) -> dict[str, float]:
    """Each rollout's advantage over its group: (reward − mean) / (std + 1e-6), by session.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2) divides by the group's "std" without saying which. This is the
    sample's (n − 1): what `torch.std` gives, and with it verl, slime and TRL, so a trainer that computes its own
    advantages finds the same numbers. 0.0 for a rollout alone and where all rewards are equal: there is nothing to
    prefer. It belongs to the rollout as a whole; each of its rows and tokens has it unchanged.
    """
    if len(rewards) < 2 or min(rewards.values()) == max(rewards.values()):
        return dict.fromkeys(rewards, 0.0)
    spread = spread_of(list(rewards.values()))
    scale = spread.length / math.sqrt(len(rewards) - 1) + math.ldexp(EPSILON, -spread.exponent)
    return {name: deviation / scale for name, deviation in zip(rewards, spread.deviations, strict=True)}


def spread_of(rewards: Sequence[float]) -> Spread:
    """Scaled by a power of two, which is exact, so that neither sum nor square leaves the range of a double."""
    exponent = max(math.frexp(max(abs(reward) for reward in rewards))[1], 0)
    scaled = [math.ldexp(reward, -exponent) for reward in rewards]
    mean = min(max(math.fsum(scaled) / len(scaled), min(scaled)), max(scaled))
    deviations = [reward - mean for reward in scaled]
    return Spread(exponent, mean, deviations, math.hypot(*deviations))


class Statistics(msgspec.Struct, frozen=True):
    """Statistics of rewards; `std` is the sample's (n − 1), by which `advantage=grpo` divides; 0 for one."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    zero_variance: bool


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


def oldest_version(log: Iterable[Event]) -> int | None:
    """The smallest weight version of a sampled token of a live turn; None where none is a number.

    Copied turns that are not in the session's loss do not count: their age is another session's. `log` holds at least
    the SessionCreated, TurnCommitted and RolledBack events of a session, in order, without those that a restore took
    back (`restore.in_effect`).
    """
    live: dict[int, int] = {}
    context = 0
    for event in log:
        if isinstance(event, SessionCreated):
            context = 0 if event.fork is None else event.fork.context_turns
        elif isinstance(event, RolledBack):
            for turn in event.discarded:
                live.pop(turn, None)
        elif isinstance(event, TurnCommitted) and event.turn > context and (versions := event.version_numbers):
            live[event.turn] = min(versions)
    return min(live.values(), default=None)


def has_numbers_only(turn: TurnCommitted) -> bool:
    """Is the weight version of each sampled token of the turn a number?"""
    return all(is_number(span.version) for span in turn.weight_versions if span.end > span.start)


UNKNOWN_STALENESS = "no weight version is a number"


def staleness(current: int | None, oldest: int | None) -> int | None:
    """How many weight versions the oldest sampled token is behind; None where one of the two is not known.

    Negative where it is newer than what the trainer calls current.
    """
    return None if current is None or oldest is None else current - oldest


class Current(msgspec.Struct, frozen=True):
    """Which weight version is current: `given` in every run, else the newest of each."""

    given: int | None
    newest: Mapping[str, int] = {}

    def of(self, run: str) -> int | None:
        return self.newest.get(run) if self.given is None else self.given


def too_stale(behind: int, most: int) -> str | None:
    """Why something so many weight versions behind is left out; None where it is not."""
    return None if behind <= most else f"stale: {behind} weight versions behind, max_staleness is {most}"
