"""The benchmark of the real load: a short run of it, and that a server takes its engine's replies, of both shapes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ops.bench.measure import RESULTS
from ops.server import ROOT


@pytest.mark.long
@pytest.mark.parametrize(("wire", "processes"), [("messages", 0), ("chat", 2)], ids=["sqlite", "postgresql"])
def test_a_quick_run(wire: str, processes: int) -> None:
    command = [sys.executable, "-m", "ops.bench", "real", "--quick", "--sessions", "1"]
    command += ["--wires", wire, "--processes", str(processes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row, longer] = json.loads((RESULTS / f"real-{wire}-turns.json").read_text())
    assert 0 < row["/ floor"] == row["CPU ms a turn"] / row["floor"]
    if processes:
        # What a turn writes does not depend on the length of its prompt.
        assert 0 < longer["WAL KiB a turn"] < 1.5 * row["WAL KiB a turn"]
    figures = json.loads((RESULTS / f"real-{wire}-turnlog.json").read_text())
    assert figures["turns"] == figures["after kills, turns"] > figures["rows compared"] > 0
    assert figures["kills"] == 1
    assert not any(count for what, count in figures.items() if what.startswith("!"))


@pytest.mark.long
def test_session_servers_beside_the_engine_alone() -> None:
    command = [sys.executable, "-m", "ops.bench", "real", "--quick", "--peers", "turnlog-sqlite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((RESULTS / "real-peers.json").read_text())["turnlog-sqlite"]
    assert (figures["turns kept"], figures["sessions that go on"]) == ("32 of 32", "8 of 8")
    assert figures["10k: CPU ms of a later turn"] > 0
