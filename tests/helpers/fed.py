"""The table of what trainers' queues got of the rows in the feed, over kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from helpers.tables import Table


@dataclass(frozen=True)
class Fed:
    """One run of an adapter: what was killed and how often, the rows that Turnlog had and those of acknowledged groups,
    the rows that the trainer never got, and the times that it got one again.
    """

    adapter: str
    killed: str
    kills: int
    rows: int
    acknowledged: int
    lost: int
    doubled: int


class FedTable(Table):
    title, key, left = "what trainers' queues got", "fed", (0, 1)
    headings = ("adapter", "killed", "kills", "rows", "acknowledged", "lost", "doubled")

    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when == "call":
            self._lines.append(tuple(map(str, value)))

    def cells(self) -> list[tuple[str, ...]]:
        return sorted(self._lines)


def audit(
    request: pytest.FixtureRequest,
    adapter: str,
    killed: str,
    kills: int,
    *,
    made: Iterable[Any],
    acknowledged: Iterable[Any],
    got: Iterable[Any],
) -> Fed:
    """Compare by the rows' identities, and have the table show the result, whether the test passes or not."""
    expected, taken = set(made), Counter(got)
    assert not taken.keys() - expected, "the trainer got rows that Turnlog does not have"
    doubled = sum(count - 1 for count in taken.values())
    fed = Fed(adapter, killed, kills, len(expected), len(set(acknowledged)), len(expected - taken.keys()), doubled)
    request.node.user_properties.append((FedTable.key, list(asdict(fed).values())))
    return fed


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FedTable(), "fed-table")
