from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from app import metrics
from app.metrics import MetricValues

SERIES = [("turns", "good", 1), ("turns", "bad", 1), ("seconds", "", 3)]


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
