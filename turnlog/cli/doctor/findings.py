"""What a check found."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple


class Level(StrEnum):
    """`warning`: it works, but not as well or as safely as it could. `problem`: it does not, or promises break."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line: what was looked at, what was found, and what to do unless all is well. It holds no secret."""

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
