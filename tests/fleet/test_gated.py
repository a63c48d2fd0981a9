"""Turns that wait for a gate: what they hold, who gets which, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.stand import Stand, Talk, error_of, serving, standing, until, user

from fleet.pausing import Client, finish, new_name
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """`TURNLOG_ON_DISCONNECT` is `finish`, but a turn at a gate does not wait for a client that is gone."""
    environment = {"TURNLOG_STREAM_KEEPALIVE_S": "0.1", "TURNLOG_ENGINE_SESSIONS": "all"}
    with standing(tmp_path_factory.mktemp("gated"), "--seed", "5", environment=environment) as made:
        yield made


class Gate:
    """A paused adapter of the test's own."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.name = new_name()
        self.tell("pause")

    def tell(self, what: str) -> None:
        assert self.stand.http.post(f"/adapters/{self.name}/{what}").status_code == 200

    def talk(self, **body: Any) -> Talk:
        return self.stand.talk(adapter=self.name, **body)

    def held(self) -> int:
        found: int = self.stand.http.get(f"/adapters/{self.name}").json()["held"]
        return found

    def until_held(self, count: int) -> None:
        until(lambda: self.held() == count)

    def speaking(self, talk: Talk, count: int = 1, **fields: Any) -> Future[httpx.Response]:
        """A turn that is known to wait, as the `count`-th at this gate."""
        turn: Future[httpx.Response] = self.stand.meanwhile(talk.chat, [user("Hello")], **fields)
        self.until_held(count)
        return turn


RETRY = "x-stainless-retry-count: 1"


def test_a_stream_is_kept_alive_while_it_waits(stand: Stand) -> None:
    gate = Gate(stand)
    talk = gate.talk()
    body = {"messages": [user("Hello")], "stream": True}
    with stand.http.stream("POST", talk.chat_path, json=body) as response:
        pieces = response.iter_raw()
        assert [next(pieces) for _ in range(3)] == [b": keep-alive\n\n"] * 3
        gate.tell("resume")
        rest = b"".join(pieces)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert len(talk.committed()) == 1


def test_a_gate_that_is_shut_while_a_turn_is_made_ready_holds_it_all_the_same(stand: Stand) -> None:
    """It passed the gate and has its claim, but the engine is still opening a session for it."""
    gate = Gate(stand)
    gate.tell("resume")
    talk = gate.talk()
    assert stand.sim.post("/sim/behaviour", json={"sessions_delay_s": 1.5}).status_code == 200
    control = {"session_control": {"session_id": talk.id, "action": "open"}}
    turn = stand.meanwhile(talk.chat, [user("Hello")], nvext=control)
    until(lambda: _opened(stand, talk))
    gate.tell("pause")
    assert talk.generations() == 0, "the test was too late"
    gate.until_held(1)
    assert talk.generations() == 0
    gate.tell("resume")
    assert finish(turn.result()) == "stop"
    assert stand.sim.post("/sim/behaviour", json={"sessions_delay_s": 0.0}).status_code == 200


def _opened(stand: Stand, talk: Talk) -> bool:
    seen: list[dict[str, Any]] = stand.sim.get("/sim/requests", params={"last": 256}).json()
    return any(one["path"] == "/open_session" and one["body"]["session_id"] == talk.id for one in seen)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_while_the_gate_is_shut_is_let_go_at_once(stand: Stand, stream: bool) -> None:
    gate = Gate(stand)
    talk = gate.talk()
    client = Client(talk, stand.server.base_url, stream=stream)
    gate.until_held(1)
    client.leave()
    gate.until_held(0)
    until(lambda: stand.http.get("/health").json()["in_flight"] == 0)
    gate.tell("resume")
    finish(talk.chat([user("Is anybody there?")]))
    assert talk.types() == ["SessionCreated", "TurnOpened", "AffinityBound", "TurnCommitted"]
    assert talk.generations() == 1


def test_who_goes_while_uploading_to_a_shut_gate_makes_no_call(stand: Stand) -> None:
    gate = Gate(stand)
    talk = gate.talk()
    Client(talk, stand.server.base_url, upto=20).leave()
    gate.tell("resume")
    finish(talk.chat([user("Hello")]))
    assert talk.types().count("TurnOpened") == 1
    assert talk.generations() == 1


def test_a_turn_that_a_retry_has_joined_waits_on_for_it(stand: Stand) -> None:
    gate = Gate(stand)
    talk = gate.talk()
    first, second, third = waiting(gate, talk, 3)
    first.leave()
    third.leave()
    time.sleep(0.3)
    assert gate.held() == 1
    gate.tell("resume")
    second.until(b"data: [DONE]")
    second.leave()
    assert (talk.generations(), len(talk.committed())) == (1, 1)


def waiting(gate: Gate, talk: Talk, count: int) -> list[Client]:
    """Clients of one turn, the first of which has it and the others have joined it, as its comments say."""
    clients = []
    for place in range(count):
        clients.append(Client(talk, gate.stand.server.base_url, stream=True, head=RETRY if place else ""))
        clients[-1].until(b"keep-alive\n")
    assert gate.held() == 1
    return clients


def test_turns_pass_in_the_order_in_which_they_came(stand: Stand) -> None:
    gate = Gate(stand)
    talks = [gate.talk() for _ in range(12)]
    turns = [gate.speaking(talk, place) for place, talk in enumerate(talks, 1)]
    gate.tell("resume")
    assert [finish(turn.result()) for turn in turns] == ["stop"] * len(turns)
    opened = [talk.events()[1]["at"] for talk in talks]
    assert opened == sorted(opened)


def test_a_turn_of_another_adapter_passes_while_hundreds_wait(stand: Stand) -> None:
    gate = Gate(stand)
    clients = [Client(gate.talk(), stand.server.base_url) for _ in range(200)]
    gate.until_held(len(clients))
    finish(stand.talk().chat([user("Hello")]))
    finish(stand.talk(adapter=new_name()).chat([user("Hello")]))
    gate.tell("resume")
    for client in clients:
        client.until(b"HTTP/1.1 200")
        client.leave()


def test_a_server_that_is_told_to_stop_lets_all_go(tmp_path: Path) -> None:
    """503 with Retry-After for turns, an answer for who asks whether it is paused; no claim is left behind."""
    with standing(tmp_path) as stand:
        gate = Gate(stand)
        body = {"lora_name": gate.name, "timeout_s": 60}
        asking = stand.meanwhile(stand.http.post, "/skyrl/v1/wait_lora_unpaused", json=body)
        talks = [gate.talk() for _ in range(3)]
        turns = [gate.speaking(talk, place) for place, talk in enumerate(talks, 1)]
        stopped = threading.Thread(target=stand.server.stop)
        stopped.start()
        for turn in turns:
            response = turn.result(timeout=15)
            assert error_of(response) == (503, "overloaded")
            assert response.headers["retry-after"] == "1"
        assert asking.result(timeout=15).json() == {"paused": True}
        stopped.join()
        stand.server.start()
        gate.tell("resume")
        assert [talk.types() for talk in talks] == [["SessionCreated"]] * len(talks)
        assert finish(talks[0].chat([user("Hello")])) == "stop"


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--seed", "5") as made:
        yield made


def test_a_session_whose_turn_waits_is_not_idle(engine: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path, engine.base_url, environment={"TURNLOG_IDLE_CLOSE_S": "0.2"}) as stand:
        gate = Gate(stand)
        talk = gate.talk()
        turn = gate.speaking(talk)
        time.sleep(1.5)
        gate.tell("resume")
        assert finish(turn.result()) == "stop"
