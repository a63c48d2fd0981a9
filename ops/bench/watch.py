"""Watchers: processes that measure while a benchmark goes on, so that its own event loop adds no delay.

A watcher says `ready`, works until its standard input ends, and then prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from ops.server import ROOT

READY = b"ready\n"


class WatcherFailed(Exception):
    """The process ended without a report; standard error has the reason."""


class Watcher:
    """`python -m <module> <arguments>` as a context manager; `report` ends it."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start, and wait until it measures. Raises WatcherFailed."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != READY:
            raise WatcherFailed(" ".join(self._command))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def report(self) -> Any:
        """End it and take what it found. Raises WatcherFailed."""
        process, self._process = self._process, None
        if process is None:
            raise WatcherFailed("not running")
        said, _ = process.communicate()
        if process.returncode:
            raise WatcherFailed(" ".join(self._command))
        return json.loads(said)


def go_first() -> bool:
    """Run as soon as there is something to do, whatever else the core has; False where that is not allowed.

    It is not on most machines but for root; without it a figure also holds the wait for the core.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def begin() -> None:
    """Tell the parent that the measuring begins."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()


def told_to_stop(wait_s: float) -> bool:
    """Sleep so long, or less if the parent wants the report."""
    return bool(select.select([sys.stdin], [], [], max(wait_s, 0))[0])


def finish(found: Any) -> None:
    """Print the report, if the parent still listens."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(found), flush=True)
