"""The process's clock jumps by an hour, either way: times in the log jump with it, and nothing else goes wrong.

The database's clock, by which leases are counted, cannot be moved by a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from integration.stand import Stand, Talk, error_of, until, user

from fault import shifted_clock
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

TITLE = "the clock jumps by an hour"
HOUR = 3600.0
KEY = {"idempotency-key": "k"}

JANITOR = {"TURNLOG_MAX_DB_BYTES": str(1 << 30), "TURNLOG_CLOSED_TTL_S": "7200"}
"""A limit of bytes has the janitor come by every two seconds."""


@dataclass
class Site:
    """A server whose clock can be moved, and who else serves its store: itself, started again, on SQLite."""

    url: str
    clock: Path
    server: ForkedServer
    stand: Stand
    other: ForkedServer | None

    def jump(self, seconds: float) -> None:
        shifted_clock.shift(self.clock, seconds)

    @contextlib.contextmanager
    def after_a_kill(self) -> Iterator[Stand]:
        self.server.kill()
        stand = Stand(self.other or self.server.start(), str(self.stand.sim.base_url))
        yield stand
        stand.close()


@contextlib.contextmanager
def site(folder: Path, url: str, engine: SimulatorProcess, **settings: str) -> Iterator[Site]:
    clock = folder / "clock"
    shifted_clock.shift(clock, 0)
    upstreams = [engine.base_url]
    settings = {**JANITOR, **settings}
    application = shifted_clock.APPLICATION
    server = ForkedServer(
        folder, url, upstreams, application=application, **{shifted_clock.FILE: str(clock)}, **settings
    )
    other = None if url.startswith("sqlite") else ForkedServer(folder, url, upstreams, **settings).start()
    stand = Stand(server.start(), engine.base_url)
    try:
        yield Site(url, clock, server, stand, other)
    finally:
        stand.close()
        server.stop()
        if other is not None:
            other.stop()


class Acks:
    """Every 200 that a client has seen."""

    def __init__(self) -> None:
        self.seen: list[Acknowledged] = []

    def say(self, talk: Talk, text: str, **more: Any) -> httpx.Response:
        return self.add(talk, talk.say(text, **more))

    def add(self, talk: Talk, reply: httpx.Response) -> httpx.Response:
        assert reply.status_code == 200, reply.text
        self.seen.append(acknowledgement(talk.id, reply))
        return reply


@pytest.mark.fault(9, TITLE)
@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["ahead", "back"])
def test_turns_retries_and_claims_go_on(
    tmp_path: Path, database_url: str, engine: SimulatorProcess, tally: Tally, jump: float
) -> None:
    acks = Acks()
    with site(tmp_path, database_url, engine, TURNLOG_IDLE_CLOSE_S="7200") as made:
        stand = made.stand
        closed, talk = stand.talk(group_id="clock"), stand.talk(group_id="clock")
        acks.say(closed, "Before the jump")
        assert stand.http.delete(closed.path).status_code == 204
        acks.say(talk, "First")
        sent = [*talk.messages, user("In flight")]
        call = stand.meanwhile(talk.chat, sent, headers=KEY, sim={"latency_s": 2.0})
        stand.until_generating(talk, 2)

        made.jump(jump)
        jumped = monotonic()
        tally.tried += 1
        assert error_of(talk.chat([*talk.messages, user("Another")])) == (409, "session_busy")
        if made.other is not None:
            foreign = Stand(made.other, engine.base_url)
            assert error_of(foreign.known(talk.id).chat([*talk.messages, user("Another")])) == (409, "session_busy")
            foreign.close()
        landed = acks.add(talk, call.result())
        tally.recovered(monotonic() - jumped)
        again = talk.chat(sent, headers=KEY, sim={"latency_s": 2.0})
        assert (again.content, again.headers["x-turnlog-replayed"]) == (landed.content, "true")
        talk.messages = [*sent, landed.json()["choices"][0]["message"]]
        acks.say(talk, "Third")
        assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
        new = stand.talk(group_id="clock")
        acks.say(new, "After the jump")
        times = [event["at"] for event in talk.events()]
        assert abs(times[-1] - times[0] - jump) < 60
        listed = {head["session_id"] for head in stand.http.get("/sessions").json()["sessions"]}
        assert listed == {closed.id, talk.id, new.id}

        made.jump(0)
        tally.tried += 1
        acks.say(talk, "Fourth")
        _killed_in_flight(made, acks, tally)
        verified(made.url, acks.seen, tally)


def _killed_in_flight(made: Site, acks: Acks, tally: Tally) -> None:
    """A turn that dies while the clock is wrong is taken over as any other."""
    talk = made.stand.talk()
    acks.say(talk, "First")
    made.jump(HOUR)
    tally.tried += 1
    sent, wish = [*talk.messages, user("Dies")], {"latency_s": 2.0}
    call = made.stand.meanwhile(talk.chat, sent, headers=KEY, sim=wish)
    made.stand.until_generating(talk, 2)
    with made.after_a_kill() as stand:
        assert isinstance(call.exception(), httpx.TransportError)
        again = stand.known(talk.id)
        acks.add(again, again.chat(sent, headers=KEY, sim=wish))
        types = again.types()
        assert types[-4:] == ["TurnOpened", "TurnAbandoned", "TurnOpened", "TurnCommitted"]
        tally.doubled += len(again.committed()) - 2


@pytest.mark.fault(9, TITLE)
def test_the_janitor_closes_what_looks_idle_and_loses_nothing(
    tmp_path: Path, database_url: str, engine: SimulatorProcess, tally: Tally
) -> None:
    """An hour ahead ten minutes of patience are over: idle sessions are closed early, but whole. None is erased."""
    acks = Acks()
    with site(tmp_path, database_url, engine, TURNLOG_IDLE_CLOSE_S="600") as made:
        stand = made.stand
        if made.other is not None:
            made.other.stop()
        idle, busy = stand.talk(), stand.talk()
        acks.say(idle, "Idle")
        acks.say(busy, "Busy")
        made.jump(-HOUR)
        tally.tried += 1
        acks.say(idle, "Still there")
        call = stand.meanwhile(busy.say, "Slow", sim={"latency_s": 3.0})
        stand.until_generating(busy, 2)

        made.jump(HOUR)
        jumped = monotonic()
        tally.tried += 1
        until(lambda: error_of_state(stand, idle) == "session_reclaimed")
        acks.add(busy, call.result())
        acks.say(busy, "On")
        tally.recovered(monotonic() - jumped)
        assert "SessionErased" not in idle.types()
        [row] = idle.rows()
        assert (row["final"], len(row["turns"])) == (True, 2)
        verified(made.url, acks.seen, tally)


def error_of_state(stand: Stand, talk: Talk) -> str | None:
    response = stand.http.get(talk.path)
    return None if response.status_code == 200 else str(response.json()["error"]["code"])
