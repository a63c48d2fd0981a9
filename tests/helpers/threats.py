"""The table of threats: what the marked tests tried, and whether it was fended off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from helpers.tables import Table


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    for mark in item.iter_markers("threat"):
        item.user_properties.append((ThreatTable.key, mark.args[0]))
    return (yield)


class ThreatTable(Table):
    """Counts tests by the threat they try."""

    title, key, headings, left = "threats", "threat", ("threat", "tries", "result"), (0, 2)

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, report: pytest.TestReport, value: Any) -> None:
        """A test that is skipped has tried nothing; one that failed anywhere has not fended it off."""
        if report.when == "call" or report.failed:
            self._tries[str(value)] += report.when == "call" and not report.skipped
            self._failures[str(value)] += report.failed

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (threat, str(tries), f"FAILED {self._failures[threat]}" if self._failures[threat] else "fended off")
            for threat, tries in sorted(self._tries.items())
        ]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ThreatTable(), "threat-table")
