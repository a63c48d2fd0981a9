"""The table of what a session kept of a harness's work, printed once at the end of a run.

A pytest plugin, as `fault.table`: its lines travel in the tests' reports, also out of other processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

PROPERTY = "kept"


@dataclass(frozen=True)
class Kept:
    """Of one session: requests by reply, committed and live turns, rows, and tokens sampled and in the loss."""

    case: str
    setting: str
    replies_200: int
    replies_400: int
    committed: int
    live: int
    rows: int
    engine_tokens: int
    loss_tokens: int


HEADINGS = ("case", "on_divergence", "200", "400", "turns", "live", "rows", "tokens sampled", "tokens in the loss")


class KeptTable:
    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == PROPERTY and isinstance(value, list | tuple):
                    self._lines.append(tuple(map(str, value)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._lines:
            return
        terminalreporter.section("what sessions kept")
        cells = [HEADINGS, *sorted(self._lines)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            padded = [
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            terminalreporter.write_line("  ".join(padded))


def tell(request: pytest.FixtureRequest, kept: Kept) -> None:
    """Have the table show this line, whether the test passes or not."""
    request.node.user_properties.append((PROPERTY, list(asdict(kept).values())))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KeptTable(), "kept-table")
