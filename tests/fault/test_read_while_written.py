"""Exports and the events of all sessions, followed while clients write and servers are killed: each row and each event
is told once, and in the end whoever followed has what is there.

The simulation's readers (`tests.tools.simulation.readers`) judge every window; here are real sockets and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.databases import connected
from integration.stand import until
from sqlalchemy import text

from fault.agents import PATIENCE_S, PAUSE_S, Agents, Insistent
from fault.processes import serving
from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog

pytestmark = pytest.mark.long

CLIENTS, KILLS, TURNS_A_KILL = 6, 2, 25
LAST = "the-last-session"
OF_THE_MOMENT = ("cursor", "as_of_seq", "rollout_rows", "rollout_weight")
"""Fields that other events, or other sessions of the rollout, may change. The last two follow from the rows."""

Row = dict[str, Any]


class Author(Insistent):
    """Takes turns, goes back, rewards, notes, closes, erases, in sessions some of which name a later one as parent."""

    def act(self) -> None:
        chance = self.rng.random()
        if not self.session_id or chance < 0.1:
            following = f"{self.name}-{len(self.committed) + 1}"
            self.begin(rollback_window=1, **({"parent_session_id": following} if self.rng.random() < 0.3 else {}))
        elif chance < 0.6 or not self.messages:
            self.say(f"{self.requests}", sim={"completion_tokens": self.rng.randrange(5, 200), "tool_calls": False})
        elif chance < 0.7 and len(self.messages) > 2:
            self.messages = self.messages[:-2]
            self.say(f"{self.requests} instead", sim={"completion_tokens": 5, "tool_calls": False})
        elif chance < 0.8:
            self.reward(chance)
        elif chance < 0.85:
            self.insist("PUT", f"/sessions/{self.session_id}/annotations/note", json={"value": "seen"})
        elif chance > 0.93:
            self.end()
            if chance > 0.96:
                self.insist("DELETE", f"/sessions/{self.session_id}?erase=true")
            self.session_id = ""


class Mirror:
    """The rows of each session as the windows of an export have told them, each asked of the next of the servers.

    `whole_window` is the cursor of one that was read in one go, and its lines.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.windows = self.asked = 0
        self._urls = urls
        self.whole_window: tuple[str, list[bytes]] | None = None
        self._cursor: str | None = None
        self._told: dict[str, list[Row]] = {}

    def follow(self) -> None:
        """The window's next rows, to its end or to where its server dies; it goes on behind the last whole row."""
        self.asked += 1
        url = self._urls[self.asked % len(self._urls)]
        parameters = {"explain": "true"} | ({} if self._cursor is None else {"cursor": self._cursor})
        data, following = b"", None
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("GET", f"{url}/export", params=parameters, timeout=PATIENCE_S) as response,
        ):
            assert response.status_code == 200, response.read()
            for piece in response.iter_raw():
                data += piece
            following = response.headers["x-turnlog-next-cursor"]
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        if following is not None and not self._told and len(lines) > CLIENTS:
            self.whole_window = response.headers["x-turnlog-cursor"], lines
        for row in map(json.loads, lines):
            self._cursor = row["cursor"]
            rows = self._told.setdefault(row["session_id"], [])
            if "excluded" not in row:
                rows.append(row)
        if following is None:
            time.sleep(PAUSE_S)
            return
        self.rows |= self._told
        self._told, self._cursor = {}, following
        self.windows += 1


def followed(url: str) -> list[tuple[str, int]]:
    """Every event up to the creation of the last session, by a client that goes on over its server's deaths."""
    places: list[tuple[str, int]] = []
    with Turnlog(url, retry_for_s=PATIENCE_S) as client:
        for line in client.events(follow=True):
            places.append((line["session_id"], line["seq"]))
            if line["session_id"] == LAST:
                break
    return places


def log_of(url: str) -> list[tuple[str, int]]:
    """Every event in the order of commits, past the service."""

    async def read() -> list[tuple[str, int]]:
        async with connected(url) as connection:
            rows = await connection.execute(text("SELECT session_id, seq FROM events ORDER BY tx, position"))
            return [(row[0], row[1]) for row in rows]

    return asyncio.run(read())


def lasting(rows: Sequence[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in OF_THE_MOMENT} for row in rows]


@pytest.mark.fault(12, "exports and events are followed while sessions are written and servers are killed")
def test_whoever_follows_has_what_is_there(
    engine: SimulatorProcess, database_url: str, tmp_path: Path, tally: Tally
) -> None:
    count = 1 if database_url.startswith("sqlite") else 2
    over = threading.Event()
    with serving(tmp_path, count, database_url, engine.base_url) as processes, ThreadPoolExecutor(3) as threads:
        urls = processes.urls
        mirror = Mirror(urls)

        def mirrored() -> None:
            while not over.is_set():
                mirror.follow()

        following = [threads.submit(followed, url) for url in (urls[0], urls[-1])]
        mirroring = threads.submit(mirrored)
        try:
            with Agents(urls, CLIENTS, Author.act, kind=Author) as authors:
                for kill in range(KILLS):
                    until(lambda kill=kill: len(authors.acknowledged) >= (kill + 1) * TURNS_A_KILL, PATIENCE_S)  # type: ignore[misc]
                    server = processes.servers[kill % count]
                    server.kill()
                    killed = time.monotonic()
                    server.start()
                    until(lambda killed=killed: authors.all_served(killed), PATIENCE_S)  # type: ignore[misc]
                    tally.tried += 1
                    tally.recovered(authors.recovery_s(killed))
                authors.stop()
                tally.doubled += authors.doubled(urls[0])
            with Turnlog(urls[0]) as client:
                client.create_session(session_id=LAST)
            events = [one.result(PATIENCE_S) for one in following]
        finally:
            over.set()
        mirroring.result(PATIENCE_S)
        before = mirror.windows
        until(lambda: mirror.follow() or mirror.windows > before)
        assert mirror.whole_window is not None
        cursor, lines = mirror.whole_window
        again = httpx.get(f"{urls[0]}/export", params={"explain": "true", "cursor": cursor}, timeout=PATIENCE_S)
        whole: dict[str, list[Row]] = {}
        for row in map(json.loads, httpx.get(f"{urls[0]}/export", timeout=PATIENCE_S).content.splitlines()):
            whole.setdefault(row["session_id"], []).append(row)
    assert events == [log_of(database_url)] * 2
    told = {session_id: lasting(rows) for session_id, rows in mirror.rows.items() if rows}
    assert told == {session_id: lasting(rows) for session_id, rows in whole.items()}
    assert mirror.windows > KILLS
    of_erased = {session_id for session_id, rows in mirror.rows.items() if not rows}
    kept = [
        [one for one in some if json.loads(one)["session_id"] not in of_erased]
        for some in (lines, again.content.splitlines())
    ]
    assert kept[0] == kept[1], "a window is the same to the byte, but for what has been erased since"
    verified(database_url, authors.acknowledged, tally)
