"""The table of threats: what the marked tests tried, and whether it was fended off, printed once at the end of a run.

A pytest plugin, as `fault.table`: what it needs travels in the tests' reports, also out of other processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

PROPERTY = "threat"
HEADINGS = ("threat", "tries", "result")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    for mark in item.iter_markers("threat"):
        item.user_properties.append((PROPERTY, mark.args[0]))
    return (yield)


class ThreatTable:
    """Counts tests by the threat they try."""

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is skipped has tried nothing; one that failed anywhere has not fended it off."""
        for name, value in report.user_properties:
            if name == PROPERTY and (report.when == "call" or report.failed):
                self._tries[str(value)] += report.when == "call" and not report.skipped
                self._failures[str(value)] += report.failed

    def lines(self) -> list[str]:
        rows = [HEADINGS]
        for threat in sorted(self._tries):
            failures = self._failures[threat]
            rows.append((threat, str(self._tries[threat]), f"FAILED {failures}" if failures else "fended off"))
        width = max(len(row[0]) for row in rows)
        return [f"{what.ljust(width)}  {tries.rjust(5)}  {result}" for what, tries, result in rows]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._tries:
            terminalreporter.section("threats")
            for line in self.lines():
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ThreatTable(), "threat-table")
