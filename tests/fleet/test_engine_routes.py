"""Trainers that have Turnlog's address in place of an engine's, over two processes and two engines."""

from __future__ import annotations

from typing import Any

import pytest
from integration.stand import error_of, until

from fleet.pausing import SLOW_S, of_fleet, speaking, until_generating
from fleet.stands import Fleet

pytestmark = pytest.mark.long


def ask(fleet: Fleet, path: str, body: Any = None, process: int = 0) -> dict[str, Any]:
    response = fleet.apis[process].http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_engines_are_listed_and_one_of_them_answers(fleet: Fleet) -> None:
    urls = {engine.url for engine in fleet.engines}
    api = fleet.apis[0]
    assert {one["url"] for one in api.get("/workers")["workers"]} == urls == set(api.get("/list_workers")["urls"])
    ids = ask(fleet, "/tokenize", {"prompt": "six times seven"})["tokens"]
    assert ask(fleet, "/detokenize", {"tokens": ids})["text"] == "six times seven"
    assert api.get("/model_info")["model_path"] == api.get("/get_model_info")["model_path"]
    assert (api.get("/ping"), api.get("/is_paused")) == ({}, {"is_paused": False})


@pytest.mark.parametrize(("pause", "resume"), [("/pause", "/resume"), ("/pause_generation", "/continue_generation")])
def test_a_pause_holds_turns_at_every_process(fleet: Fleet, pause: str, resume: str) -> None:
    ask(fleet, pause)
    try:
        assert of_fleet(fleet.apis[1])["paused"]
        waiting = speaking(fleet, fleet.apis[1].talk())
    finally:
        ask(fleet, resume, process=1)
    assert waiting.result().status_code == 200
    assert fleet.apis[0].get("/is_paused") == {"is_paused": False}


def test_an_update_reaches_every_engine_between_turns(fleet: Fleet) -> None:
    """Also between a pause and a resume of the trainer's own, and its version is that of the tokens after it."""
    for around, version in ((False, "101"), (True, "102")):
        if around:
            ask(fleet, "/pause_generation", {"mode": "in_place"})
        body = {"model_path": "/weights", "weight_version": version}
        assert ask(fleet, "/update_weights_from_disk", body)["success"]
        assert of_fleet(fleet.apis[1])["paused"] == around
        if around:
            ask(fleet, "/continue_generation")
        assert [len(engine.seen("/update_weights_from_disk")) for engine in fleet.engines] == [1 + around] * 2
        talk = fleet.apis[1].talk()
        talk.say("Hello")
        [row] = talk.rows()
        assert row["weight_versions"][-1] == int(version)
    ask(fleet, "/flush_cache")
    assert fleet.apis[0].get("/flush_cache")["success"]  # SGLang takes both methods, and trainers use either.
    assert [len(engine.seen("/flush_cache")) for engine in fleet.engines] == [2, 2]


def test_an_update_that_an_engine_refuses_leaves_no_gate_shut(fleet: Fleet) -> None:
    response = fleet.apis[0].http.post("/update_weights_from_disk", json={"weight_version": "7"})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engines_failed")
    assert {url for url, told in response.json()["engines"].items() if not told["ok"]} == {
        engine.url for engine in fleet.engines
    }
    assert not of_fleet(fleet.apis[1])["paused"]


@pytest.mark.parametrize(
    ("route", "body", "key", "abort", "named"),
    [
        ("/generate", {"input_ids": [5, 6]}, "rid", "/abort_request", lambda name: {"rid": name}),
        (
            "/inference/v1/generate",
            {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8}},
            "request_id",
            "/inference/v1/abort_requests",
            lambda name: {"request_ids": [name]},
        ),
    ],
)
def test_a_generation_is_aborted_by_its_clients_id(
    fleet: Fleet, route: str, body: dict[str, Any], key: str, abort: str, named: Any
) -> None:
    first, second = fleet.apis
    talk = first.talk(on_abort="return")
    slow = {**body, key: "mine", "sim": {"latency_s": SLOW_S}}
    waiting = fleet.meanwhile(first.http.post, talk.path + route, json=slow)
    until(lambda: any(engine.seen("/v1/completions", talk.id) for engine in fleet.engines))
    assert ask(fleet, abort, named("another"), process=1)["aborted"] == 0
    assert ask(fleet, abort, named("mine"), process=1)["aborted"] == 1
    reply = waiting.result().json()
    reason = reply["choices"][0]["finish_reason"] if "choices" in reply else reply["meta_info"]["finish_reason"]["type"]
    assert reason == "abort"
    [event] = second.known(talk.id).committed()
    assert event["finish_reason"] == "abort"


@pytest.mark.parametrize(("abort", "body"), [("/abort_request", {"abort_all": True}), ("/abort_requests", {})])
def test_all_generations_are_aborted(fleet: Fleet, abort: str, body: dict[str, Any]) -> None:
    talks = [api.talk(on_abort="return") for api in fleet.apis for _ in range(2)]
    turns = [speaking(fleet, talk, sim={"latency_s": SLOW_S}) for talk in talks]
    until_generating(fleet, *talks)
    # A client that has none in flight there says so on this route.
    assert ask(fleet, "/inference/v1/abort_requests", {"request_ids": []})["aborted"] == 0
    missing = fleet.apis[0].http.post("/inference/v1/abort_requests", json={})
    assert error_of(missing) == (400, "invalid_request")
    assert ask(fleet, abort, body)["aborted"] == 4
    assert [turn.result().json()["choices"][0]["finish_reason"] for turn in turns] == ["abort"] * 4


def test_what_is_meant_for_an_engines_ranks_is_refused_with_its_address(fleet: Fleet) -> None:
    for method, path in (
        *(("POST", "/init_weights_update_group"), ("POST", "/collective_rpc"), ("POST", "/sleep")),
        *(("GET", "/get_world_size"), ("GET", "/release_memory_occupation")),
    ):
        response = fleet.apis[0].http.request(method, path)
        assert error_of(response) == (400, "unsupported")
        assert all(engine.url in response.json()["error"]["message"] for engine in fleet.engines)
        assert not any(engine.seen(path) for engine in fleet.engines)
    assert fleet.apis[0].http.post("/start_profile", json={}).status_code == 404
