"""The result of a check."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple


class Level(StrEnum):
    """`warning`: it works, but not as well or safely as possible. `problem`: it does not work, or breaks a promise."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line: what was checked, the result, and what to do about it. It contains no secret."""

    area: str
    level: Level
    what: str
    todo: str = ""

    def fields(self) -> dict[str, Any]:
        return {"area": self.area, "level": self.level.value, "what": self.what, "todo": self.todo}


def ok(area: str, what: str) -> Finding:
    return Finding(area, Level.OK, what)


def warning(area: str, what: str, todo: str) -> Finding:
    return Finding(area, Level.WARNING, what, todo)


def problem(area: str, what: str, todo: str) -> Finding:
    return Finding(area, Level.PROBLEM, what, todo)
