"""The simulation: hundreds of schedules of crashes, freezes, lost answers and engine faults, each judged at its end."""

from __future__ import annotations

import secrets

import pytest

from fault.table import Tally
from tests.tools.simulation.__main__ import run

TITLE = "simulated schedules of crashes, freezes, lost answers and clocks that jump"

QUICK = 15
SCHEDULES = 50
LONG = 500


def simulate(first: int, count: int, tally: Tally) -> None:
    """A failure is printed with its seed; `python -m tests.tools.simulation --seed … --trace` repeats it exactly."""
    outcomes = run(range(first, first + count))
    tally.tried += outcomes.mishaps
    tally.acknowledged += outcomes.turns
    assert outcomes.turns > count, "hardly a turn was acknowledged: nothing was tried"
    assert outcomes.unsearched * 100 <= outcomes.searched, "hardly any session may go without a search"
    assert [(outcome.seed, outcome.problems[:3]) for outcome in outcomes.failed] == []


@pytest.mark.fault(9, TITLE)
@pytest.mark.parametrize(("first", "last"), [(1, QUICK), pytest.param(QUICK + 1, SCHEDULES, marks=pytest.mark.long)])
def test_every_promise_is_kept(tally: Tally, first: int, last: int) -> None:
    simulate(first, last - first + 1, tally)


@pytest.mark.untimed
@pytest.mark.fault(9, TITLE)
def test_every_promise_is_kept_for_any_seed(tally: Tally) -> None:
    first = secrets.randbelow(1 << 40)
    print(f"seeds from {first}")
    simulate(first, LONG, tally)
