"""Marked retries: one generation, one turn, the same bytes."""

from __future__ import annotations

from concurrent.futures import Future

import httpx
import pytest

from integration.stand import HOURS, Stand, error_of, until, user

KEY = {"idempotency-key": "k-1"}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize(("first", "again"), [(KEY, KEY), ({}, RETRY), ({"x-stainless-retry-count": "0"}, RETRY)])
def test_a_marked_retry_gets_the_committed_reply_to_the_byte(
    stand: Stand, first: dict[str, str], again: dict[str, str]
) -> None:
    talk = stand.talk()
    talk.say("Warm up")
    sent = [*talk.messages, user("Hello")]
    one, two, three = (talk.chat(sent, headers=headers) for headers in (first, again, again))
    assert one.status_code == two.status_code == 200
    assert one.content == two.content == three.content
    assert two.headers["content-type"] == one.headers["content-type"]
    assert (talk.generations(), len(talk.committed())) == (2, 2)
    assert two.headers["x-turnlog-replayed"] == "true"
    assert "x-turnlog-replayed" not in one.headers
    until(lambda: "ReplyRedelivered" in talk.types())
    assert talk.types().count("ReplyRedelivered") == 1


def test_a_key_with_another_body_is_422(stand: Stand) -> None:
    talk = stand.talk()
    assert talk.chat([user("Hello")], headers=KEY).status_code == 200
    response = talk.chat([user("Other")], headers=KEY)
    assert error_of(response) == (422, "idempotency_mismatch")
    assert response.headers["x-should-retry"] == "false"
    assert talk.generations() == 1


@pytest.mark.parametrize(("first", "again"), [(KEY, KEY), ({}, RETRY)])
def test_a_marked_retry_joins_the_turn_in_flight(stand: Stand, first: dict[str, str], again: dict[str, str]) -> None:
    talk = stand.talk()

    def send(headers: dict[str, str]) -> Future[httpx.Response]:
        return stand.meanwhile(talk.chat, [user("Slow")], headers=headers, sim={"latency_s": 1.0})

    calls = [send(first)]
    stand.until_generating(talk)
    calls += [send(again), send(again)]
    replies = [call.result() for call in calls]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert len({reply.content for reply in replies}) == 1
    assert (talk.generations(), len(talk.committed())) == (1, 1)


def test_a_retry_of_a_stream_is_a_stream_of_the_same_turn(stand: Stand) -> None:
    talk = stand.talk()
    replies = [talk.chat([user("Hello")], headers=KEY, stream=True) for _ in range(2)]
    assert replies[0].content == replies[1].content
    assert replies[1].headers["content-type"].startswith("text/event-stream")
    assert talk.generations() == 1


def test_the_key_of_the_turn_in_flight_with_another_body_is_422(stand: Stand) -> None:
    talk = stand.talk()
    call = stand.meanwhile(talk.chat, [user("Slow")], headers=KEY, sim={"latency_s": HOURS})
    stand.until_generating(talk)
    assert error_of(talk.chat([user("Other")], headers=KEY)) == (422, "idempotency_mismatch")
    stand.end()
    assert call.result().status_code == 200
