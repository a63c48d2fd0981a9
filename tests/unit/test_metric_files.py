from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from app import metric_files
from ops.server import ROOT

TOKEN_SESSION = """
import sys
from pathlib import Path
from app.metric_files import ProcessLock
presence = ProcessLock(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is present in the folder."""
    command = [sys.executable, "-c", TOKEN_SESSION, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def test_a_process_that_begins_is_at_no_moment_taken_for_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked: list[bool] = []

    def lock(file: IO[str], how: int) -> None:
        if not how & fcntl.LOCK_NB:
            assert list(metric_files.dead(tmp_path)) == []
            locked.append(True)
        flock(file, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    presence = metric_files.ProcessLock(tmp_path)
    assert list(metric_files.dead(tmp_path)) == []
    presence.close()
    assert (locked, list(metric_files.dead(tmp_path))) == ([True], [os.getpid()])


def test_a_folder_that_was_chosen_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "chosen"))
    assert metric_files.folder() == tmp_path / "chosen"
    assert (tmp_path / "chosen").is_dir()


def test_a_process_is_dead_once_the_kernel_has_freed_its_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert list(metric_files.dead(tmp_path)) == []
    holder.kill()
    holder.wait()
    assert list(metric_files.dead(tmp_path)) == [holder.pid]
    assert list(metric_files.dead(tmp_path)) == [], "it is told once"
