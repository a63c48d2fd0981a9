"""PostgreSQL stopped, crashed and started again under load: requests wait or are told to come again; nothing is lost.

A crash (`pg_ctl -m immediate`) takes claims with it that PostgreSQL had not written to its log yet: on purpose, they
are not synced. What was generated under them is refused, and its retry generates anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from helpers.clusters import Cluster, Mode, running
from integration.stand import HOURS, until, user

from fault.agents import Health, turns
from fault.processes import Processes, crowd, serving
from fault.table import Tally
from fault.test_read_while_written import LAST, followed, log_of
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "PostgreSQL restarted in a loop under load"
CLIENTS = 8
WISH = {"latency_s": 0.03, "completion_tokens": 8}
MODES: tuple[Mode, ...] = ("immediate", "fast")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Claims that are not synced stay in memory for as long as PostgreSQL allows, so that a crash does take some."""
    with running(wal_writer_delay="10s") as made:
        yield made


@pytest.fixture(scope="module")
def processes(
    cluster: Cluster, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    with serving(tmp_path_factory.mktemp("restarts"), 2, cluster.url, engine.base_url) as made:
        yield made


step = turns(WISH, 0.1)


@pytest.mark.fault(14, TITLE)
def test_what_was_acknowledged_is_there_after_restarts_and_crashes(
    cluster: Cluster, processes: Processes, tally: Tally
) -> None:
    """All clients are served again after each restart, by the processes that were there before it."""
    with crowd(processes, CLIENTS, step) as agents, Health(processes.urls[0]) as health:
        until(lambda: agents.all_served(0.0), 180)
        for mode in MODES:
            cluster.stop(mode)
            down, before = time.monotonic(), health.asked
            cluster.start()
            up = time.monotonic()
            until(lambda up=up: agents.all_served(up), 180)  # type: ignore[misc]
            assert health.asked > before + 3, "the event loop waited for the database"
            tally.tried += 1
            tally.recovered(agents.recovery_s(up))
            for answer in agents.answers(down):
                assert answer.status == 200 or answer.retry_after or answer.code == "claim_lost", answer
    processes.are_the_same()
    tally.doubled += agents.doubled(processes.urls[0])
    verified(cluster.url, agents.acknowledged, tally)


LOST_CLAIMS = 4


def test_readers_skip_nothing_and_are_told_nothing_that_a_crash_undoes(
    cluster: Cluster, processes: Processes, engine: SimulatorProcess
) -> None:
    """Claims are not synced, so a crash takes the newest, and PostgreSQL gives the ids of their transactions to others:
    a cursor must not lie beyond them, and whoever follows all events must not have seen them.
    """
    url = processes.urls[0]
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(LOST_CLAIMS + 1) as threads:
        names = [
            http.post("/sessions", json={"on_abort": "return"}).json()["session_id"] for _ in range(LOST_CLAIMS + 1)
        ]

        def turn(name: str, latency_s: float) -> httpx.Response:
            body = {"messages": [user("Hello")], "sim": {"latency_s": latency_s}}
            return httpx.post(f"{url}/sessions/{name}/v1/chat/completions", json=body, timeout=180)

        def opened(name: str) -> bool:
            return "TurnOpened" in http.get(f"/sessions/{name}/events").text

        following = threads.submit(followed, url)
        slow = []
        try:
            cluster.stop_log_writer()
            for name in names[1:]:  # one after the other, so that each claim is a transaction of its own
                slow.append(threads.submit(turn, name, HOURS))
                until(lambda name=name: opened(name), 180)  # type: ignore[misc]
            cursor = http.get("/export").headers["x-turnlog-next-cursor"]
            cluster.restart("immediate")
            until(lambda: turn(names[0], 0.0).status_code == 200, 180)
            lost = [name for name in names[1:] if not opened(name)]
            rows = [json.loads(line) for line in http.get("/export", params={"cursor": cursor}).content.splitlines()]
            assert [row["session_id"] for row in rows if row["session_id"] == names[0]] == [names[0]]
            assert lost, "the crash took no claim with it, which proves nothing"
        finally:
            httpx.post(f"{engine.base_url}/abort_request", json={"abort_all": True})
            until(lambda: http.post("/sessions", json={"session_id": LAST}).status_code == 200, 180)
        assert {call.result().status_code for call in slow} <= {200, 409, 503}
        assert following.result(180) == log_of(cluster.url)
