from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from app import metric_files
from ops.server import ROOT

CHILD = """
import multiprocessing, os, sys
from app import metric_files
def tell(pipe):
    found = metric_files.folder()
    pipe.send((str(found), os.environ[metric_files.VARIABLE]))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = context.Pipe()
        child = context.Process(target=tell, args=(theirs,))
        child.start()
        print(*ours.recv())
        child.join()
    print(metric_files.folder())
"""

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


def test_children_of_one_supervisor_share_a_folder_of_their_own_and_it_has_none(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(CHILD)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop(metric_files.VARIABLE, None)

    def run() -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return [line.split() for line in done.stdout.splitlines()]

    first, second, own = run()
    assert first == second
    assert first[0] == first[1]
    assert own == ["None"]
    folder = Path(first[0])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run()[0] != first, "another supervisor has another folder"


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
    monkeypatch.setenv(metric_files.VARIABLE, str(tmp_path / "chosen"))
    assert metric_files.folder() == tmp_path / "chosen"
    assert (tmp_path / "chosen").is_dir()


def test_a_process_is_dead_once_the_kernel_has_freed_its_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert list(metric_files.dead(tmp_path)) == []
    holder.kill()
    holder.wait()
    assert list(metric_files.dead(tmp_path)) == [holder.pid]
    assert list(metric_files.dead(tmp_path)) == [], "it is told once"


def test_only_folders_whose_supervisor_and_workers_are_gone_are_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {
        "deserted": f"{metric_files.PREFIX}{gone.pid}-a",
        "orphaned": f"{metric_files.PREFIX}{gone.pid}-b",
        "supervised": f"{metric_files.PREFIX}{os.getpid()}-c",
        "foreign": f"{metric_files.PREFIX}x",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"counter_{gone.pid}.db").touch()
    presence = metric_files.ProcessLock(tmp_path / names["orphaned"])
    metric_files.delete_unused()
    assert {path.name for path in tmp_path.iterdir()} == {name for key, name in names.items() if key != "deserted"}
    presence.close()
    metric_files.delete_unused()
    assert not (tmp_path / names["orphaned"]).exists()
