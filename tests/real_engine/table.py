"""The table of what a real engine's turns were compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from helpers.tables import Table


@dataclass
class Found:
    """What a test counted: `joined` turns were aborted and continued; `difference` is the largest of an exported
    logprob to the model's own, in nats."""

    sessions: int = 0
    turns: int = 0
    kills: int = 0
    joined: int = 0
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
    request.node.user_properties.append((FoundTable.key, vars(made)))
    return made


class FoundTable(Table):
    title = key = "real engine"
    headings = ("test", *(name.replace("_", " ") for name in vars(Found())))

    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when == "call":
            shown = [f"{one:.1e}" if isinstance(one, float) else str(one) for one in value.values()]
            self._lines.append((report.location[2], *shown))

    def cells(self) -> list[tuple[str, ...]]:
        return self._lines


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FoundTable(), "found-table")
