"""vLLM as it is run by trainers: one adapter's generations are ended alone, and rows have the engine's weight version.

Its replies name no version, as those of 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.interrupting import generating, latency, paused
from integration.places import Places
from integration.stand import HOURS, Stand, Talk, standing, until, user
from integration.tito import output_of
from integration.writing import Writing

NINE: dict[str, Any] = {"max_tokens": 16, "sim": {"completion_tokens": 9, "reasoning": False, "abort_at": [5]}}
COMPLETION: dict[str, Any] = {"model": "simulator", "prompt": "Once upon a time", **NINE}


@pytest.fixture(scope="module")
def vllms(places: Places) -> Iterator[Stand]:
    arguments = ("--seed", "13", "--dialect", "vllm", "--silent-versions", "--adapters", "math,code")
    with standing(places.new("vllm-engine"), *arguments, environment={"TURNLOG_ON_ABORT": "continue"}) as made:
        yield made


@pytest.fixture
def engine(vllms: Stand) -> Stand:
    """Nothing is left over at the engine, and it is known what it speaks."""
    assert vllms.sim.post("/sim/reset").status_code == 200
    until(lambda: vllms.http.get("/engines").json()["engines"][0]["dialect"] == "vllm")
    with paused(vllms):
        pass
    return vllms


def told(stand: Stand, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = stand.http.post(path, json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


def updated(stand: Stand, version: str) -> None:
    assert stand.sim.post("/update_weight_version", json={"new_version": version}).status_code == 200


def versions(talk: Talk) -> list[str]:
    """Those of the sampled tokens, each once, in order."""
    [row] = talk.rows()
    names = row["weight_version_names"]
    return list(dict.fromkeys(names[at] if names else str(at) for at in row["weight_versions"] if at >= 0))


SKYRL = ("/skyrl/v1/abort_lora_requests", "/skyrl/v1/resume_lora_requests", {"lora_name": "math"})
OWN = ("/adapters/math/pause", "/adapters/math/resume", {})


@pytest.mark.long
@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(("pause", "resume", "body"), [SKYRL, OWN], ids=["skyrl", "own"])
def test_a_paused_adapters_generation_is_ended_and_goes_on(
    engine: Stand, pause: str, resume: str, body: dict[str, str], route: str
) -> None:
    writing, other = Writing(engine, adapter="math"), Writing(engine, adapter="code")
    path, asked = writing.url, COMPLETION
    if route == "chat":
        path, asked = writing.chat_path, {"model": "simulator", "messages": [user("Once upon a time")], **NINE}
    latency(engine, HOURS)
    spared = engine.meanwhile(engine.http.post, other.url, json={**COMPLETION, "sim": {"latency_s": 1.0}})
    turn = engine.meanwhile(engine.http.post, path, json=asked)
    until(lambda: engine.stats()["started"] == 2)
    found = told(engine, pause, **body)
    assert (found["count"], len(found["aborted"])) == (1, 1)
    until(lambda: found["aborted"][0] not in engine.stats()["in_flight_rids"])
    assert not turn.done(), "what was cut waits at the gate"
    assert spared.result().json()["choices"][0]["finish_reason"] != "abort"
    latency(engine, 0.0)
    told(engine, resume, **body)
    assert len(output_of(turn.result().json())) == 9
    [committed] = writing.committed()
    assert [part[1:] for part in committed["parts"]] == [[0, 5], [5, 9]]
    requests = engine.engine_requests(writing.id, path.removeprefix(writing.path))
    seen = [one["headers"]["x-request-id"] for one in requests]
    assert seen == found["aborted"] * 2, "both parts have the id by which they are aborted, whatever the client sent"


def test_a_turn_has_the_version_that_the_engine_had_when_it_was_sent(engine: Stand) -> None:
    talk = engine.talk()
    talk.say("Hello")
    with paused(engine):
        updated(engine, "41")
    talk.say("And then?")
    assert [turn["dispatched"] for turn in talk.committed()] == ["default", "41"]
    assert versions(talk) == ["default", "41"]


def test_a_trainer_names_the_version_of_an_engine_that_cannot_say(engine: Stand) -> None:
    engine.sim.post("/sim/behaviour", json={"dev_mode": False, "pause": "ok"})
    talk = engine.talk()
    engine.http.post("/fleet/pause")
    engine.http.post("/fleet/resume", json={"version": "43"})
    assert engine.http.get("/fleet").json()["weight_version"] == "43"
    talk.say("Hello")
    engine.server.kill()
    engine.server.start()
    assert engine.http.get("/fleet").json()["weight_version"] == "43"
    assert talk.chat([*talk.messages, user("And then?")]).status_code == 200
    engine.http.post("/fleet/resume", json={"version": "44"})
    assert talk.chat([*talk.messages, user("And now?")]).status_code == 200
    engine.http.post("/fleet/pause")
    engine.http.post("/fleet/resume")
    talk.say("What now?")
    assert [turn.get("dispatched") for turn in talk.committed()] == ["43", "43", "44", None]
    assert engine.http.get("/fleet").json()["weight_version"] is None


def test_an_engine_without_the_route_is_named(engine: Stand) -> None:
    engine.sim.post("/sim/behaviour", json={"dev_mode": False})
    writing = Writing(engine, adapter="math")
    latency(engine, HOURS)
    turn = engine.meanwhile(engine.http.post, writing.url, json=COMPLETION)
    until(generating(engine))
    failed = told(engine, "/adapters/math/pause", 502)
    [one] = failed["engines"].values()
    assert (failed["error"]["code"], failed["paused"], one["ok"]) == ("engines_failed", True, False)
    assert "VLLM_SERVER_DEV_MODE=1" in one["error"]
    engine.sim.post("/sim/behaviour", json={"dev_mode": True})
    assert told(engine, "/adapters/math/pause")["count"] == 1
    latency(engine, 0.0)
    told(engine, "/adapters/math/resume")
    assert turn.result().status_code == 200
