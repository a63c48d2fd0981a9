"""Named points at which a test can crash or freeze the process; see CONTRIBUTING.md.

`TURNLOG_CRASH_POINT=in_commit` kills the process with SIGKILL when it first reaches `in_commit`; `in_commit:3`
when it reaches it for the third time; `in_commit:3:stop` freezes it there with SIGSTOP instead. In production the
variable is not set; where each turn comes by, a point is then one test of `ARMED` and no call.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from typing import Literal, get_args

VARIABLE = "TURNLOG_CRASH_POINT"

# `in_…` is inside the transaction, between its last statement and COMMIT.
CrashPoint = Literal[
    "before_claim",
    "in_claim",
    "after_claim",
    "before_put",
    "after_put",  # a turn's objects are in the bucket, and no row refers to them yet
    "after_copied",  # a fork's objects are in the bucket, and there is no fork yet
    "after_object_deleted",  # objects are deleted, and still in the queue
    "before_archive_put",
    "after_archive_put",  # a file is written; its sessions are still in the database
    "in_archive",
    "after_archived",  # they are not; the file has no end yet
    "in_content_dropped",  # the many rows of a large session are deleted in steps
    "after_erasing_begun",  # a session must leave its files
    "after_archive_rewritten",  # one is there a second time, without it
    "after_archive_deleted",  # the old file is gone, and the index still says that it holds erased sessions
    "in_import",
    "after_imported",  # after each rollout that came back
    "before_engine",
    "after_engine",
    "after_judged",
    "after_staged",  # after each staged chunk
    "before_commit",
    "in_commit",
    "after_commit",
    "during_reply",  # between the pieces of a large reply
    "in_spent",  # what a turn has used of its limits is counted, with its end
    "in_limit_noted",  # that a limit has refused a request
    "before_release",  # a claim ends without a commit
    "in_release",
    "after_release",
    "before_create",
    "in_create",
    "after_create",
    "in_fork",
    "after_fork",  # after each new session of a fork
    "in_finish",
    "after_finish",
    "in_reward",
    "after_reward",
    "after_reward_shared",
    "in_annotation",
    "after_annotation",
    "in_close",
    "after_close",
    "after_child_closed",
    "after_tombstones",
    "after_freed",  # after each step that frees a few chunks
    "after_components",  # erasing a session: after each step that deletes the text in a few rewards and annotations
    "in_erase",
    "after_erase",  # the rows are deleted; SQLite's log file is not truncated yet
    "in_run_ended",  # a run is closed, or is to be erased
    "after_run_ended",  # its sessions are as before
    "in_run_erased",  # its sessions are erased, and its name is free
    "in_checkpoint",
    "after_checkpoint",
    "after_held",  # turns are held for a restore; nothing has been taken back yet
    "in_restore",
    "after_session_restored",  # after each session
    "after_groups_restored",  # after each step of some groups
    "in_restore_finished",
    "after_restore_finished",  # the epoch is raised; turns are still held
    "after_gate_shut",  # the pause is on disk; no engine has been paused yet
    "before_gate_opened",  # the engines have been resumed; the pause is still on disk
    "after_engine_died",  # it is in the fleet's log; nobody has been told
    "after_webhook_sent",  # a notice is delivered; the receiver's cursor is still before it
    "in_webhook_moved",
]

POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)

ARMED, _, _HOW = os.environ.get(VARIABLE, "").partition(":")
"""The point at which this process is to end; empty in production."""

_TIMES, _, _STOP = _HOW.partition(":")
_passes = itertools.count(1)


def reach(point: CrashPoint) -> None:
    """Kill or stop the process here if the variable names this point and this is the chosen time."""
    if point == ARMED and next(_passes) == int(_TIMES or 1):
        os.kill(os.getpid(), signal.SIGSTOP if _STOP else signal.SIGKILL)


def mistakes() -> list[str]:
    """Errors in the variable's value; an empty list if it is valid or not set."""
    wanted = os.environ.get(VARIABLE, "").strip()
    form = re.fullmatch(r"([a-z_]+)(:[1-9][0-9]{0,8}(:stop)?)?", wanted)
    if wanted and (form is None or form[1] not in POINTS):
        points = ", ".join(POINTS)
        return [f"{VARIABLE}={wanted!r}: expected <point>[:<times>[:stop]] with a point of {points}"]
    return []
