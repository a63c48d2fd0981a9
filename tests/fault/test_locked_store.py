"""Somebody else holds a lock on the store: writes wait, then 503; reads and the loop go on, nothing is left over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.looking import value
from integration.stand import Stand, error_of, serving, until, user

from app.domain.events import TurnCommitted
from app.store import writer
from app.store.log_turns import Release
from app.turn.claims import Claims
from fault.agents import Agent, Agents, Health
from fault.hosted import hosted
from fault.locks import file_locked, locked
from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

REFUSES = "503 where a lock is held for long"
CLIENTS = 4
HELD_S = 2.0
EVENTS = "LOCK TABLE events IN EXCLUSIVE MODE"


def take_turns(agent: Agent) -> None:
    agent.begin()
    for number in range(2):
        agent.say(f"Question {number}", sim={"latency_s": 0.02})
    agent.reward(1.0)
    agent.end()


def meanwhile(stand: Stand, seconds: float) -> None:
    """Reads go on while the lock is held, and so does the loop: one that waits itself answers once."""
    deadline = time.monotonic() + seconds
    with Health(stand.server.base_url) as health:
        while time.monotonic() < deadline:
            assert stand.http.get("/sessions").status_code == 200
            assert stand.http.get("/export").status_code == 200
            assert (ready := stand.http.get("/ready")).status_code == 200, ready.text
            time.sleep(0.05)
    assert health.asked > 3


def no_claim_is_left(url: str, agents: Agents[Agent], base_url: str, tally: Tally) -> None:
    assert value(url, "SELECT count(*) FROM open_turns") == 0
    tally.doubled += agents.doubled(base_url)
    verified(url, agents.acknowledged, tally)


def all_locked(url: str) -> AbstractContextManager[None]:
    return file_locked(url) if url.startswith("sqlite") else locked(url, EVENTS)


@pytest.fixture
def stand(engine: SimulatorProcess, database_url: str, tmp_path: Path) -> Iterator[Stand]:
    with serving(tmp_path, engine.base_url, environment={"TURNLOG_DATABASE_URL": database_url}) as made:
        until(lambda: made.http.get("/ready").is_success)  # Small replies need no worker: it may still be starting.
        yield made


@pytest.mark.fault(5, "writes wait for a lock")
def test_a_lock_on_all_writes_is_waited_for(stand: Stand, database_url: str, tally: Tally) -> None:
    with Agents([stand.server.base_url], CLIENTS, take_turns) as agents:
        until(lambda: agents.all_served(0))
        tally.tried += 1
        with all_locked(database_url):
            meanwhile(stand, HELD_S)
        released = time.monotonic()
        until(lambda: agents.all_served(released), 60)
        tally.recovered(agents.recovery_s(released))
    assert [answer for answer in agents.answers() if answer.status >= 400] == []
    assert max(one.seconds for one in agents.answers()) > HELD_S / 2, "nobody waited"
    no_claim_is_left(database_url, agents, stand.server.base_url, tally)
    assert "Traceback" not in stand.server.log_path.read_text(errors="replace")


@pytest.mark.fault(5, REFUSES)
def test_a_lock_that_outlasts_the_patience_is_503_and_leaves_no_claim(
    engine: SimulatorProcess, database_url: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOCKED_S", 0.3)
    with hosted(database_url, engine.base_url) as server:
        with Agents([server.base_url], CLIENTS, take_turns) as agents:
            until(lambda: agents.all_served(0))
            until(lambda: httpx.get(f"{server.base_url}/ready").is_success)
            tally.tried += 1
            with all_locked(database_url):
                began = time.monotonic()
                until(lambda: agents.count(began, [503]) > CLIENTS, 60)
                for path in ("/sessions", "/export", "/ready"):
                    assert httpx.get(f"{server.base_url}{path}", timeout=60).status_code == 200, path
            released = time.monotonic()
            until(lambda: agents.all_served(released), 60)
            tally.recovered(agents.recovery_s(released))
        refused = [answer for answer in agents.answers() if answer.status >= 400]
        assert {(one.status, one.code, one.retry_after) for one in refused} == {(503, "store_unavailable", "2")}
        no_claim_is_left(database_url, agents, server.base_url, tally)


@pytest.mark.fault(5, REFUSES)
def test_a_turn_that_cannot_be_committed_is_answered_before_its_claim_is_let_go(
    engine: SimulatorProcess, sqlite_url: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has waited for the lock already, and to let go of the claim is to wait for it again."""
    monkeypatch.setattr(writer, "LOCKED_S", 0.3)
    submit, commit = writer.Writer.submit, Claims.commit
    generated, is_locked, answered, released = (threading.Event() for _ in range(4))

    async def held_back(self: Claims, *arguments: Any, **options: Any) -> TurnCommitted:
        generated.set()
        await asyncio.to_thread(is_locked.wait)
        return await commit(self, *arguments, **options)

    async def watched(self: writer.Writer, operation: Any) -> Any:
        if isinstance(operation, Release):
            await asyncio.to_thread(answered.wait)
            released.set()
        return await submit(self, operation)

    monkeypatch.setattr(Claims, "commit", held_back)
    monkeypatch.setattr(writer.Writer, "submit", watched)
    with hosted(sqlite_url, engine.base_url) as server, httpx.Client(base_url=server.base_url, timeout=60) as http:
        agents = ThreadPoolExecutor(1)
        tally.tried += 1
        http.post("/sessions", json={"session_id": "s"}).raise_for_status()
        turn = partial(http.post, "/sessions/s/v1/chat/completions", json={"messages": [user("Hello")]})
        call = agents.submit(turn)
        generated.wait()
        try:
            with file_locked(sqlite_url):
                is_locked.set()
                assert error_of(call.result(30)) == (503, "store_unavailable")
                answered.set()
                released.wait()
        finally:
            answered.set()
            agents.shutdown()
        assert turn().status_code == 200
        until(lambda: value(sqlite_url, "SELECT count(*) FROM open_turns") == 0)
        verified(sqlite_url, [], tally)


@pytest.mark.fault(5, "a locked session does not hold up others")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lock_on_one_sessions_row_keeps_that_session_alone_waiting(
    stand: Stand, database_url: str, tally: Tally
) -> None:
    talk = stand.talk()
    talk.say("Hello")
    row = f"SELECT 1 FROM sessions WHERE session_id = '{talk.id}' FOR UPDATE"
    with Agents([stand.server.base_url], CLIENTS, take_turns) as agents:
        until(lambda: agents.all_served(0))
        tally.tried += 1
        with locked(database_url, row):
            call = stand.meanwhile(talk.chat, [*talk.messages, user("Again")])
            began = time.monotonic()
            meanwhile(stand, HELD_S)
            until(lambda: agents.all_served(began))  # Others do not wait.
            assert not call.done()
        response = call.result(30)
    assert response.status_code == 200
    talk.messages = [*talk.messages, user("Again"), response.json()["choices"][0]["message"]]
    talk.say("And again")
    assert {answer.status for answer in agents.answers()} <= {200, 204}
    no_claim_is_left(database_url, agents, stand.server.base_url, tally)
