"""Names of objects, below the URL of the object storage.

    <session>/<incarnation>-<fence>.<kind>.<number>        a chunk of a turn
    <session>/<incarnation>f<copy>-<fence>.<kind>.<number>  a fork's copy of one

No process has the number of another, and no turn the fence of another, so that no name is given twice. A name that ends
with `/`, `.` or `-` stands for all that begin with it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

OWNER, PROBE = "turnlog!owner", "turnlog!probe"
"""Objects of no session: `!` is in no session's id."""

_OBJECT = re.compile(r"([^/]+)/([0-9]+)(f[0-9]+)?-([0-9]+)\.[a-z_]+\.[0-9]+")
_TURN = re.compile(r"[^/]+/[0-9]+-([0-9]+)\.")


class ParsedName(NamedTuple):
    session_id: str
    fence: int


def folder_of(session_id: str) -> str:
    """The part of a name that all objects of a session share. A path may not have a part `.` or `..`."""
    return f"{session_id}!/" if session_id in (".", "..") else f"{session_id}/"


def of_turn(session_id: str, incarnation: int, fence: int) -> str:
    """What the names of all objects of a turn begin with."""
    return f"{folder_of(session_id)}{incarnation}-{fence}."


def of_copies(session_id: str, incarnation: int, copy: int) -> str:
    """What the names of all objects of a fork begin with; `copy` counts a process's forks."""
    return f"{folder_of(session_id)}{incarnation}f{copy}-"


def fence_of(name: str) -> int | None:
    """The fence in what `of_turn` gives; None for other names."""
    matched = _TURN.fullmatch(name)
    return None if matched is None else int(matched[1])


def is_prefix(name: str) -> bool:
    return name[-1] in "/.-"


def parsed(name: str) -> ParsedName | None:
    """None for an object that is no chunk."""
    matched = _OBJECT.fullmatch(name)
    return None if matched is None else ParsedName(matched[1].rstrip("!"), int(matched[4]))
