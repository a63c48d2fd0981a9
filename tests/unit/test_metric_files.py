from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import metrics
from app.metrics import MetricValues
from ops.server import ROOT

SERIES = [("turns", "good", 1), ("turns", "bad", 1), ("seconds", "", 3)]


COUNTS = """
import sys
from pathlib import Path
from app.metrics import MetricValues
mine = MetricValues(Path(sys.argv[1]), [("turns", "good", 1), ("gone", "", 2)])
mine.values[0] += 5
print("here", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of another version that has counted in the folder."""
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def alive(folder: Path) -> list[bool]:
    return [is_alive for is_alive, _ in metrics.read_values(folder)]


def test_a_process_that_begins_is_at_no_moment_taken_for_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[bool] = []

    def lock(file: object, how: int) -> None:
        if how == fcntl.LOCK_EX:
            seen.extend(alive(tmp_path))
            flock(file, how)
            seen.extend(alive(tmp_path))
        else:
            flock(file, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    mine = MetricValues(tmp_path, SERIES)
    assert (seen, alive(tmp_path)) == ([], [True])
    mine.close()
    assert alive(tmp_path) == [False]


def test_what_is_counted_is_read_at_once_by_name_and_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the folder that was chosen; a process that shares none counts in its memory."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "chosen"))
    folder = metrics.shared_folder()
    assert folder == tmp_path / "chosen"
    mine, alone = MetricValues(folder, SERIES), MetricValues(None, SERIES)
    for values in (mine, alone):
        values.values[1] += 2
        values.values[4] = 0.25
    ((_, numbers),) = metrics.read_values(folder)
    assert numbers == {("turns", "good"): [0], ("turns", "bad"): [2], ("seconds", ""): [0, 0, 0.25]}
    assert alone.values.tolist() == [0, 2, 0, 0, 0.25]
    mine.close()
    alone.close()


def test_a_killed_process_is_dead_and_its_counts_are_kept(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    mine = MetricValues(tmp_path, SERIES)
    assert alive(tmp_path) == [True, True]
    holder.kill()
    holder.wait()
    assert sorted(alive(tmp_path)) == [False, True]
    (dead,) = (numbers for is_alive, numbers in metrics.read_values(tmp_path) if not is_alive)
    assert dead == {("turns", "good"): [5], ("gone", ""): [0, 0]}
    mine.close()
