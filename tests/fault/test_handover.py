"""`turnlog serve --workers`: a session's turns reach one process over whatever connection; any other may stand in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.kept_server import KeptServer
from integration.stand import until, user

from ops.simulator.process import SimulatorProcess
from turnlog.keeper.handover import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.long

WORKERS = 2
SESSIONS = 6
TURNS = 3
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path, postgres_url: str, engine: SimulatorProcess) -> Iterator[KeptServer]:
    arguments = ["--workers", str(WORKERS), "--stop-s", "5"]
    made = KeptServer(tmp_path, upstreams=[engine.base_url], database_url=postgres_url, arguments=arguments)
    made.launch()
    try:
        until(lambda: len(made.started) == WORKERS and made.spare is not None, PATIENCE_S)
        yield made
    finally:
        made.stop()


class Talk:
    """A session's conversation over a connection that others use as well."""

    def __init__(self, client: httpx.Client, name: str, padding: str = "") -> None:
        self.name = name
        self._client = client
        self._messages: list[Any] = []
        self._padding = padding
        assert client.post("/sessions", json={"session_id": name}).status_code == 200

    def turn(self) -> None:
        self._messages.append(user(f"And then? {len(self._messages)} {self._padding}"))
        reply = self._client.post(f"/sessions/{self.name}/v1/chat/completions", json={"messages": self._messages})
        assert reply.status_code == 200, reply.text
        self._messages.append(reply.json()["choices"][0]["message"])


def holders(client: httpx.Client, talk: Talk) -> set[int]:
    """The processes that opened the session's turns."""
    lines = client.get(f"/sessions/{talk.name}/events").text.splitlines()
    return {event["incarnation"] for event in map(json.loads, lines) if event["type"] == "TurnOpened"}


@contextmanager
def one_connection(server: KeptServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, limits=httpx.Limits(max_connections=1), timeout=PATIENCE_S) as client:
        yield client


def test_turns_over_one_connection_reach_the_process_of_each_session(server: KeptServer) -> None:
    with one_connection(server) as client:
        talks = [Talk(client, f"s-{number}") for number in range(SESSIONS)]
        talks += [Talk(client, f"long-{number}", "x" * 6 * MAX_MESSAGE_BYTES) for number in range(2)]
        for _ in range(TURNS):
            for talk in talks:
                talk.turn()
        found = [holders(client, talk) for talk in talks]
        assert [len(one) for one in found] == [1] * len(talks)
        assert len(set.union(*found)) == WORKERS


def test_another_process_stands_in_for_one_that_was_killed(server: KeptServer) -> None:
    os.kill(server.started[0], signal.SIGKILL)
    for attempt in range(2):
        with one_connection(server) as client:
            talks = [Talk(client, f"s-{attempt}-{number}") for number in range(SESSIONS)]
            for _ in range(TURNS):
                for talk in talks:
                    talk.turn()
            found = [holders(client, talk) for talk in talks]
        until(lambda: len(server.started) == WORKERS + 1, PATIENCE_S)
        until(lambda: server.log_path.read_text().count("Application startup complete") == WORKERS + 1, PATIENCE_S)
    assert [len(one) for one in found] == [1] * len(talks), "its successor has its place"
    assert len(set.union(*found)) == WORKERS
