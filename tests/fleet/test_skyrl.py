"""SkyRL's routes of pausing a LoRA, called as its trainer and its forwarding client do."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
from fault.hosted import hosted
from integration.stand import error_of, until

from fleet.pausing import SLOW_S, adapter, finish, new_name, order, speaking, until_generating, until_held
from fleet.stands import Fleet

ABORT, RESUME, WAIT = (
    f"/skyrl/v1/{route}" for route in ("abort_lora_requests", "resume_lora_requests", "wait_lora_unpaused")
)


def test_a_trainer_swaps_an_adapter(fleet: Fleet) -> None:
    first, second = fleet.apis
    name = new_name()
    running = second.talk(adapter=name, on_abort="return")
    turn = speaking(fleet, running, sim={"latency_s": SLOW_S})
    until_generating(fleet, running)
    aborted = order(first, ABORT, lora_name=name)
    assert set(aborted) == {"status", "aborted", "count"}
    assert (aborted["status"], aborted["count"], len(aborted["aborted"])) == ("ok", 1, 1)
    assert finish(turn.result()) == "abort"
    fresh = second.talk(adapter=name)
    waiting = speaking(fleet, fresh)
    until_held(second, name)
    assert order(second, WAIT, lora_name=name, timeout_s=0.2) == {"paused": True}
    asking = fleet.meanwhile(order, second, WAIT, lora_name=name)
    assert fleet.chats(fresh.id) == []
    assert not asking.done()
    assert order(first, RESUME, lora_name=name) == {"status": "ok"}
    assert asking.result(timeout=20) == {"paused": False}
    assert finish(waiting.result()) == "stop"
    assert order(first, RESUME, lora_name=name) == {"status": "ok"}


def test_no_time_at_all_is_a_question(fleet: Fleet) -> None:
    api, name = fleet.apis[0], new_name()
    assert order(api, WAIT, lora_name=name) == {"paused": False}, "it was never paused"
    order(api, ABORT, lora_name=name)
    assert order(api, WAIT, lora_name=name, timeout_s=0) == {"paused": True}
    of_run = api.http.post(WAIT, json={"lora_name": name, "timeout_s": 0}, headers={"x-turnlog-run": "one"})
    assert of_run.json() == {"paused": True}, "a run's turns wait at the gate of all runs too"
    order(api, RESUME, lora_name=name)
    assert order(api, WAIT, lora_name=name, timeout_s=0) == {"paused": False}


def test_an_engine_that_fails_is_reported(fleet: Fleet) -> None:
    api, name = fleet.apis[0], new_name()
    talk = api.talk(adapter=name, on_abort="return")
    speaking(fleet, talk, sim={"latency_s": SLOW_S})
    until_generating(fleet, talk)
    for engine in fleet.engines:
        assert engine.sim.post("/sim/behaviour", json={"abort": "missing"}).status_code == 200
    failed = order(api, ABORT, 502, lora_name=name)
    assert (failed["error"]["code"], failed["status"], failed["paused"]) == ("engines_failed", "failed", True)
    assert failed["count"] == 1
    for engine in fleet.engines:
        assert engine.sim.post("/sim/behaviour", json={"abort": "ok"}).status_code == 200
    assert order(api, ABORT, lora_name=name)["status"] == "ok"
    until(lambda: adapter(api, name)["in_flight"] == 0)
    order(api, RESUME, lora_name=name)


BAD_TIMEOUTS = ('"60"', '""', "true", "false", "null", "-1", "-0.001", "3601", "1e300", "[]", "{}", "NaN", "Infinity")
BAD_NAMES = ('""', "7", '"a\\u0000"', f'"{"x" * 513}"', "null")


def test_a_bad_timeout_or_name_is_400_at_once(fleet: Fleet) -> None:
    api, name = fleet.apis[0], new_name()
    order(api, ABORT, lora_name=name)
    wrong = [(WAIT, f'{{"lora_name": "{name}", "timeout_s": {timeout_s}}}') for timeout_s in BAD_TIMEOUTS]
    for route in (ABORT, RESUME, WAIT):
        wrong += [(route, body) for body in ("", "{}", "[]", *(f'{{"lora_name": {bad}}}' for bad in BAD_NAMES))]
    for route, body in wrong:
        assert error_of(api.http.post(route, content=body)) == (400, "invalid_request"), (route, body)
    order(api, RESUME, lora_name=name)


def test_who_stops_asking_is_let_go_at_once(sqlite_url: str) -> None:
    """Nothing that worked for the client is left in the server."""
    with hosted(sqlite_url) as server:
        address = urlsplit(server.base_url)
        at_work = server._server.server_state.tasks
        assert httpx.post(server.base_url + ABORT, json={"lora_name": "a"}).status_code == 200
        body = json.dumps({"lora_name": "a", "timeout_s": 3600}).encode()
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (WAIT.encode(), len(body))
        until(lambda: not at_work)
        with socket.create_connection((address.hostname, address.port)) as asking:
            asking.sendall(head + body)
            until(lambda: at_work)
        until(lambda: not at_work)
