"""Statistics of a group's rewards, the GRPO advantage, and a group's age in weight versions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.log import committed, rolled_back
from hypothesis import assume, given
from hypothesis import strategies as st

from app.domain.events import Failure
from app.domain.groups import EPSILON, Outcome, grpo, oldest_version, statistics
from app.features.groups.groups import MAX_MISSING, missing_attempts
from app.features.groups.rules import Attempt, outcome
from workers.reply import VersionSpan

REWARDS = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=64)
ANY = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=16)
BIGGEST = 1.7976931348623157e308


def named(rewards: list[float]) -> dict[str, float]:
    return {f"s{number}": reward for number, reward in enumerate(rewards)}


@given(REWARDS)
def test_statistics_are_numpys(rewards: list[float]) -> None:
    found = statistics(rewards)
    array = np.array(rewards)
    scale = max(1.0, float(np.abs(array).max()))
    assert found.count == len(rewards)
    assert found.mean == pytest.approx(float(array.mean()), abs=1e-12 * scale)
    sample = float(array.std(ddof=1)) if len(rewards) > 1 else 0.0
    assert found.std == pytest.approx(sample, rel=1e-9, abs=1e-12 * scale)
    assert (found.min, found.max) == (min(rewards), max(rewards))
    assert found.zero_variance == (len(set(rewards)) == 1)


@pytest.mark.parametrize(
    ("outcome", "dropped", "kept", "why"),
    [
        (Outcome(0.5), 0.5, 0.5, None),
        (Outcome(0.0, Failure("agent")), None, 0.0, None),
        (Outcome(None, Failure("timeout", "an hour")), None, None, "failed: timeout, and it has no reward"),
        (Outcome(), None, None, None),
    ],
)
def test_a_failure_counts_only_by_a_reward_that_it_has(
    outcome: Outcome, dropped: float | None, kept: float | None, why: str | None
) -> None:
    assert (outcome.counted("drop"), outcome.counted("keep")) == (dropped, kept)
    assert outcome.left_out("keep") == why
    assert outcome.left_out("drop") == (outcome.failed and f"failed: {outcome.failed.kind}")


def attempt(name: str, number: int, reward: float | None, *, is_finished: bool = True, **fields: Any) -> Attempt:
    return Attempt(name, number, reward, "closed" if is_finished else "open", is_finished, None, 1.0, 1.0, **fields)


def test_evaluations_count_only_in_a_group_of_evaluations() -> None:
    trained, judged = attempt("a", 0, 1.0), attempt("b", 0, None, is_finished=False, evaluation=True)
    lost = attempt("c", 1, None, failed=Failure("other"))
    for attempts, rollouts, rewards, complete, evaluation in (
        ([trained, judged], 1, 1, True, False),
        ([judged], 1, None, False, True),
        ([trained, lost], 2, 1, True, False),
        ([lost], 1, None, True, False),
        ([], 0, None, False, False),
    ):
        found = outcome(attempts)
        assert (found.rollouts, found.complete, found.evaluation) == (rollouts, complete, evaluation)
        assert (found.statistics and found.statistics.count) == rewards


@given(ANY)
def test_no_reward_is_too_large_or_too_small(rewards: list[float]) -> None:
    found = statistics(rewards)
    assert found.min <= found.mean <= found.max
    assert 0 <= found.std <= BIGGEST
    assert all(math.isfinite(advantage) for advantage in grpo(named(rewards)).values())


@pytest.mark.parametrize(
    ("rewards", "mean", "std"),
    [
        ([BIGGEST, BIGGEST], BIGGEST, 0.0),
        ([BIGGEST, -BIGGEST], 0.0, BIGGEST),
        ([5e-324, 5e-324], 5e-324, 0.0),
        ([1e-200, 3e-200], 2e-200, math.sqrt(2) * 1e-200),
        ([1e16, 1e16 + 4], 1e16 + 2, math.sqrt(8)),
        ([0.1] * 10, 0.1, 0.0),
    ],
)
def test_extreme_groups(rewards: list[float], mean: float, std: float) -> None:
    found = statistics(rewards)
    assert (found.mean, found.std) == (pytest.approx(mean, rel=1e-15), pytest.approx(std, rel=1e-15))


def test_no_rewards_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="no rewards"):
        statistics([])


@given(REWARDS)
def test_the_advantage_is_what_torch_std_gives(rewards: list[float]) -> None:
    """`numpy.std(ddof=1)` is `torch.std`; verl, slime and TRL divide by that."""
    assume(len(set(rewards)) > 1)
    array = np.array(rewards)
    expected = (array - array.mean()) / (array.std(ddof=1) + EPSILON)
    found = list(grpo(named(rewards)).values())
    assert found == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [BIGGEST, BIGGEST], [-0.0, 0.0]])
def test_where_nothing_is_to_prefer_the_advantage_is_zero(rewards: list[float]) -> None:
    assert grpo(named(rewards)) == dict.fromkeys(named(rewards), 0.0)


def turn(number: int, *versions: str, **fields: Any) -> Any:
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    return committed(number, number - 1, number, weight_versions=spans, **fields)


def test_the_versions_of_a_turn_are_those_that_are_numbers() -> None:
    assert turn(1, "9", "10", "step-11").version_numbers == [9, 10]
    assert turn(1).version_numbers == []
    assert turn(1, "9" * 19).version_numbers == [], "more than 64 bits hold"
    assert turn(1, "²").version_numbers == []
    assert committed(1, 0, 1, weight_versions=(VersionSpan("7", 2, 2),)).version_numbers == [], "of no token"


def test_the_oldest_version_is_of_live_turns() -> None:
    assert oldest_version([turn(1, "5"), turn(2, "7", "6")]) == 5
    assert oldest_version([turn(1, "5"), rolled_back(0, 1), turn(2, "7", "6")]) == 6
    assert oldest_version([turn(1, "5"), turn(2, "4"), turn(3, "3"), rolled_back(1, 2, 3), turn(4, "8")]) == 5
    assert oldest_version([turn(1, "a"), turn(2, "8")]) == 8
    assert oldest_version([turn(1, "a")]) is None
    assert oldest_version([]) is None


@pytest.mark.parametrize(
    ("attempts", "missing"),
    [
        ([], []),
        ([0], []),
        ([1], []),
        ([3, 0, 1], [2]),
        ([1, 2, 4], [3]),
        ([2], [1]),
        ([0, 2**31 - 1], list(range(1, MAX_MISSING + 1))),
        ([1, 1, 3, 3], [2]),
    ],
)
def test_the_numbers_between_the_first_and_the_last(attempts: list[int], missing: list[int]) -> None:
    assert missing_attempts(attempts) == missing


@pytest.mark.parametrize(
    ("attempts", "size", "missing"), [([0], 3, [1, 2]), ([2], 3, [1, 3]), ([0, 5], 2, [1, 2, 3, 4]), ([], 2, [])]
)
def test_those_of_its_size_are_missing_too(attempts: list[int], size: int, missing: list[int]) -> None:
    assert missing_attempts(attempts, size) == missing
