"""The tables of what sessions kept of a harness's work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
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


@dataclass(frozen=True)
class Odd:
    """Of the sessions of one harness before one kind of odd engine: committed turns; requests to the engine, and those
    that it refused; rows, and those that begin with drift, in capture mode and with a tokenizer; turns in no row's
    loss, or in several's; forks, refusals and rollbacks that it did not mean, and those that it did, `why`."""

    harness: str
    mode: str
    sessions: int = 0
    turns: int = 0
    engine_calls: int = 0
    engine_refused: int = 0
    rows: int = 0
    drift: int = 0
    tokenizer_drift: int = 0
    lost: int = 0
    doubled: int = 0
    false: int = 0
    meant: int = 0
    why: str = ""

    def and_also(self, other: Odd) -> Odd:
        """The sums, and both reasons."""
        counted = [name for name, value in vars(self).items() if isinstance(value, int)]
        sums = {name: getattr(self, name) + getattr(other, name) for name in counted}
        reasons = dict.fromkeys(why for why in (*self.why.split("; "), *other.why.split("; ")) if why)
        return replace(self, **sums, why="; ".join(reasons))


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


class OddTable(Table):
    """A line a harness and kind of mode: what stands before the colon."""

    title, key, left = "harnesses before odd engines", "odd", (0, 1, 13)
    headings = (
        *("harness", "the engine gives", "sessions", "turns", "engine calls", "refused", "rows", "drift"),
        *("with a tokenizer", "lost", "doubled", "false", "meant", "why"),
    )

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], Odd] = {}

    def add(self, report: pytest.TestReport, value: Any) -> None:
        if report.when != "call":
            return
        seen = Odd(*value)
        seen = replace(seen, mode=seen.mode.partition(":")[0])
        key = seen.harness, seen.mode
        self._lines[key] = self._lines[key].and_also(seen) if key in self._lines else seen

    def cells(self) -> list[tuple[str, ...]]:
        return sorted(tuple(map(str, asdict(line).values())) for line in self._lines.values())


def tell(request: pytest.FixtureRequest, kept: Kept | Odd) -> None:
    """Have the table show this line, whether the test passes or not."""
    key = KeptTable.key if isinstance(kept, Kept) else OddTable.key
    request.node.user_properties.append((key, list(asdict(kept).values())))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KeptTable(), "kept-table")
    config.pluginmanager.register(OddTable(), "odd-table")
