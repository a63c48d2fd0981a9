"""Fault 13: engines that drip, send too much, reset, redirect and never end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from integration.stand import Stand, Talk, serving, until, user

from fault.raw_engine import MUST_SUCCEED, SOUND, WAYS, RawEngine, raw_engine
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

TIMEOUT_S = 5
OWN_STATUS = {"says_599": 599}
"""An engine's own error is the client's to see."""


@pytest.fixture(scope="module")
def raw(engine: SimulatorProcess) -> Iterator[RawEngine]:
    with raw_engine(engine.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def behind(raw: RawEngine, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server before such an engine, with little patience."""
    environment = {"TURNLOG_UPSTREAM_TIMEOUT_S": str(TIMEOUT_S), "TURNLOG_MAX_UPSTREAM_BYTES": "1000000"}
    folder = tmp_path_factory.mktemp("raw")
    with serving(folder, raw.base_url, environment=environment, engine_url=engine.base_url) as made:
        yield made


LATER, LAST = "sends_another_later", "the_last_without_id"


class Client:
    """A session of three turns, of which the second is replied to in a certain way."""

    def __init__(self, stand: Stand, way: str) -> None:
        self.talk: Talk = stand.talk()
        self.way = way
        self.asked = 0
        self.acknowledged: list[Acknowledged] = []

    def run(self) -> None:
        assert self.ask("plain").status_code == 200
        response = self.ask(self.way)
        found = (self.way, response.status_code, response.text[:200])
        if self.way in SOUND:
            assert response.status_code in ((200,) if self.way in MUST_SUCCEED else (200, 502)), found
        elif self.way in OWN_STATUS:
            assert response.status_code == OWN_STATUS[self.way], found
        else:
            assert response.status_code in (502, 504), found
            assert response.json()["error"]["code"].startswith("upstream_"), found
        assert self.talk.types()[-1] == ("TurnCommitted" if response.status_code == 200 else "TurnRejected"), found
        if self.way == LATER:
            time.sleep(0.2)
        last = self.ask("plain")
        assert last.status_code == 200, (self.way, last.text)

    def ask(self, way: str) -> httpx.Response:
        """A turn whose reply must be its own, whatever else went over the connection."""
        self.asked += 1
        own = f"Reply {self.asked} of {self.talk.id}"
        messages = [*self.talk.messages, user(own)]
        response = self.talk.chat(messages, user=way, sim={"text": own, "tool_calls": False})
        if response.status_code == 200:
            message = response.json()["choices"][0]["message"]
            assert message["content"] == own, way
            self.acknowledged.append(acknowledgement(self.talk.id, response))
            self.talk.messages = [*messages, message]
        return response


@pytest.mark.long
@pytest.mark.fault(13, "an engine's connection drips, sends too much, resets, redirects, never ends")
def test_what_an_engines_connection_does_costs_its_own_turn_alone(behind: Stand, raw: RawEngine, tally: Tally) -> None:
    """One client for each way, all at once.

    But for the one whose second reply comes a little later: it may meet a request that has been sent, which is 502. So
    may one that is left over from another turn.
    """
    ways = sorted(set(WAYS) - {LATER, LAST})
    random.Random(13).shuffle(ways)
    clients = [Client(behind, way) for way in ways]
    calls = [behind.meanwhile(client.run) for client in clients]
    failed = [f"{client.way}: {call.exception(timeout=120)}" for client, call in zip(clients, calls, strict=True)]
    failed = [line for line in failed if not line.endswith(": None")]
    assert not failed, "\n".join(failed)
    for client in clients:
        tally.doubled += max(raw.generated[client.talk.id] - client.asked, 0)  # a 502 may come before it was read
    tally.tried += len(clients)
    verified(behind, [one for client in clients for one in client.acknowledged], tally)


@pytest.mark.parametrize("way", ["sends_two_replies", LATER])
def test_a_reply_that_nobody_asked_for_is_nobodys(behind: Stand, way: str) -> None:
    """The connection is idle when it comes, and would be the next turn's."""
    for _ in range(3):
        Client(behind, way).run()


def test_a_reply_without_an_id_is_refused_once_the_engine_has_given_one(behind: Stand) -> None:
    client = Client(behind, LAST)
    assert client.ask("plain").status_code == 200
    assert client.ask(LAST).status_code == 502
    until(lambda: client.ask("plain").status_code == 200)


def test_of_an_engine_that_gives_no_ids_no_connection_is_used_twice(
    raw: RawEngine, engine: SimulatorProcess, tmp_path: Path
) -> None:
    with serving(tmp_path, raw.base_url, engine_url=engine.base_url) as stand:
        client = Client(stand, LAST)
        for _ in range(5):
            assert client.ask(LAST).status_code == 200
