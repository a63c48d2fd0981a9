"""The events of all sessions over kills and a crash of PostgreSQL: each once, in one order, none taken back."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.clusters import running
from helpers.databases import connected
from integration.stand import until, user
from sqlalchemy import text

from fault.processes import Processes, serving
from ops.simulator.process import SimulatorProcess
from turnlog import Session, Turnlog

pytestmark = pytest.mark.long

WRITERS = 6
KILLS = 3
SESSIONS_A_KILL = 6
LAST = "the-last-session"
PATIENCE_S = 120.0

Place = tuple[str, int]


def log_of(url: str) -> list[Place]:
    """Every event in the order of commits, past the service."""

    async def read() -> list[Place]:
        async with connected(url) as connection:
            rows = await connection.execute(text("SELECT session_id, seq FROM events ORDER BY tx, position"))
            return [(row[0], row[1]) for row in rows]

    return asyncio.run(read())


class Follower:
    """Reads one server's events on a thread until the last session is created, over all that breaks its connection."""

    def __init__(self, url: str, threads: ThreadPoolExecutor) -> None:
        self.places: list[Place] = []
        self.positions: list[str] = []
        self._client = Turnlog(url, retry_for_s=PATIENCE_S)
        self.run: Future[None] = threads.submit(self._follow)

    def _follow(self) -> None:
        with self._client:
            for line in self._client.events(follow=True):
                self.places.append((line["session_id"], line["seq"]))
                self.positions.append(line["position"])
                if line["session_id"] == LAST:
                    return


class Writers:
    """Clients with one session after the other: a turn, a reward, the close. `sessions` counts those that are whole."""

    def __init__(self, urls: list[str], threads: ThreadPoolExecutor) -> None:
        self.sessions = 0
        self._counting = threading.Lock()
        self._stopped = threading.Event()
        self._runs = [threads.submit(self._run, urls[number % len(urls)]) for number in range(WRITERS)]

    def _run(self, url: str) -> None:
        with Turnlog(url, retry_for_s=PATIENCE_S) as client:
            while not self._stopped.is_set():
                session = client.create_session(group_id="g")
                turn(session, url)
                session.set_reward(1.0)
                session.close()
                with self._counting:
                    self.sessions += 1

    def stop(self) -> None:
        self._stopped.set()
        for run in self._runs:
            run.result(PATIENCE_S)


def turn(session: Session, url: str, **sim: Any) -> None:
    """Asked for until it is answered, once committed."""
    body = {"messages": [user("Hello")], "sim": {"completion_tokens": 4, **sim}}
    answered: list[httpx.Response] = []

    def is_answered() -> bool:
        try:
            path = f"{url}/sessions/{session.id}/v1/chat/completions"
            reply = httpx.post(path, json=body, headers={"idempotency-key": session.id}, timeout=PATIENCE_S)
        except httpx.TransportError:
            return False
        answered.append(reply)
        return reply.status_code == 200

    until(is_answered, PATIENCE_S)


def test_followers_of_killed_servers_have_the_whole_log(
    engine: SimulatorProcess, database_url: str, tmp_path: Path
) -> None:
    count = 1 if database_url.startswith("sqlite") else 2
    with (
        serving(tmp_path, count, database_url, engine.base_url) as processes,
        ThreadPoolExecutor(WRITERS + 2) as threads,
    ):
        followers = [Follower(url, threads) for url in (processes.urls[0], processes.urls[-1])]
        writers = Writers(processes.urls, threads)
        for kill in range(1, KILLS + 1):
            until(lambda kill=kill: writers.sessions >= kill * SESSIONS_A_KILL, PATIENCE_S)  # type: ignore[misc]
            server = processes.servers[kill % count]
            server.kill()
            server.start()
        writers.stop()
        finish(processes)
        for follower in followers:
            follower.run.result(PATIENCE_S)
        log = log_of(database_url)
        assert len(log) > KILLS * SESSIONS_A_KILL * 5
        for follower in followers:
            assert follower.places == log
        goes_on(processes, followers, log)


def finish(processes: Processes) -> None:
    """Create the session that tells followers that nothing comes after it."""
    with Turnlog(processes.urls[0], retry_for_s=PATIENCE_S) as client:
        client.create_session(session_id=LAST)


def goes_on(processes: Processes, followers: list[Follower], log: list[Place]) -> None:
    """A position of one server means the same at any."""
    middle = len(log) // 2
    for follower in followers:
        for url in processes.urls:
            with Turnlog(url) as client:
                rest = [(line["session_id"], line["seq"]) for line in client.events(after=follower.positions[middle])]
            assert rest == log[middle + 1 :]


LOST_CLAIMS = 8


def test_no_event_that_was_given_is_taken_back_by_a_crash_of_postgresql(
    engine: SimulatorProcess, tmp_path: Path
) -> None:
    """Claims are not synced, so a crash takes the newest; a follower has not seen those."""
    with (
        running(wal_writer_delay="10s") as cluster,
        serving(tmp_path, 1, cluster.url, engine.base_url) as processes,
        ThreadPoolExecutor(LOST_CLAIMS + 1) as threads,
        Turnlog(processes.urls[0], retry_for_s=PATIENCE_S) as client,
    ):
        url = processes.urls[0]
        follower = Follower(url, threads)
        sessions = [client.create_session() for _ in range(LOST_CLAIMS)]
        until(lambda: len(follower.places) == LOST_CLAIMS, PATIENCE_S)
        cluster.stop_log_writer()
        slow = [threads.submit(turn, session, url, latency_s=6.0) for session in sessions]
        for session in sessions:
            until(lambda session=session: opened(session) == 1, PATIENCE_S)  # type: ignore[misc]
        cluster.restart("immediate")
        lost = [session for session in sessions if not opened(session)]
        for call in slow:
            call.result(PATIENCE_S)
        finish(processes)
        follower.run.result(PATIENCE_S)
        assert lost, "the crash took no claim with it, which proves nothing"
        assert follower.places == log_of(cluster.url)


def opened(session: Session) -> int:
    """How often the session's turn was opened."""
    return sum(event["type"] == "TurnOpened" for event in session.events())
