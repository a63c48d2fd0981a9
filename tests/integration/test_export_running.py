"""Exports of many sessions, and to clients that go away: others are let in, and little memory is needed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.looking import change, value

from app.store.schema import blobs, events, sessions, turns
from integration.places import Places
from integration.reading import CONTAINERS, DOCUMENTS, read
from integration.stand import Stand, serving, until
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

SESSIONS, TURNS = 1000, 5
MEMORY, MORE = 420 << 20, 160 << 20
"""Of the server, which keeps some of what other tests made it take: in all, or more than before."""

CONNECTIONS = 8
"""Of the database, for reads; each has up to two files open."""


@pytest.fixture(scope="module")
def large(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of many sessions: real ones, multiplied in the store, each copy of a group of its own."""
    with serving(places.new("large"), sglang.base_url) as stand:
        talk = stand.talk(session_id="one", group_id="g")
        for number in range(TURNS):
            talk.say(f"Question {number}", sim={"completion_tokens": 400, "tool_calls": False})
        assert stand.http.put(f"{talk.path}/reward", json={"reward": 1}).status_code == 200
        stand.server.stop()
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {SESSIONS}) "
        last = value(stand.url, "SELECT max(position) FROM events")
        made = {"session_id": "'c' || i", "group_id": "'g' || i", "name": "NULL"}
        made["position"] = f"{last} + (i - 1) * {last} + seq"
        for table in (sessions, events, turns, blobs):
            names = [column.name for column in table.columns if column.name != "tx"]
            values = ", ".join(made.get(name, name) for name in names)
            query = f"INSERT INTO {table.name} ({', '.join(names)}) {numbers} SELECT {values} FROM {table.name}, n"
            change(stand.url, f"{query} WHERE session_id = 'one'")
        stand.server.start()
        yield stand


@contextlib.contextmanager
def asking_for_health(stand: Stand) -> Iterator[list[bytes]]:
    """Asks again and again; what has been answered so far."""
    answers: list[bytes] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=stand.server.base_url, timeout=30) as client:
            while not ended.is_set():
                answers.append(client.get("/health").raise_for_status().content)

    asking = stand.meanwhile(ask)
    try:
        yield answers
    finally:
        ended.set()
    asking.result(60)


def resident(stand: Stand) -> int:
    """Bytes of the server's memory now."""
    pages = Path(f"/proc/{stand.server.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


NAMES = ["one", *(f"c{number + 1}" for number in range(SESSIONS))]
FORMS = [*((format, "turnlog") for format in (*CONTAINERS, *DOCUMENTS)), ("parquet", "verl"), ("ndjson", "atropos")]


@pytest.mark.parametrize(("format", "shape"), FORMS)
def test_an_export_of_many_sessions_lets_others_in_and_needs_little_memory(
    large: Stand, format: str, shape: str
) -> None:
    highest, pieces, query = 0, [], {"format": format, "shape": shape}
    before = resident(large)
    with asking_for_health(large) as answers, large.http.stream("GET", "/export", params=query) as response:
        assert response.status_code == 200
        for piece in response.iter_bytes():
            pieces.append(piece)
            highest = max(highest, resident(large))
        assert len(answers) > 10
    assert highest < max(MEMORY, before + MORE)
    rows = read(format, b"".join(pieces))
    if shape == "verl":
        rows = [read("ndjson", row["extra_fields"].encode())[0] for row in rows]
    assert [row["session_ids"][0] if shape == "atropos" else row["session_id"] for row in rows] == NAMES


def descriptors(stand: Stand) -> list[str]:
    """What each descriptor of the server stands for."""
    found = []
    for entry in Path(f"/proc/{stand.server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def threads(stand: Stand) -> int:
    return len(list(Path(f"/proc/{stand.server.pid}/task").iterdir()))


def leave(stand: Stand, query: str, wait: Callable[[int], float]) -> None:
    """Ask for exports and go away in the middle of them."""
    for number in range(20):
        with socket.create_connection(("127.0.0.1", stand.server.port)) as connection:
            connection.sendall(f"GET /export?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(wait(number))


@pytest.mark.parametrize("query", ["format=safetensors", "format=ndjson"])
def test_clients_that_go_away_leave_nothing_behind(large: Stand, query: str) -> None:
    """No file without a name, no connection of the database, no thread."""
    before = len(descriptors(large))

    def is_clean() -> bool:
        found = descriptors(large)
        return len(found) <= before + 2 * CONNECTIONS and not [one for one in found if "/#" in one]

    leave(large, query, lambda number: 0.01 * (number % 10))
    until(is_clean)
    running = threads(large)
    leave(large, query, lambda _: 0.02)
    until(is_clean)
    assert threads(large) <= running + 4
    with asking_for_health(large) as answers:
        until(lambda: len(answers) > 20)
        assert [row["session_id"] for row in large.rows(session_id="c7")] == ["c7"]


def test_a_client_that_does_not_read_does_not_fill_the_servers_memory(large: Stand) -> None:
    before = resident(large)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", large.server.port)))
            connection.sendall(b"GET /export HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with asking_for_health(large) as answers:
            until(lambda: len(answers) > 200)
        assert resident(large) < max(MEMORY, before + MORE)
