"""Fault 7: a client that goes away: during its upload, while the engine works, during the reply."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from integration.stand import FIRST_TURN, Stand, Talk, serving, until, user

from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged


@pytest.fixture(scope="module")
def hasty(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    environment = {"TURNLOG_ON_DISCONNECT": "abort_after:1", "TURNLOG_STREAM_KEEPALIVE_S": "0.1"}
    with serving(tmp_path_factory.mktemp("hasty"), engine.base_url, environment=environment) as made:
        yield made


@pytest.fixture
def impatient(hasty: Stand) -> Stand:
    assert hasty.sim.post("/sim/reset").status_code == 200
    return hasty


def leave(stand: Stand, talk: Talk, latency_s: float, stream: bool) -> None:
    """Ask, and hang up while the engine works."""
    body = {"model": "simulator", "messages": [user("Slow")], "stream": stream, "sim": {"latency_s": latency_s}}
    if stream:
        with httpx.stream("POST", stand.server.base_url + talk.chat_path, json=body, timeout=60) as response:
            assert next(response.iter_raw()).startswith(b":")
        return
    with contextlib.closing(HTTPConnection(urlsplit(stand.server.base_url).netloc)) as connection:
        connection.request("POST", talk.chat_path, json.dumps(body), {"content-type": "application/json"})
        until(lambda: "TurnOpened" in talk.types())


def without_replies(talk: Talk) -> list[str]:
    """What happened in the session, whatever became of its replies."""
    return [kind for kind in talk.types() if kind not in ("ReplyUndelivered", "ReplyRedelivered")]


def test_a_turn_outlives_its_client(stand: Stand) -> None:
    talk = stand.talk()
    leave(stand, talk, 0.7, stream=False)
    until(lambda: talk.committed())
    body = [user("Slow")]
    again = talk.chat(body, stream=False, headers={"x-stainless-retry-count": "1"}, sim={"latency_s": 0.7})
    assert again.status_code == 200
    assert (talk.generations(), len(talk.committed())) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_with_abort_after_the_turn_is_abandoned_and_the_engine_told(impatient: Stand, stream: bool) -> None:
    talk = impatient.talk()
    leave(impatient, talk, 15.0, stream=stream)
    until(lambda: talk.types()[-1] == "TurnAbandoned")
    until(lambda: impatient.stats()["in_flight"] == 0)
    assert talk.events()[-1]["reason"] == "disconnect"
    assert talk.chat([user("Slow")], headers={"x-stainless-retry-count": "1"}).status_code == 200
    assert len(talk.committed()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_with_abort_after_a_client_that_stays_is_served(impatient: Stand, stream: bool) -> None:
    talk = impatient.talk()
    response = talk.chat([user("Slow")], stream=stream, sim={"latency_s": 1.5})
    assert response.status_code == 200
    assert len(talk.committed()) == 1


def test_a_turn_that_ends_within_the_grace_commits(engine: SimulatorProcess, tmp_path: Path) -> None:
    environment = {"TURNLOG_ON_DISCONNECT": "abort_after:60"}
    with serving(tmp_path, engine.base_url, environment=environment) as patient:
        talk = patient.talk()
        leave(patient, talk, 0.35, stream=False)
        until(talk.committed)


def test_a_client_that_leaves_before_its_body_is_whole_opens_no_turn(stand: Stand) -> None:
    talk = stand.talk()

    def half() -> Iterator[bytes]:
        yield b'{"messages": ['
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        httpx.post(stand.server.base_url + talk.chat_path, content=half())
    assert stand.http.get("/health").json()["in_flight"] == 0
    assert talk.types() == ["SessionCreated"]
    talk.say("Hello")


def test_a_turn_that_a_retry_has_joined_outlives_the_first_client(impatient: Stand) -> None:
    talk = impatient.talk()
    body = {"model": "simulator", "messages": [user("Slow")], "stream": True, "sim": {"latency_s": 2.5}}
    url = impatient.server.base_url + talk.chat_path
    again = {"x-stainless-retry-count": "1"}
    with httpx.stream("POST", url, json=body, timeout=60) as first, contextlib.ExitStack() as stack:
        assert next(first.iter_raw()).startswith(b":")
        second = stack.enter_context(httpx.stream("POST", url, json=body, timeout=60, headers=again))
        pieces = second.iter_raw()
        assert next(pieces).startswith(b":")
        first.close()
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert without_replies(talk) == ["SessionCreated", *FIRST_TURN]
    assert talk.generations() == 1


class Leaver:
    """A client of one turn that hangs up at a random moment of it, and then asks again with the same key."""

    def __init__(self, stand: Stand, seed: str) -> None:
        self._stand = stand
        self._rng = random.Random(seed)
        self.talk = stand.talk()
        self.stage = self._rng.choice(["upload", "wait", "reply"])
        self.stream = self._rng.random() < 0.3
        body = {
            "model": "simulator",
            "messages": [user("Hello " * self._rng.randrange(2000))],
            "stream": self.stream,
            "sim": {"latency_s": 0.3 if self.stage == "wait" else 0.0, "body_bytes": 2_000_000},
        }
        self.data = json.dumps(body).encode()

    def run(self) -> Acknowledged:
        self._leave()
        again = self._stand.http.post(self.talk.chat_path, content=self.data, headers={"idempotency-key": "k"})
        assert again.status_code == 200, (self.stage, again.text[:200])
        turn = self.talk.committed()[0]["turn"]
        if self.stream:
            assert again.content.endswith(b"data: [DONE]\n\n"), self.stage
            return Acknowledged(self.talk.id, turn)
        return Acknowledged(self.talk.id, turn, hashlib.sha256(again.content).hexdigest())

    def _leave(self) -> None:
        sent = len(self.data) if self.stage != "upload" else self._rng.randrange(len(self.data))
        head = (f"POST {self.talk.chat_path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(self.data)}")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.connect(("127.0.0.1", self._stand.server.port))
            connection.sendall("\r\n".join([*head, "Idempotency-Key: k", "", ""]).encode() + self.data[:sent])
            if self.stage == "wait":
                time.sleep(self._rng.uniform(0, 0.3))
            elif self.stage == "reply":
                wanted = self._rng.randrange(1, 1_000_000)
                while wanted > 0 and (piece := connection.recv(1 << 16)):
                    wanted -= len(piece)
            if self._rng.random() < 0.5:  # a process that dies with data unread: RST instead of FIN
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.long
@pytest.mark.fault(7, "a client hangs up during its upload, while it waits, during the reply")
@pytest.mark.parametrize("patience", ["stand", "impatient"])
def test_whenever_a_client_leaves_its_retry_has_the_one_turn(
    request: pytest.FixtureRequest, tally: Tally, patience: str
) -> None:
    """Every turn is there once, and where the first request did not end it nothing was generated twice."""
    stand: Stand = request.getfixturevalue(patience)
    leavers = [Leaver(stand, f"7/{number}") for number in range(24)]
    acknowledged = [call.result(timeout=60) for call in [stand.meanwhile(leaver.run) for leaver in leavers]]
    for leaver in leavers:
        types = without_replies(leaver.talk)
        tally.doubled += types.count("TurnCommitted") - 1
        if "TurnAbandoned" not in types:
            assert types == ["SessionCreated", *FIRST_TURN], leaver.stage
    assert {leaver.stage for leaver in leavers} == {"upload", "wait", "reply"}
    until(lambda: stand.http.get("/health").json()["in_flight"] == 0)
    tally.tried += len(leavers)
    verified(stand, acknowledged, tally)
