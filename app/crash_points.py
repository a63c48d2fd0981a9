"""Named places at which a test can have the process end as a crash would, or stand still: see CONTRIBUTING.md.

`TURNLOG_CRASH_POINT=in_commit` kills the process with SIGKILL when it first comes by `in_commit`; `in_commit:3`
when it does for the third time; `in_commit:3:stop` freezes it there with SIGSTOP instead. In service the variable
is not set, and a point costs the call of an empty function (0.05 microseconds; an enum's members would cost 0.2).

`in_…` is inside the transaction, behind its last statement and before COMMIT. `after_staged` comes by after each staged
chunk, `during_reply` between the pieces of a reply that is sent in several, `…_release` where a claim ends without a
commit, `after_freed` after each step that frees a few chunks, `after_components` after each that takes the components
out of a few rewards of a session that is being erased, `after_fork` after each new session of a fork. At `after_erase`
the rows are gone, but SQLite's log file is still to be emptied. At `after_gate_shut` the pause is on disk and no engine
was told of it; at `before_gate_opened` the engines have been told to go on, and the pause stands.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from typing import Literal, get_args

VARIABLE = "TURNLOG_CRASH_POINT"

CrashPoint = Literal[
    "before_claim",
    "in_claim",
    "after_claim",
    "before_engine",
    "after_engine",
    "after_judged",
    "after_staged",
    "before_commit",
    "in_commit",
    "after_commit",
    "during_reply",
    "before_release",
    "in_release",
    "after_release",
    "before_create",
    "in_create",
    "after_create",
    "in_fork",
    "after_fork",
    "in_reward",
    "after_reward",
    "after_reward_shared",
    "in_close",
    "after_close",
    "after_child_closed",
    "after_tombstones",
    "after_freed",
    "after_components",
    "in_erase",
    "after_erase",
    "after_gate_shut",
    "before_gate_opened",
]

POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)

_ARMED, _, _HOW = os.environ.get(VARIABLE, "").partition(":")
_TIMES, _, _STOP = _HOW.partition(":")
_came_by = itertools.count(1)


def reach(point: CrashPoint) -> None:
    """The process comes by `point`, and ends there if a test has asked for it."""
    if _ARMED and point == _ARMED and next(_came_by) == int(_TIMES or 1):
        os.kill(os.getpid(), signal.SIGSTOP if _STOP else signal.SIGKILL)


def mistakes() -> list[str]:
    """What is wrong with what the environment asks for; nothing where it is one of the points, or empty."""
    wanted = os.environ.get(VARIABLE, "").strip()
    form = re.fullmatch(r"([a-z_]+)(:[1-9][0-9]{0,8}(:stop)?)?", wanted)
    if wanted and (form is None or form[1] not in POINTS):
        points = ", ".join(POINTS)
        return [f"{VARIABLE}={wanted!r}: accepted is <point>[:<times>[:stop]] with a point of {points}"]
    return []
