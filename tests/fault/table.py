"""The table of faults: what the marked tests tried, and what came of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from helpers.tables import Table


@dataclass
class Tally:
    """What one test counts: how often it did the fault, and the turns that were acknowledged, lost and taken twice.

    `recoveries` are the seconds from each fault to the first turn that was acknowledged after it.
    """

    tried: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    recoveries: list[float] = field(default_factory=list)

    def recovered(self, seconds: float) -> None:
        self.recoveries.append(seconds)

    def add(self, other: Tally) -> None:
        self.tried += other.tried
        self.acknowledged += other.acknowledged
        self.lost += other.lost
        self.doubled += other.doubled
        self.recoveries += other.recoveries


_KEY = pytest.StashKey[Tally]()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """The counts of a test with `@pytest.mark.fault(number, title)`."""
    counted = request.node.stash[_KEY] = Tally()
    return counted


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that lost or doubled a turn fails, and one that tried nothing; what it counted is told in any case."""
    mark = item.get_closest_marker("fault")
    counted = item.stash.get(_KEY, None)
    if mark is None:
        assert counted is None, "a tally needs the mark fault(number, title)"
        return (yield)
    assert counted is not None, "a test of a fault counts what it tried: fixture tally"
    number, title = mark.args
    try:
        result = yield
    finally:
        item.user_properties.append((FaultTable.key, {"number": number, "title": title, **asdict(counted)}))
    assert counted.tried > 0, "no fault was tried"
    assert (counted.lost, counted.doubled) == (0, 0), "turns were lost or taken twice"
    return result


class FaultTable(Table):
    """Sums what the reports tell, by fault and title."""

    title, key, left = "faults", "fault", (1,)
    headings = ("fault", "what", "tried", "acknowledged", "lost", "doubled", "slowest recovery")

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], Tally] = {}

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when == "call":
            counts = dict(value)
            row = self.rows.setdefault((counts.pop("number"), counts.pop("title")), Tally())
            row.add(Tally(**counts))

    def cells(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for (number, title), row in sorted(self.rows.items()):
            slowest = f"{max(row.recoveries):.2f} s" if row.recoveries else "-"
            counts = (row.tried, row.acknowledged, row.lost, row.doubled)
            found.append((str(number), title, *map(str, counts), slowest))
        return found


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(), "fault-table")
