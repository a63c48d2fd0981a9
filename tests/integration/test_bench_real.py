"""The benchmark of the real load: a short run of it, and that a server takes its engine's replies, of both shapes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from integration.places import Places
from ops.bench.load import open_session
from ops.bench.measure import RESULTS
from ops.bench.real.bench import engine_process
from ops.bench.real.conversation import WIRES
from ops.bench.real.material import Material
from ops.bench.real.play import Compared, Sampled, compared, play
from ops.server import ROOT, ServerProcess

SESSION = Sampled(
    (3000,),
    [
        (0, 0, (("user", 900),), 200, 0, 1),
        (0, 2, (("tool", 300),), 60, 0, 1),
        (0, 0, (("user", 400),), 80, 0, 0),
    ],
)
"""Its history is replaced in the third turn."""


@pytest.mark.parametrize(("shape", "spaced"), [("sglang", False), ("vllm", True)])
def test_every_row_is_what_the_engine_sampled(shape: str, spaced: bool, places: Places, tmp_path: Path) -> None:
    async def played(base_url: str, first: int, wire: str) -> Compared:
        opens = partial(open_session, history="tree", stream_mode="live")
        talks = await play(base_url, opens, [SESSION], material, WIRES[wire], first=first, clients=1)
        assert not talks[0].differing
        return await compared(base_url, talks)

    material = Material("json", spaced)
    with engine_process(tmp_path, shape, "json", spaced) as engine, places.new("real").database() as url:
        environment = {"TURNLOG_UPSTREAM_DIALECT": shape}
        server = ServerProcess(tmp_path, upstreams=[engine.base_url], database_url=url, environment=environment)
        with server:
            found = {wire: asyncio.run(played(server.base_url, number, wire)) for number, wire in enumerate(WIRES)}
    assert found == dict.fromkeys(WIRES, Compared(rows=2, turns=3))


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
