"""Exports while sessions are written, of many sessions, and to clients that go away."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from helpers.looking import change, value

from app.store.schema import blobs, events, sessions, turns
from integration.places import Places
from integration.reading import CONTAINERS, DOCUMENTS, read
from integration.stand import Stand, serving
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

SESSIONS = 2000
TURNS = 5
MEMORY = 450 << 20
"""Of the server, most of it SQLite's page cache: 64 MiB for each connection that an export has read through."""


@pytest.fixture
def own(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of the test's own, so that its export holds nothing else."""
    with serving(places.new("own"), sglang.base_url) as stand:
        yield stand


@pytest.fixture(scope="module")
def large(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of many sessions: real ones, multiplied in the store."""
    with serving(places.new("large"), sglang.base_url) as stand:
        talk = stand.talk(session_id="one", group_id="g")
        for number in range(TURNS):
            talk.say(f"Question {number}", sim={"completion_tokens": 400, "tool_calls": False})
        assert stand.http.put(f"{talk.path}/reward", json={"reward": 1}).status_code == 200
        stand.server.stop()
        multiply(stand.url, "one", SESSIONS)
        stand.server.start()
        yield stand


def multiply(url: str, session_id: str, count: int) -> None:
    """Copies `c1`, `c2`, … behind all that there is, each of a group of its own."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "
    last = value(url, "SELECT max(position) FROM events")
    own = value(url, "SELECT count(*) FROM events WHERE session_id = :id", id=session_id)
    made = {
        "session_id": "'c' || i",
        "position": f"{last} + (i - 1) * {own} + seq",
        "group_id": "'g' || i",
        "name": "NULL",
    }
    for table in (sessions, events, turns, blobs):
        names = [column.name for column in table.columns if column.name != "tx"]
        values = ", ".join(made.get(name, name) for name in names)
        query = f"INSERT INTO {table.name} ({', '.join(names)}) {numbers} SELECT {values} FROM {table.name}, n"
        change(url, f"{query} WHERE session_id = :id", id=session_id)


def get(stand: Stand, **query: Any) -> bytes:
    response = stand.http.get("/export", params=query)
    assert response.status_code == 200, response.text
    return response.content


class Health:
    """Asks `/health` again and again from a thread of its own, and keeps how long each answer took, in seconds."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._stopped = threading.Event()
        self.latencies: list[float] = []
        self._run = stand.meanwhile(self._probe)

    def _probe(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._stand.server.port, timeout=30)
        with closing(connection):
            while not self._stopped.is_set():
                start = time.perf_counter()
                connection.request("GET", "/health")
                assert connection.getresponse().read().startswith(b'{"status":"ok"')
                self.latencies.append(time.perf_counter() - start)
                time.sleep(0.005)

    def __enter__(self) -> Health:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._run.result(timeout=60)


def resident(stand: Stand) -> int:
    """Bytes of the server's memory now."""
    with open(f"/proc/{stand.server.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("ndjson", "turnlog"),
        ("parquet", "verl"),
        *(
            pytest.param(format, shape, marks=pytest.mark.untimed)
            for format, shape in [*((one, "turnlog") for one in (*CONTAINERS[1:], *DOCUMENTS)), ("ndjson", "atropos")]
        ),
    ],
)
def test_an_export_of_many_sessions_lets_others_in_and_needs_little_memory(
    large: Stand, format: str, shape: str
) -> None:
    highest = 0
    size = 0
    pieces = []
    with Health(large) as health:
        with large.http.stream("GET", "/export", params={"format": format, "shape": shape}) as response:
            assert response.status_code == 200
            for piece in response.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                highest = max(highest, resident(large))
        probes = len(health.latencies)
    assert probes > 10
    assert highest < MEMORY
    rows = read(format, b"".join(pieces))
    if shape == "atropos":
        assert [row["session_ids"] for row in rows] == [["one"], *([f"c{number + 1}"] for number in range(SESSIONS))]
        return
    names = [row["extra_fields"] if shape == "verl" else row["session_id"] for row in rows]
    if shape == "verl":
        names = [read("ndjson", name.encode())[0]["session_id"] for name in names]
    assert names == ["one", *(f"c{number + 1}" for number in range(SESSIONS))]
