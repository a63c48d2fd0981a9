"""A client that goes away while the engine works."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from integration.stand import Stand, Talk, serving, until, user

from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def hasty(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    environment = {"TURNLOG_ON_DISCONNECT": "abort_after:0.2", "TURNLOG_STREAM_KEEPALIVE_S": "0.1"}
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
        with httpx.stream("POST", stand.server.base_url + talk.chat_path, json=body, timeout=5) as response:
            assert next(response.iter_raw()).startswith(b":")
        return
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(stand.server.base_url + talk.chat_path, json=body, timeout=0.25)


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
    until(lambda: talk.types()[-1] == "TurnAbandoned", 3)
    until(lambda: impatient.stats()["in_flight"] == 0, 3)
    assert talk.events()[-1]["reason"] == "disconnect"
    assert talk.chat([user("Slow")], headers={"x-stainless-retry-count": "1"}).status_code == 200
    assert len(talk.committed()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_with_abort_after_a_client_that_stays_is_served(impatient: Stand, stream: bool) -> None:
    talk = impatient.talk()
    response = talk.chat([user("Slow")], stream=stream, sim={"latency_s": 0.6})
    assert response.status_code == 200
    assert len(talk.committed()) == 1


def test_a_turn_that_ends_within_the_grace_commits(impatient: Stand) -> None:
    talk = impatient.talk()
    leave(impatient, talk, 0.35, stream=False)
    until(lambda: talk.types()[-1] != "TurnOpened", 3)
    assert talk.types()[-1] == "TurnCommitted"


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
    body = {"model": "simulator", "messages": [user("Slow")], "sim": {"latency_s": 1.2}}
    url = impatient.server.base_url + talk.chat_path
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.15)
    joined = httpx.post(url, json=body, timeout=10, headers={"x-stainless-retry-count": "1"})
    assert (joined.status_code, joined.headers["x-turnlog-replayed"]) == (200, "true")
    assert talk.types() == ["SessionCreated", "TurnOpened", "TurnCommitted"]
    assert talk.generations() == 1
