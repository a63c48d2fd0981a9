"""The tables of what agent programs did and what the log has of it."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tables import Table


class _Lines(Table):
    """One line a test."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when == "call":
            self._lines.append(tuple(map(str, value)))

    def cells(self) -> list[tuple[str, ...]]:
        return sorted(self._lines)

    @classmethod
    def tell(cls, request: pytest.FixtureRequest, *cells: object) -> None:
        """Have the table show this line, whether the test passes or not."""
        request.node.user_properties.append((cls.key, list(cells)))


class Programs(_Lines):
    title, key, left = "agent programs", "program", (0, 1, 5)
    headings = (
        *("program", "case", "exit", "generations", "turns", "branches", "rows"),
        *("sampled", "in the loss", "false forks"),
    )


class Bare(_Lines):
    title, key, left = "agent programs that are told a base URL, a token and a model", "bare-program", (0, 1, 8)
    headings = (
        *("program", "task", "kills", "exit", "acknowledged", "turns", "generations", "in flight at a kill"),
        *("branches", "rows", "sampled", "in the loss", "not in it", "doubled"),
    )


class Kills(_Lines):
    title, key = "kills under agent programs", "program-kills"
    headings = (
        *("program", "kills", "runs", "finished", "turns", "generations", "died with the server"),
        *("lost", "doubled", "false forks"),
    )


class Restarts(_Lines):
    title, key, left = "kills of `turnlog serve`'s server under clients' default retries", "restarts", (0, 1)
    headings = ("client", "server", "kills in a turn, survived", "turns", "lost", "doubled")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Programs(), "program-table")
    config.pluginmanager.register(Bare(), "bare-program-table")
    config.pluginmanager.register(Kills(), "program-kill-table")
    config.pluginmanager.register(Restarts(), "restart-table")
