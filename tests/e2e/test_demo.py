"""The README's first command, and what it leaves to look at. `test_wheel` runs it with `--once`."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from ops.server import ROOT

pytestmark = pytest.mark.long

PATIENCE_S = 120


def _printed(terminal: int) -> Iterator[str]:
    """The lines of a terminal; ends with the last process that has it."""
    with open(terminal, "rb", closefd=False) as lines:
        try:
            yield from (line.decode() for line in lines)
        except OSError:
            return


def test_on_a_terminal_it_leaves_a_filled_page_open() -> None:
    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        [sys.executable, "-m", "ops.demo", "--full"], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    watched, said = [], []
    try:
        for line in _printed(ours):
            said.append(line)
            if page := re.search(r"(http://\S+)/ui ", line):
                watched = httpx.get(f"{page[1]}/ui/api/sessions?limit=100", trust_env=False).json()["sessions"]
                demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE_S) == 0, said
    finally:
        demo.kill()
        os.close(ours)
    assert len(watched) == 60
    assert {session["state"] for session in watched} == {"closed", "idle", "running", "paused"}
    assert "Traceback" not in "".join(said)
