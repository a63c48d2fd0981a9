"""Pausing adapters and the whole fleet, over two processes and two engines."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from integration.stand import Talk, error_of, until, user

from fleet.pausing import (
    SLOW_S,
    adapter,
    finish,
    new_name,
    of_fleet,
    order,
    paused_fleet,
    speaking,
    until_generating,
    until_held,
)
from fleet.stands import Fleet

pytestmark = pytest.mark.long


def test_a_fresh_turn_of_a_paused_adapter_makes_no_engine_call_until_resume(fleet: Fleet) -> None:
    first, second = fleet.apis
    name = new_name()
    paused = order(first, f"/adapters/{name}/pause")
    assert (paused["paused"], paused["closings"], paused["count"], paused["aborted"]) == (True, 1, 0, [])
    assert 500 < paused["lease_left_s"] <= 600
    assert {url: told["ok"] for url, told in paused["engines"].items()} == {one.url: True for one in fleet.engines}
    held, other = second.talk(adapter=name), second.talk(adapter=new_name())
    waiting = speaking(fleet, held)
    assert finish(speaking(fleet, other).result()) == "stop", "other adapters are untouched"
    until_held(second, name)
    assert not waiting.done()
    assert held.types() == ["SessionCreated"], "no claim stands while the gate is shut"
    assert fleet.chats(held.id) == []
    order(first, f"/adapters/{name}/resume")
    assert finish(waiting.result()) == "stop"
    assert len(fleet.chats(held.id)) == 1
    assert adapter(second, name)["held"] == 0


def test_a_retry_that_waits_at_another_process_is_the_same_turn(fleet: Fleet) -> None:
    """Nothing is claimed while both wait: who comes second finds the turn in the log, not in what it had read."""
    name, key = new_name(), {"Idempotency-Key": new_name()}
    talk = fleet.apis[0].talk(adapter=name)
    talks = [api.known(talk.id) for api in fleet.apis]
    for one in talks:
        assert one.state()["records"] == [], "both processes have the session in memory"
    order(fleet.apis[0], f"/adapters/{name}/pause")
    waiting = [speaking(fleet, one, headers=key) for one in talks]
    for api in fleet.apis:
        until_held(api, name)
    order(fleet.apis[1], f"/adapters/{name}/resume")
    first, second = (one.result() for one in waiting)
    assert (first.status_code, first.content) == (200, second.content)
    assert len(talk.committed()) == len(fleet.chats(talk.id)) == 1


def test_pausing_one_adapter_aborts_it_everywhere_and_leaves_another_alone(fleet: Fleet) -> None:
    ours, theirs = new_name(), new_name()
    sessions: list[Talk] = []
    turns: list[Future[httpx.Response]] = []
    while len(sessions) < 6 or len({url for talk in sessions for url, _ in fleet.chats(talk.id)}) < 2:
        sessions.append(fleet.apis[len(sessions) % 2].talk(adapter=ours, on_abort="return"))
        turns.append(speaking(fleet, sessions[-1], sim={"latency_s": SLOW_S}))
        until_generating(fleet, sessions[-1])  # so that the next one's engine is chosen by this one's load
    others = [api.talk(adapter=theirs, on_abort="return") for api in fleet.apis for _ in range(2)]
    spared = [speaking(fleet, talk, sim={"latency_s": 1.5}) for talk in others]
    until_generating(fleet, *others)
    paused = order(fleet.apis[0], f"/adapters/{ours}/pause")
    assert paused["count"] == len(set(paused["aborted"])) == len(sessions)
    assert [finish(turn.result()) for turn in turns] == ["abort"] * len(turns)
    assert [finish(turn.result()) for turn in spared] == ["stop"] * len(spared)
    assert adapter(fleet.apis[1], ours)["in_flight"] == 0
    asked = {rid for engine in fleet.engines for rid in _aborted_at(engine)}
    assert asked == set(paused["aborted"])
    order(fleet.apis[1], f"/adapters/{ours}/resume")


def _aborted_at(engine: Any) -> list[str]:
    return [one["body"]["rid"] for one in engine.seen("/abort_request")]


def test_pause_and_resume_are_idempotent(fleet: Fleet) -> None:
    first, second = fleet.apis
    name = new_name()
    order(first, f"/adapters/{name}/pause", lease_s=1000)
    again = order(second, f"/adapters/{name}/pause", lease_s=50)
    assert (again["paused"], again["closings"]) == (True, 1)
    assert again["lease_left_s"] > 900, "what the first was promised stands"
    longer = order(first, f"/adapters/{name}/pause", lease_s=2000)
    assert longer["lease_left_s"] > 1900
    opened = order(second, f"/adapters/{name}/resume", version="7")
    assert (opened["paused"], opened["closings"], opened["version"], opened["lease_left_s"]) == (False, 1, "7", None)
    before = of_fleet(first)["version"]
    assert order(first, f"/adapters/{name}/resume") == opened
    assert order(first, f"/adapters/{name}/resume", version="7") == opened
    assert of_fleet(first)["version"] == before, "nothing was to be written"
    assert order(first, f"/adapters/{name}/resume", version="8")["version"] == "8"
    order(first, f"/adapters/{name}/pause")
    assert adapter(second, name)["version"] == "8"
    assert adapter(second, name)["closings"] == 2
    assert order(second, f"/adapters/{name}/resume")["version"] is None, "who does not tell leaves it unknown"


def test_a_name_is_known_by_its_first_resume_and_then_as_a_model(fleet: Fleet) -> None:
    first, second = fleet.apis
    name = "org/" + new_name()
    assert error_of(first.http.get(f"/adapters/{name}")) == (404, "not_found")
    order(first, f"/adapters/{name}/resume", version="1")
    assert name in [one["name"] for one in second.http.get("/adapters").json()["adapters"]]
    order(second, f"/adapters/{name}/pause")
    talk = first.talk()
    body = {"model": name, "messages": [user("Hello")]}
    waiting = fleet.meanwhile(first.http.post, talk.chat_path, json=body)
    until_held(first, name)
    order(first, f"/adapters/{name}/resume")
    assert finish(waiting.result()) == "stop"
    assert [event["adapter"] for event in talk.committed()] == [name]


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_the_fleet_pauses_engines_and_holds_every_turn(fleet: Fleet, mode: str) -> None:
    first, second = fleet.apis
    running = first.talk(on_abort="return")
    turn = speaking(fleet, running, sim={"latency_s": SLOW_S if mode == "abort" else 0.5})
    until_generating(fleet, running)
    with paused_fleet(first, mode=mode) as paused:
        assert (paused["paused"], paused["mode"]) == (True, mode)
        assert all(told == {"ok": True, "error": None, "aborted": 0} for told in paused["engines"].values())
        assert [engine.stats()["paused"] for engine in fleet.engines] == [True, True]
        assert [one["body"] for engine in fleet.engines for one in engine.seen("/pause_generation")] == [
            {"mode": mode}
        ] * 2
        assert of_fleet(second)["paused"] is True, "asked, it looks; by itself it knows within 100 ms"
        talk = second.talk()
        waiting = speaking(fleet, talk)
        until(lambda: of_fleet(second)["held"] == 1)
        assert fleet.chats(talk.id) == []
        opened = order(second, "/fleet/resume", version="43")
        assert (opened["paused"], opened["lease_left_s"], opened["weight_version"]) == (False, None, "43")
        assert of_fleet(first)["weight_version"] == "43"
        assert finish(waiting.result()) == "stop"
        assert finish(turn.result()) == ("abort" if mode == "abort" else "stop")
        assert [engine.stats()["paused"] for engine in fleet.engines] == [False, False]


def behave(engine: Any, **outcomes: str) -> None:
    assert engine.sim.post("/sim/behaviour", json=outcomes).status_code == 200


def test_an_engine_that_fails_is_reported_and_the_gate_stays_shut(fleet: Fleet) -> None:
    api, (good, bad) = fleet.apis[0], fleet.engines
    name = new_name()
    talk = api.talk(adapter=name, on_abort="return")
    speaking(fleet, talk, sim={"latency_s": SLOW_S})
    until_generating(fleet, talk)
    behave(good, abort="error")
    behave(bad, abort="error")
    failed = order(api, f"/adapters/{name}/pause", 502)
    assert failed["error"]["code"] == "engines_failed"
    assert "shut" in failed["error"]["message"]
    assert failed["paused"] is True
    assert failed["count"] == 1
    running_at = fleet.chats(talk.id)[0][0]
    assert failed["engines"][running_at]["ok"] is False
    assert "500" in failed["engines"][running_at]["error"]
    assert adapter(fleet.apis[1], name)["paused"] is True
    for engine in fleet.engines:
        behave(engine, abort="ok")
    assert order(api, f"/adapters/{name}/pause")["closings"] == 1
    until(lambda: adapter(api, name)["in_flight"] == 0)
    order(api, f"/adapters/{name}/resume")


def test_a_fleet_that_pauses_in_part_says_which_engines(fleet: Fleet) -> None:
    api, (good, bad) = fleet.apis[0], fleet.engines
    behave(bad, pause="error", resume="missing")
    try:
        failed = order(api, "/fleet/pause", 502)
        assert failed["error"]["code"] == "engines_failed"
        assert failed["paused"] is True
        assert {url: told["ok"] for url, told in failed["engines"].items()} == {good.url: True, bad.url: False}
        opened = order(api, "/fleet/resume", 502)
        assert opened["paused"] is False, "one engine that fails does not idle the others"
        assert {url: told["ok"] for url, told in opened["engines"].items()} == {good.url: True, bad.url: False}
        assert good.stats()["paused"] is False
        behave(bad, resume="ok")
        order(api, "/fleet/resume")
    finally:
        api.http.post("/fleet/resume")


LEASES = ('"60"', "true", "null", "0", "-1", "86401", "[]", "{}", "NaN", "Infinity", "1e999")
BAD_BODIES = [*(f'{{"lease_s": {lease}}}' for lease in LEASES), "[]", "{", '{"lease": 5}']
BAD_ORDERS = [
    *((path, body) for path in ("/adapters/bad-lease/pause", "/fleet/pause") for body in BAD_BODIES),
    *((f"/adapters/{name}/pause", "{}") for name in ("a%00b", "x" * 513, "")),
    *(("/adapters/a/resume", body) for body in ('{"version": 7}', '{"version": "a\\u0000"}', '{"versions": "7"}')),
    ("/fleet/pause", '{"mode": "kill"}'),
    ("/fleet/resume", '{"mode": "abort"}'),
]


def test_bad_orders_are_400_and_shut_nothing(fleet: Fleet) -> None:
    api = fleet.apis[0]
    before = of_fleet(api)["version"]
    for path, body in BAD_ORDERS:
        assert error_of(api.http.post(path, content=body)) == (400, "invalid_request"), (path, body)
    assert of_fleet(api)["version"] == before


def test_orders_that_meet_leave_processes_and_engines_agreed(fleet: Fleet) -> None:
    """Whichever was written last, both processes know it and the engines do as it says."""
    name = new_name()
    try:
        for _ in range(4):
            paths = ("/fleet/pause", "/fleet/resume", f"/adapters/{name}/pause", f"/adapters/{name}/resume")
            orders: list[Future[httpx.Response]] = [
                fleet.meanwhile(api.http.post, path) for api in fleet.apis for path in paths
            ]
            assert {one.result().status_code for one in orders} == {200}
            views = [{**of_fleet(api), "lease_left_s": None} for api in fleet.apis]
            assert views[0] == views[1]
            assert {engine.stats()["paused"] for engine in fleet.engines} == {views[0]["paused"]}
            gates = [{**adapter(api, name), "lease_left_s": None} for api in fleet.apis]
            assert gates[0] == gates[1]
    finally:
        fleet.apis[0].http.post("/fleet/resume")
        fleet.apis[0].http.post(f"/adapters/{name}/resume")


def test_a_lease_that_runs_out_opens_the_gate_once_and_says_so(fleet: Fleet) -> None:
    first, second = fleet.apis
    name = new_name()
    order(first, f"/adapters/{name}/pause", lease_s=1)
    order(first, "/fleet/pause", lease_s=1)
    waiting = speaking(fleet, second.talk(adapter=name))
    assert finish(waiting.result()) == "stop"
    assert adapter(first, name)["paused"] is False
    assert of_fleet(first)["paused"] is False
    until(lambda: [engine.stats()["paused"] for engine in fleet.engines] == [False, False])
    warned = [line for line in fleet.processes.logs().splitlines() if "lease has expired" in line]
    assert len([line for line in warned if name in line]) == 1, warned
