"""The benchmark of session servers: a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.peers.survival import ODD
from ops.server import ROOT

SERVERS = ("engine", "turnlog-sqlite")


@pytest.mark.long
def test_a_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "ops.bench", "peers", "--quick", "--out", str(out), "--servers", *SERVERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    turnlog, alone = results["turnlog-sqlite"], results["engine"]
    assert not turnlog.get("failed"), turnlog
    assert min(turnlog["turns/s, 16 clients"], alone["turns/s, 16 clients"]) > 0
    assert turnlog["errors"] == alone["errors"] == 0
    assert turnlog["exact turns"] == turnlog["of turns without a kill"] > 0
    assert (turnlog["lost"], turnlog["doubled"], turnlog["inexact after kills"]) == (0, 0, 0)
    assert turnlog["acknowledged before and after kills"] > 0
    # Without a tokenizer of its own nobody but the engine knows the ids of a first prompt.
    assert {fault for fault, became in turnlog["odd"].items() if became == "wrong"} == {"other_prompt"}
    assert set(turnlog["odd"]) == set(ODD)
