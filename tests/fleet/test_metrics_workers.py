"""Of `turnlog serve`'s workers a scrape of any tells of all; of uvicorn's too: `fault/test_several_processes.py`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from integration.stand import until, user
from prometheus_client.parser import text_string_to_metric_families

from app import metrics
from ops.server import KeptServer, ServerProcess
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

WORKERS = 2
RUN = "given"
START_S = 90.0
SCRAPES = 6


@pytest.fixture
def server(postgres_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with SimulatorProcess() as engine:
        made = KeptServer(
            tmp_path,
            upstreams=[engine.base_url],
            database_url=postgres_url,
            arguments=["--workers", str(WORKERS)],
            environment={"TMPDIR": str(tmp_path)},
        )
        made.launch()
        try:
            until(lambda: said(made, "Application startup complete") == WORKERS, START_S)
            yield made
        finally:
            made.stop()


def said(server: ServerProcess, text: str) -> int:
    return server.log_path.read_text().count(text)


def pids(server: ServerProcess) -> list[int]:
    return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", server.log_path.read_text())]


def take_turn(server: ServerProcess) -> None:
    """In a session of its own, whose process is any of them."""
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        path = client.post("/sessions", json={"run": RUN}).json()["base_url"]
        response = client.post(f"{path}/chat/completions", json={"messages": [user("Whose turn is it?")]})
        assert response.status_code == 200, response.text


def scrape(server: ServerProcess) -> dict[str, float]:
    """The samples that have no label but `outcome` or `run`, by name and its value; on a connection of its own."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    return {
        "".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if set(sample.labels) <= {"outcome"} or set(sample.labels) == {"run"}
    }


def counted_by(folder: Path, pid: int) -> float:
    """Turns that one process has committed in the run, as its own file has it."""
    ((_, numbers),) = of_runs(folder, f"{pid}-*")
    return numbers["turnlog_run_turns_total", RUN][0]


def of_runs(folder: Path, name: str = "*") -> list[tuple[bool, dict[tuple[str, str], list[float]]]]:
    """The processes' files that have the run."""
    return [one for one in metrics.read_values(folder, name) if ("turnlog_run_turns_total", RUN) in one[1]]


def test_each_process_tells_of_all_also_of_one_that_was_killed(server: ServerProcess, tmp_path: Path) -> None:
    (folder,) = tmp_path.glob("turnlog-metrics-*")
    assert httpx.put(f"{server.base_url}/runs/{RUN}", json={}).status_code == 200
    until(lambda: len(of_runs(folder)) == WORKERS)
    turns = 0
    while not all(counted_by(folder, pid) for pid in pids(server)):
        take_turn(server)
        turns += 1
    until(lambda: scrape(server)[f"turnlog_run_turns_total{RUN}"] == turns)
    for found in [scrape(server) for _ in range(SCRAPES)]:
        assert found["turnlog_turns_totalcommitted"] == turns
        assert found[f"turnlog_run_turns_total{RUN}"] == turns
        assert found["turnlog_turn_overhead_seconds_count"] == turns
        assert found["turnlog_processes"] == WORKERS
    assert found["turnlog_database_up"] == 1

    os.kill(pids(server)[0], signal.SIGKILL)
    until(lambda: said(server, "Application startup complete") == WORKERS + 1, START_S)
    until(lambda: sorted(is_alive for is_alive, _ in of_runs(folder)) == [False, *[True] * WORKERS])
    take_turn(server)
    until(lambda: scrape(server)[f"turnlog_run_turns_total{RUN}"] == turns + 1)
    for found in [scrape(server) for _ in range(SCRAPES)]:
        assert found["turnlog_turns_totalcommitted"] == turns + 1, "a killed process's turns count on"
        assert found["turnlog_processes"] == WORKERS, "a killed process is not alive"
    assert sorted(is_alive for is_alive, _ in metrics.read_values(folder)) == [False] * 2 + [True] * 2 * WORKERS
