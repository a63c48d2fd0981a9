"""A process stands still (SIGSTOP) for longer than its lease, and then goes on where it was.

On PostgreSQL another takes its turn over meanwhile, and the late owner's commit writes nothing. On SQLite nobody can:
the file's lock is held as long as the process exists, and its turn lands when it goes on.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from integration.stand import FIRST_TURN, LATER_TURN, Stand, Talk, error_of, held, until, user

from app.crash_points import VARIABLE, CrashPoint
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgements, verified
from ops.server import ServerDidNotStart
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "an owner frozen past its lease"
LEASE_S = 1.0
KEY = {"idempotency-key": "k"}

LARGE: dict[str, Any] = {
    "experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1},
    "completion_tokens": 1500,
}
"""Some chunks of a replay payload, which are staged: those of the late owner must not stay behind."""


class Pair:
    """Two processes on one PostgreSQL; `frozen` is the one that stands still."""

    def __init__(self, folder: Path, url: str, engine: SimulatorProcess) -> None:
        self.url = url
        self._engine = engine
        self._servers = [ForkedServer(folder, url, [engine.base_url], TURNLOG_LEASE_S=str(LEASE_S)) for _ in range(2)]
        self.frozen, self._other = self._servers
        self.stands: list[Stand] = []

    @contextlib.contextmanager
    def started(self, freeze_at: str = "") -> Iterator[tuple[Stand, Stand]]:
        self.frozen.start(**{VARIABLE: freeze_at})
        self._other.start()
        stands = [Stand(server, self._engine.base_url) for server in self._servers]
        assert stands[0].sim.post("/sim/reset").status_code == 200
        try:
            yield stands[0], stands[1]
        finally:
            self.frozen.signal(signal.SIGCONT)
            for server in self._servers:
                server.stop()
            for stand in stands:
                stand.close()

    def is_frozen(self) -> bool:
        return Path(f"/proc/{self.frozen.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str, engine: SimulatorProcess) -> Pair:
    return Pair(tmp_path, postgres_url, engine)


def begin(mine: Stand, first: str = "First") -> tuple[Talk, httpx.Response]:
    talk = mine.talk()
    return talk, talk.say(first)


def late(mine: Stand, pair: Pair, call: Future[httpx.Response]) -> httpx.Response:
    """What the process answers that goes on again."""
    assert not call.done()
    pair.frozen.signal(signal.SIGCONT)
    reply: httpx.Response = call.result(timeout=30)
    until(lambda: mine.stats()["in_flight"] == 0)
    return reply


@pytest.mark.fault(9, TITLE)
def test_a_retry_takes_the_turn_over_and_the_late_owner_commits_nothing(pair: Pair, tally: Tally) -> None:
    """The engine answers the frozen process, which gets to read it only when its turn is another's."""
    with pair.started() as (mine, theirs):
        talk, first = begin(mine)
        sent = [*talk.messages, user("Second")]
        with held(mine.sim):
            call = mine.meanwhile(talk.chat, sent, headers=KEY)
            mine.until_generating(talk, 2)
            pair.frozen.signal(signal.SIGSTOP)
        frozen = monotonic()
        tally.tried += 1
        until(lambda: mine.stats()["in_flight"] == 0)
        reply = theirs.known(talk.id).chat(sent, headers=KEY)
        tally.recovered(monotonic() - frozen)
        assert reply.status_code == 200
        assert "x-turnlog-replayed" not in reply.headers
        assert error_of(late(mine, pair, call)) == (409, "claim_lost")
        assert talk.types() == [
            *("SessionCreated", *FIRST_TURN),
            *("TurnOpened", "TurnAbandoned", *LATER_TURN),
        ]
        tally.doubled += len(talk.committed()) - 2
        assert talk.chat(sent, headers=KEY).content == reply.content
        talk.messages = [*sent, reply.json()["choices"][0]["message"]]
        third = talk.say("Third")
        verified(pair.url, acknowledgements(talk, first, reply, third), tally)


@pytest.mark.fault(9, TITLE)
@pytest.mark.parametrize("point", ["after_staged", "in_commit", "after_commit"])
def test_frozen_at_a_point_of_the_turn(pair: Pair, tally: Tally, point: CrashPoint) -> None:
    """Inside its transaction it holds the row of the session: the retry waits, or is refused, and one turn remains."""
    large = point == "after_staged"
    fields = {"sim": LARGE, "return_routed_experts": True} if large else {}
    with pair.started(f"{point}:{1 if large else 2}:stop") as (mine, theirs):
        talk, first = begin(mine)
        neighbour = theirs.talk()
        sent = [*talk.messages, user("Second")]
        call = mine.meanwhile(talk.chat, sent, headers=KEY, **fields)
        until(pair.is_frozen)
        frozen = monotonic()
        tally.tried += 1
        retry = theirs.meanwhile(theirs.known(talk.id).chat, sent, headers=KEY, **fields)
        replies = [neighbour.say(f"Not my business {number}") for number in range(3)]
        if point == "in_commit":
            sleep(LEASE_S + 0.3)
            late(mine, pair, call)
        reply = retry.result(timeout=30)
        while reply.status_code == 503:
            assert int(reply.headers["retry-after"]) > 0
            reply = theirs.known(talk.id).chat(sent, headers=KEY, **fields)
        tally.recovered(monotonic() - frozen)
        assert reply.status_code == 200, reply.text
        if point != "in_commit":
            answer = late(mine, pair, call)
            if point == "after_commit":
                assert answer.content == reply.content
            else:
                assert error_of(answer) == (409, "claim_lost")
        elif call.result().status_code == 200:
            assert call.result().content == reply.content
        tally.doubled += len(talk.committed()) - 2
        assert talk.chat(sent, headers=KEY, **fields).content == reply.content
        done = [*acknowledgements(talk, first, reply), *acknowledgements(neighbour, *replies)]
        verified(pair.url, done, tally)


@pytest.mark.fault(9, TITLE)
def test_frozen_for_long_inside_its_transaction(pair: Pair, tally: Tally) -> None:
    """After ten seconds PostgreSQL ends the idle transaction by itself: its rows are free, the turn is taken over."""
    with pair.started("in_commit:2:stop") as (mine, theirs):
        talk, first = begin(mine)
        sent = [*talk.messages, user("Second")]
        call = mine.meanwhile(talk.chat, sent, headers=KEY)
        until(pair.is_frozen)
        frozen = monotonic()
        tally.tried += 1
        other = theirs.known(talk.id)
        while (reply := other.chat(sent, headers=KEY)).status_code == 503:
            assert int(reply.headers["retry-after"]) > 0
            assert monotonic() - frozen < 60
        tally.recovered(monotonic() - frozen)
        assert reply.status_code == 200, reply.text
        assert "x-turnlog-replayed" not in reply.headers
        assert error_of(late(mine, pair, call)) == (409, "claim_lost")
        tally.doubled += len(talk.committed()) - 2
        verified(pair.url, acknowledgements(talk, first, reply), tally)


@pytest.mark.fault(9, TITLE)
def test_the_only_process_keeps_its_store_while_it_is_frozen(
    tmp_path: Path, sqlite_url: str, engine: SimulatorProcess, tally: Tally
) -> None:
    server = ForkedServer(tmp_path, sqlite_url, [engine.base_url], TURNLOG_LEASE_S=str(LEASE_S)).start()
    stand = Stand(server, engine.base_url)
    try:
        talk, first = begin(stand)
        sent = [*talk.messages, user("Second")]
        call = stand.meanwhile(talk.chat, sent, headers=KEY, sim={"latency_s": 0.3})
        stand.until_generating(talk, 2)
        server.signal(signal.SIGSTOP)
        frozen = monotonic()
        tally.tried += 1
        with pytest.raises(ServerDidNotStart, match=r"another process \(pid \d+\) serves"):
            ForkedServer(tmp_path, sqlite_url, []).start()
        sleep(max(LEASE_S + 0.3 - (monotonic() - frozen), 0))
        server.signal(signal.SIGCONT)
        reply = call.result(timeout=30)
        tally.recovered(monotonic() - frozen)
        assert reply.status_code == 200
        tally.doubled += len(talk.committed()) - 2
        verified(sqlite_url, acknowledgements(talk, first, reply), tally)
    finally:
        server.signal(signal.SIGCONT)
        stand.close()
        server.stop()
