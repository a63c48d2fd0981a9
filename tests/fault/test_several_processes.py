"""`uvicorn app.main:app --workers 2`, as it is: on PostgreSQL it works, on SQLite it is refused with what to do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from fleet.test_metrics_workers import scrape
from integration.stand import held, until, user

from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

WORKERS = 2
START_S = 90.0
SLOW = {"messages": [user("Slow")]}
KEY = {"idempotency-key": "slow"}


@pytest.fixture
def server(engine: SimulatorProcess, postgres_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(
        tmp_path,
        upstreams=[engine.base_url],
        database_url=postgres_url,
        environment={**VERBATIM, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")},
        arguments=["--workers", str(WORKERS)],
    )
    made.launch()
    try:
        until(lambda: serving(made) == WORKERS, START_S)
        yield made
    finally:
        made.stop()


def serving(server: ServerProcess) -> int:
    """How many API processes have come up since the beginning."""
    return server.log_path.read_text().count("Application startup complete")


def pids(server: ServerProcess) -> list[int]:
    """The API processes that there have been."""
    return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", server.log_path.read_text())]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def holder(url: str, server: ServerProcess, session_id: str) -> int | None:
    """The process that opened the session's last turn."""
    events = [
        json.loads(line)
        for line in httpx.get(f"{server.base_url}/sessions/{session_id}/events").text.split("\n")
        if line
    ]
    opened = [event["incarnation"] for event in events if event["type"] == "TurnOpened"]
    return int(query(url, "SELECT pid FROM incarnations WHERE id = $1", opened[-1])) if opened else None


def query(url: str, statement: str, *values: object) -> Any:
    async def fetched() -> Any:
        connection = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            return await connection.fetchval(statement, *values)
        finally:
            await connection.close()

    return asyncio.run(fetched())


def turn(server: ServerProcess, session_id: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """On a connection of its own, which any of the processes may take."""
    return httpx.post(
        f"{server.base_url}/sessions/{session_id}/v1/chat/completions", json=body, headers=headers, timeout=60
    )


def session(server: ServerProcess) -> str:
    created: str = httpx.post(f"{server.base_url}/sessions").json()["session_id"]
    return created


@pytest.mark.fault(8, "uvicorn --workers 2, one of which is killed")
def test_two_workers_serve_any_session_and_one_takes_over(
    engine: SimulatorProcess, server: ServerProcess, postgres_url: str, tally: Tally
) -> None:
    acknowledged: list[Acknowledged] = []

    def taken(session_id: str, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        acknowledged.append(acknowledgement(session_id, response))

    one = session(server)
    holders: set[int | None] = set()
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + START_S
    while holders != set(pids(server)):
        assert time.monotonic() < deadline, "one process took all connections"
        messages = [*messages, user("Whose turn is it?")]
        response = turn(server, one, {"messages": messages}, {})
        taken(one, response)
        messages.append(response.json()["choices"][0]["message"])
        holders.add(holder(postgres_url, server, one))

    slow = session(server)
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=engine.base_url) as sim, held(sim):
        call = threads.submit(turn, server, slow, SLOW, KEY)
        until(lambda: holder(postgres_url, server, slow), 180)
        owner = holder(postgres_url, server, slow)
        assert owner is not None
        os.kill(owner, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(httpx.TransportError):
            call.result()
    taken(slow, turn(server, slow, SLOW, KEY))
    tally.tried += 1
    tally.recovered(time.monotonic() - killed)
    until(lambda: serving(server) == WORKERS + 1, START_S)
    for found in [scrape(server) for _ in range(WORKERS)]:
        assert found["turnlog_turns_totalcommitted"] == len(acknowledged), "a killed process's turns count on"
        assert found["turnlog_processes"] == WORKERS

    server.stop()
    assert not [pid for pid in pids(server) if alive(pid)]
    assert query(postgres_url, "SELECT count(*) FROM open_turns") == 0
    assert query(postgres_url, "SELECT count(*) FROM incarnations WHERE ended_at IS NULL") == 0
    tally.doubled += query(postgres_url, "SELECT count(*) FROM turns") - len(acknowledged)
    verified(postgres_url, acknowledged, tally)


def test_two_workers_on_one_sqlite_file_are_refused(sqlite_url: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, database_url=sqlite_url, arguments=["--workers", str(WORKERS)])
    server.launch()
    try:
        until(lambda: serving(server) + refusals(server) >= WORKERS, START_S)
        assert refusals(server) == WORKERS - 1
        until(lambda: "failed to start, stopping the parent process" in server.log_path.read_text(), START_S)
        until(lambda: not any(alive(pid) for pid in pids(server)), START_S)
    finally:
        server.stop()
    assert "Traceback" not in server.log_path.read_text()


def refusals(server: ServerProcess) -> int:
    said = server.log_path.read_text().splitlines()
    refusal = re.compile(r"another process (\(pid \d+\) )?serves.*run without --workers")
    return sum(refusal.search(line) is not None for line in said)
