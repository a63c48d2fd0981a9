"""Generations that a pause interrupts, with two processes and two engines: who goes on, where, and what is left."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from integration.stand import Talk, until, user
from integration.tito import output_of

from fleet.pausing import SLOW_S, new_name, order, speaking
from fleet.stands import Engine, Fleet

NINE: dict[str, Any] = {"max_tokens": 16, "sim": {"completion_tokens": 9, "reasoning": False, "abort_at": [5]}}


def slow(fleet: Fleet, seconds: float = SLOW_S) -> None:
    for engine in fleet.engines:
        assert engine.sim.post("/sim/latency", json={"latency_s": seconds}).status_code == 200


def rids(engine: Engine) -> list[str]:
    found: list[str] = engine.stats()["in_flight_rids"]
    return found


def busy(fleet: Fleet) -> list[Engine]:
    return [engine for engine in fleet.engines if rids(engine)]


def begun(fleet: Fleet, talk: Talk, **fields: Any) -> tuple[Future[httpx.Response], Engine]:
    """A turn that an engine works on for longer than any test."""
    slow(fleet)
    turn = speaking(fleet, talk, **fields)
    until(lambda: busy(fleet))
    return turn, busy(fleet)[0]


def budgets(fleet: Fleet, talk: Talk) -> list[int]:
    return [one["body"]["max_tokens"] for _, one in fleet.chats(talk.id)]


def settled(fleet: Fleet) -> dict[str, Talk]:
    """A session at each engine, where it stays."""
    found: dict[str, Talk] = {}
    while len(found) < len(fleet.engines):
        talk = fleet.apis[0].talk()
        talk.say("Hello")
        found[fleet.chats(talk.id)[0][0]] = talk
    return found


def test_an_adapter_that_another_process_pauses_twice(fleet: Fleet) -> None:
    """All parts have one rid, by which whoever pauses the adapter ends whichever of them there is.

    They are one engine's, which has the tokens so far in its cache, also where it has more to do than the others.
    """
    name, (first, second) = new_name(), fleet.apis
    others = settled(fleet)
    talk = first.talk(on_abort="continue", adapter=name)
    fields = {**NINE, "sim": {**NINE["sim"], "abort_at": [5, 2]}}
    turn, engine = begun(fleet, talk, **fields)
    other = fleet.meanwhile(others[engine.url].say, "And then?", sim={"latency_s": SLOW_S})
    until(lambda: len(rids(engine)) == 2)
    [rid] = {one["body"]["rid"] for _, one in fleet.chats(talk.id)}
    for number in range(2):
        until(lambda: rid in rids(engine))
        swept = order(second, f"/adapters/{name}/pause")
        assert swept["aborted"] == [rid]
        until(lambda: rid not in rids(engine))
        if number:
            slow(fleet, 0.0)
        order(second, f"/adapters/{name}/resume")
    response = turn.result()
    assert engine.sim.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert other.result().json()["choices"][0]["finish_reason"] == "abort"
    assert len(output_of(response.json())) == 9
    assert budgets(fleet, talk) == [16, 11, 9]
    assert talk.committed()[0]["parts"] == [[engine.url, 0, 5], [engine.url, 5, 7], [engine.url, 7, 9]]
    there = second.known(talk.id)
    there.messages = [user("Hello"), response.json()["choices"][0]["message"]]
    there.say("And then?")
    assert {url for url, _ in fleet.chats(talk.id)} == {engine.url}


@pytest.mark.parametrize("is_named", [False, True], ids=["its own", "by session_control"])
def test_an_engine_that_is_taken_out_meanwhile_is_not_asked_for_the_rest(fleet: Fleet, is_named: bool) -> None:
    """Nobody tells it of the weights any more. The binding says why the session moved."""
    name, (first, second) = new_name(), fleet.apis
    talk = first.talk(on_abort="continue", adapter=name)
    named = {"nvext": {"session_control": {"session_id": name, "action": "bind"}}} if is_named else {}
    talk.say("Hello", **named)
    slow(fleet)
    turn = fleet.meanwhile(talk.say, "And then?", **NINE, **named)
    until(lambda: busy(fleet))
    [engine] = busy(fleet)
    [other] = [one for one in fleet.engines if one is not engine]
    order(second, f"/adapters/{name}/pause")
    slow(fleet, 0.0)
    try:
        assert second.http.delete("/engines", params={"url": engine.url}).status_code == 204
        until(lambda: all(len(api.http.get("/engines").json()["engines"]) == 1 for api in fleet.apis))
        order(second, f"/adapters/{name}/resume")
        assert turn.result().status_code == 200
    finally:
        assert second.http.post("/engines", json={"url": engine.url}).status_code == 200
    last = talk.committed()[-1]
    assert last["parts"] == [[engine.url, 0, 5], [other.url, 5, last["output_tokens"]]]
    bound = [(event["engine"], event.get("cause")) for event in talk.events() if event["type"] == "AffinityBound"]
    assert bound[1:] == [(other.url, "listed")]
