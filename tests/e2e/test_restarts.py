"""Agents with their clients' default retries, while `turnlog serve`'s server is killed in each of their turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from integration.stand import Stand, until
from integration.tito import tokenizer_folder

from e2e.harnesses import HARNESSES
from ops.server import KeptServer
from ops.simulator.process import SimulatorProcess

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

KILLS = 2
LATENCY_MS = "300"


@pytest.fixture
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stand]:
    environment = {}
    if request.param == "tokenizer":
        pytest.importorskip("transformers")
        environment["TURNLOG_TOKENIZER"] = str(tokenizer_folder(tmp_path / "tokenizer"))
    with SimulatorProcess("--seed", "5", "--latency-ms", LATENCY_MS) as engine:
        server = KeptServer(tmp_path, upstreams=[engine.base_url], environment=environment).migrate().start()
        made = Stand(server, engine.base_url)
        try:
            yield made
        finally:
            made.close()
            server.stop()


@pytest.mark.parametrize(("stand", "harness"), [("capture", "openai"), ("tokenizer", "anthropic")], indirect=["stand"])
def test_no_kill_in_a_turn_reaches_an_agent(stand: Stand, harness: str) -> None:
    server = stand.server
    assert isinstance(server, KeptServer)
    kills = lost = doubled = 0
    with ThreadPoolExecutor(1) as thread:
        while kills < KILLS:
            talk, killed_at = stand.talk(), -1
            agent = thread.submit(HARNESSES[harness].run, f"{server.base_url}{talk.path}/v1")
            while not agent.done() and kills < KILLS:
                # Each turn once: a client that meets a third kill in one turn has no retry left.
                committed = len(talk.committed())
                if committed == killed_at or not stand.http.get("/health").json()["in_flight"]:
                    continue
                killed_at, before = committed, len(server.started)
                os.kill(server.started[-1], signal.SIGKILL)
                kills += 1
                until(lambda before=before: len(server.started) > before)
            agent.result()
            rows = [span["turn"] for row in talk.rows() for span in row["turns"]]
            lost += len({event["turn"] for event in talk.committed()} - set(rows))
            doubled += len(rows) - len(set(rows))
    assert (kills, lost, doubled) == (KILLS, 0, 0)
