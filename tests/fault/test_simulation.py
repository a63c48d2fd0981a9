"""The simulation: hundreds of schedules of crashes, freezes, lost answers and engine faults, each judged at its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from helpers.databases import Postgres

from fault.table import Tally
from tests.tools.simulation.__main__ import run
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.store import MemoryStore, Store

STORMS = pytest.mark.fault(9, "simulated schedules of crashes, freezes, lost answers and clocks that jump")
ORDERS = pytest.mark.fault(15, "operations of clients in any order, whose answers must have one")
"""Each schedule has both; some are counted for one of them, the rest for the other."""

LONG = 500


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest) -> Iterator[Store]:
    if kind == "sqlite":
        yield MemoryStore()
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    with postgres.database(template="template1") as url:
        yield PostgresStore(url)


def simulate(store: Store, first: int, count: int, tally: Tally) -> None:
    """A failure is printed with its seed; `python -m tests.tools.simulation --seed … --trace` repeats it exactly."""
    outcomes = run(range(first, first + count), store=store)
    tally.tried += outcomes.mishaps
    tally.acknowledged += outcomes.turns
    assert outcomes.turns > count, "hardly a turn was acknowledged: nothing was tried"
    assert outcomes.unsearched * 100 <= outcomes.searched, "hardly any session may go without a search"
    assert [(outcome.seed, outcome.problems[:3]) for outcome in outcomes.failed] == []


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        pytest.param("sqlite", 1, 25, marks=STORMS),
        pytest.param("sqlite", 26, 50, marks=ORDERS),
        pytest.param("sqlite", 51, 75, marks=STORMS),
        pytest.param("postgresql", 57, 60, marks=STORMS),
        pytest.param("sqlite", 76, 105, marks=[STORMS, pytest.mark.long]),
        pytest.param("sqlite", 106, 135, marks=[STORMS, pytest.mark.long]),
        pytest.param("sqlite", 166, 195, marks=[ORDERS, pytest.mark.long]),
        pytest.param("sqlite", 196, 225, marks=[ORDERS, pytest.mark.long]),
        pytest.param("postgresql", 5, 9, marks=[STORMS, pytest.mark.long]),
        pytest.param("postgresql", 10, 14, marks=[STORMS, pytest.mark.long]),
        pytest.param("postgresql", 15, 18, marks=[STORMS, pytest.mark.long]),
    ],
)
def test_every_promise_is_kept(store: Store, tally: Tally, first: int, last: int) -> None:
    simulate(store, first, last - first + 1, tally)


@pytest.mark.untimed
@STORMS
@pytest.mark.parametrize(("kind", "schedules"), [("sqlite", LONG), ("postgresql", LONG // 4)])
def test_every_promise_is_kept_for_any_seed(store: Store, tally: Tally, schedules: int) -> None:
    first = secrets.randbelow(1 << 40)
    print(f"seeds from {first}")
    simulate(store, first, schedules, tally)
