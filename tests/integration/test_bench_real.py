"""The benchmark of the real load: a short run of it, and that a server takes its engine's replies, of both shapes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ops.bench.measure import RESULTS
from ops.server import ROOT


@pytest.mark.long
def test_a_quick_run() -> None:
    command = [sys.executable, "-m", "ops.bench", "real", "--quick", "--wires", "messages", "--sessions", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row, _] = json.loads((RESULTS / "real-messages-turns.json").read_text())
    assert 0 < row["/ floor"] == row["CPU ms a turn"] / row["floor"]
    figures = json.loads((RESULTS / "real-messages-turnlog.json").read_text())
    assert figures["turns"] == figures["after kills, turns"] > figures["rows compared"] > 0
    assert figures["kills"] == 1
    assert not any(count for what, count in figures.items() if what.startswith("!"))
