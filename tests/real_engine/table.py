"""The table of what a real engine's turns were compared with, printed once at the end of a run.

A pytest plugin, as `fault.table`: its lines travel in the tests' reports, also out of other processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

PROPERTY = "real engine"


@dataclass
class Found:
    """What a test counted: `difference` is the largest of an exported logprob to the model's own, in nats."""

    sessions: int = 0
    turns: int = 0
    kills: int = 0
    lost: int = 0
    doubled: int = 0
    rows: int = 0
    wrong_ids: int = 0
    wrong_logprobs: int = 0
    rescored: int = 0
    difference: float = 0.0


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Found:
    """Told as it is when the test ends, whether it passes or not."""
    made = Found()
    request.node.user_properties.append((PROPERTY, vars(made)))
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cells = [["test", *(name.replace("_", " ") for name in vars(Found()))]]
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "call":
                cells.append(
                    [
                        report.location[2],
                        *(f"{one:.1e}" if isinstance(one, float) else str(one) for one in value.values()),
                    ]
                )
    if len(cells) > 1:
        terminalreporter.section(PROPERTY)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            first, *others = (
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            terminalreporter.write_line("  ".join([first, *others]))
