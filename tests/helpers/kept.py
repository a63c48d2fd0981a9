"""The table of what a session kept of a harness's work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from helpers.tables import Table


@dataclass(frozen=True)
class Kept:
    """Of the sessions of one case: requests refused, the engine's generations, committed turns, rows, generations in
    the loss of at least one row, of none and of several; and why the rows' branches began."""

    case: str
    setting: str
    refused: int
    generations: int
    turns: int
    rows: int
    in_loss: int
    lost: int
    doubled: int
    causes: str


class KeptTable(Table):
    title, key, left = "what sessions kept", "kept", (0, 1, 9)
    headings = (
        *("case", "session", "refused", "generations", "turns", "rows", "in the loss", "lost", "doubled"),
        "branches",
    )

    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when == "call":
            self._lines.append(tuple(map(str, value)))

    def cells(self) -> list[tuple[str, ...]]:
        return sorted(self._lines)


def tell(request: pytest.FixtureRequest, kept: Kept) -> None:
    """Have the table show this line, whether the test passes or not."""
    request.node.user_properties.append((KeptTable.key, list(asdict(kept).values())))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KeptTable(), "kept-table")
