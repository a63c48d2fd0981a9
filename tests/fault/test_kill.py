"""A server that is killed or stopped with turns in flight: the first retry is served, and a stop lets turns land."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest
from integration.stand import FIRST_TURN, Stand, held, user

from fault.table import Tally
from fault.verified import acknowledgement, verified

TITLE = "kill -9 at random under load"


@pytest.mark.fault(1, TITLE)
@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}),
        pytest.param(
            {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}, marks=pytest.mark.long, id="sdk"
        ),
    ],
)
def test_the_first_retry_of_a_turn_that_was_in_flight_is_served(
    stand: Stand, tally: Tally, first: dict[str, str], again: dict[str, str]
) -> None:
    talks = [stand.talk() for _ in range(8)]
    for talk in talks:
        talk.say("Hello")
    with held(stand.sim):
        calls = [stand.meanwhile(talk.chat, [*talk.messages, user("Slow")], headers=first) for talk in talks]
        for talk in talks:
            stand.until_generating(talk, 2)
        stand.server.kill()
    killed = time.monotonic()
    tally.tried += 1
    stand.server.start()
    for call in calls:
        with pytest.raises(httpx.TransportError):
            call.result()
    retries = [stand.meanwhile(talk.chat, [*talk.messages, user("Slow")], headers=again) for talk in talks]
    replies = [retry.result() for retry in retries]
    assert [reply.status_code for reply in replies] == [200] * len(talks)
    tally.recovered(time.monotonic() - killed)
    for talk in talks:
        tally.doubled += len(talk.committed()) - 2
        assert talk.types()[-4:] == ["TurnOpened", "TurnAbandoned", "TurnOpened", "TurnCommitted"]
    verified(stand, [acknowledgement(talk.id, reply) for talk, reply in zip(talks, replies, strict=True)], tally)


def test_a_stop_lets_the_turns_in_flight_land(stand: Stand) -> None:
    talk = stand.talk()
    call = stand.meanwhile(talk.chat, [user("Slow")], sim={"latency_s": 1.0})
    stand.until_generating(talk)
    stand.server.stop()
    assert call.result().status_code == 200
    stand.server.start()
    assert len(talk.committed()) == 1
    talk.messages = [user("Slow"), call.result().json()["choices"][0]["message"]]
    talk.say("On")


def test_a_stop_lets_a_turn_land_whose_client_is_gone(stand: Stand) -> None:
    talk = stand.talk()
    body = {"messages": [user("Slow")], "sim": {"latency_s": 1.0}}
    with held(stand.sim), contextlib.closing(HTTPConnection(urlsplit(stand.base_url).netloc)) as client:
        client.request("POST", talk.chat_path, json.dumps(body), {"content-type": "application/json"})
        stand.until_generating(talk)
    stand.server.stop()
    stand.server.start()
    assert talk.types() == ["SessionCreated", *FIRST_TURN, "ReplyUndelivered"]


def test_a_stop_ends_those_who_follow_a_log(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    is_followed = threading.Event()

    def follow() -> int:
        lines = 0
        with stand.http.stream("GET", f"{talk.path}/events", params={"follow": "true"}) as response:
            for _ in response.iter_lines():
                lines += 1
                is_followed.set()
        return lines

    following = stand.meanwhile(follow)
    assert is_followed.wait(60)
    stand.server.stop()
    assert following.result() == 1 + len(FIRST_TURN)
    stand.server.start()
