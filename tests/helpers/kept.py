"""The table of what a session kept of a harness's work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from helpers.tables import Table


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


class KeptTable(Table):
    title, key, left = "what sessions kept", "kept", (0, 1)
    headings = ("case", "on_divergence", "200", "400", "turns", "live", "rows", "tokens sampled", "tokens in the loss")

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
