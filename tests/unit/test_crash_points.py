"""Crash points: the n-th time kills or freezes, nothing else does, and a wrong wish stops start-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from app.crash_points import POINTS, VARIABLE
from app.errors import StartupError
from app.settings import load_settings

COMES_BY = """
import app.crash_points
for number in range(1, 4):
    app.crash_points.reach("in_claim")
    app.crash_points.reach("in_commit")
    print(number, flush=True)
"""


def coming_by(wish: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: wish}
    return subprocess.Popen([sys.executable, "-c", COMES_BY], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("wish", "printed", "code"),
    [("", 3, 0), ("in_commit", 0, -signal.SIGKILL), ("in_commit:3", 2, -signal.SIGKILL), ("in_commit:4", 3, 0)],
)
def test_the_process_is_killed_when_it_comes_by_for_the_nth_time(wish: str, printed: int, code: int) -> None:
    process = coming_by(wish)
    output, _ = process.communicate(timeout=120)
    assert (len(output.splitlines()), process.returncode) == (printed, code)


def test_the_process_can_be_frozen_instead() -> None:
    process = coming_by("in_claim:2:stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=120)
    assert (output.splitlines(), process.returncode) == (["1", "2", "3"], 0)


@pytest.mark.parametrize("wish", ["nowhere", "in_commit:0", "in_commit:x", "in_commit:1:kill", "in_commit:", ":2"])
def test_a_point_that_does_not_exist_stops_start_up_with_one_line(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    monkeypatch.setenv(VARIABLE, wish)
    with pytest.raises(StartupError) as caught:
        load_settings()
    line = str(caught.value)
    assert line.startswith(f"{VARIABLE}={wish!r}: expected ")
    assert "\n" not in line
    assert all(point in line for point in POINTS)


@pytest.mark.parametrize("wish", ["", "in_commit", "after_claim:12", "in_erase:1:stop"])
def test_a_point_that_exists_is_taken(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    monkeypatch.setenv(VARIABLE, wish)
    load_settings()
