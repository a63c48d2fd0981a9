"""Tables of what tests have found, each printed once at the end of a run.

A table is a pytest plugin. Its lines travel in the tests' reports, so that they are one table also where several
processes ran the tests (pytest-xdist).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import pytest


class Table(ABC):
    """Of the entries `key` in the tests' `user_properties`, whose values are JSON; `left`: columns of text."""

    title: str
    key: str
    headings: Sequence[str]
    left: Collection[int] = (0,)

    @abstractmethod
    def add(self, report: pytest.TestReport, value: Any) -> None: ...

    @abstractmethod
    def cells(self) -> Sequence[Sequence[str]]: ...

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == self.key:
                self.add(report, value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not (cells := self.cells()):
            return
        terminalreporter.section(self.title)
        lines = [self.headings, *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = [
                cell.ljust(width) if place in self.left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            terminalreporter.write_line("  ".join(padded).rstrip())
