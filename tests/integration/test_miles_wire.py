"""The requests of miles' drivers: what each generation sends, and what it reads of the reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from integration.interrupting import latency
from integration.places import Places
from integration.routing import BOTH
from integration.stand import HOURS, Stand, Talk, error_of, serving, user
from ops.server import VERBATIM
from ops.simulator.process import SimulatorProcess

SAMPLING = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
AGENT = {"reward": 0.75, "status": "solved", "version": "agent-1", "group_id": "mine", "attempt": "mine"}
GENERATION = "x-miles-session-generation"


@pytest.fixture(scope="module")
def replaying(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """Settings against which a session of the newer wire has its own way."""
    environment = {**BOTH, **VERBATIM, "TURNLOG_ON_ABORT": "return", "TURNLOG_SAMPLES_VERSIONS": "names"}
    with serving(places.new("miles"), sglang.base_url, environment=environment) as stand:
        yield stand


def samples_of(response: httpx.Response) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The arrays, and the JSON beside them."""
    assert response.status_code == 200, response.text
    tensors = safetensors.numpy.load(response.content)
    return tensors, json.loads(tensors.pop("_samples_meta").tobytes())


def collected(stand: Stand, talk: Talk, **body: Any) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    return samples_of(stand.http.post(f"{talk.path}/samples", json={"max_seq_len": None, **body}))


@pytest.mark.parametrize(
    ("protocol", "evaluation"),
    [("chat", {}), ("messages", {"evaluation": False}), ("chat", {"evaluation": True}), ("messages", {})],
)
def test_a_creations_sampling_fills_what_a_request_leaves_out(
    stand: Stand, protocol: str, evaluation: dict[str, Any]
) -> None:
    talk = stand.talk(protocol, **SAMPLING, **evaluation)
    talk.say("One")
    talk.say("Two", temperature=0.6, top_k=7)
    asked = [one["body"] for one in stand.engine_requests(talk.id)]
    assert [{name: body[name] for name in SAMPLING} for body in asked] == [SAMPLING, {**SAMPLING, "top_k": 7}]
    state = talk.state()["session"]
    assert (state["params"], state["params_mode"], state["evaluation"]) == (
        SAMPLING,
        "default",
        evaluation.get("evaluation"),
    )
    again = stand.http.post(
        "/sessions", json={"session_id": talk.id, "params": SAMPLING, "params_mode": "default", **evaluation}
    )
    assert again.status_code == 200, "it is the same session"


@pytest.mark.parametrize(
    ("given", "sent", "asked"),
    [
        ({"evaluation": False, "temperature": 1}, {"temperature": 1.0}, 1.0),
        ({"evaluation": False, "temperature": 0.6}, {"temperature": None}, 0.6),
        ({"evaluation": False, "temperature": 0.6}, {"temperature": 0.0}, None),
        ({"evaluation": False, "temperature": 0}, {"temperature": 0.6}, None),
        ({"evaluation": False, "params": {"temperature": 0.6}, "params_mode": "default"}, {"temperature": 1}, None),
        ({"evaluation": False, "top_p": 0.5}, {"temperature": 0.1}, 0.1),
        ({"evaluation": True, "temperature": 0.6}, {"temperature": 0.0}, 0.0),
        ({"temperature": 0.6}, {"temperature": 0.1}, 0.1),
    ],
)
def test_training_keeps_the_temperature_that_its_trainer_divides_by(
    stand: Stand, given: dict[str, Any], sent: dict[str, Any], asked: float | None
) -> None:
    talk = stand.talk(**given)
    response = talk.chat([user("Hello")], **sent)
    if asked is None:
        assert error_of(response) == (400, "invalid_request")
        assert response.json()["error"]["message"].startswith("temperature")
        assert (talk.types(), talk.generations()) == (["SessionCreated"], 0)
    else:
        assert response.status_code == 200, response.text
        [request] = stand.engine_requests(talk.id)
        assert request["body"]["temperature"] == asked


def test_what_is_no_sampling_is_400_and_makes_no_session(stand: Stand) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        *({"temperature": "0.6"}, {"temperature": 1e999}, {"top_p": [0.9]}, {"top_k": 20.5}, {"top_k": True}),
        *({"evaluation": 0}, {"top_k": 5, "params": {"seed": 1}}, {"top_k": 5, "params_mode": "refuse"}),
        {"top_k": 5, "params": {"top_k": 5}, "params_mode": "default"},
    )
    for given in wrong:
        response = stand.http.post("/sessions", content=json.dumps(given).replace("Infinity", "1e999"))
        assert error_of(response) == (400, "invalid_request")
        assert next(iter(given)) in response.json()["error"]["message"]


def test_an_evaluation_asks_for_no_replay_payloads_and_keeps_none(replaying: Stand) -> None:
    wishes = {"return_routed_experts": True, "return_indexer_topk": True, "return_sampling_mask": True}
    judged, trained = replaying.talk(evaluation=True), replaying.talk(evaluation=False)
    for talk in (judged, trained):
        talk.say("One", sim={"experts": {"unasked": True}})
        talk.say("Two", **(wishes if talk is judged else {}))
    asked = [one["body"] for one in replaying.engine_requests(judged.id)]
    assert not any(
        name.startswith(("return_routed", "return_indexer", "return_sampling", "routed"))
        for body in asked
        for name in body
    )
    assert all(one["body"]["return_routed_experts"] for one in replaying.engine_requests(trained.id))
    assert [turn.get("payloads") for turn in judged.committed()] == [None, None]
    nulls = ["rollout_indexer_topk", "rollout_routed_experts"]
    for talk, expected in ((judged, nulls), (trained, [])):
        tensors, meta = collected(replaying, talk)
        assert sorted(meta["samples"][0]["nulls"]) == expected
        [row] = talk.rows(evaluation=True)
        assert tensors["tokens.0"].tolist() == row["tokens"]
    assert judged.state()["records"][0]["response"]["choices"][0]["meta_info"]["routed_experts"] is None


@pytest.mark.parametrize(
    ("field", "evaluation"), [("input_ids", True), ("routed_experts_start_len", False), ("kv_transfer_params", False)]
)
def test_ids_and_rows_are_the_servers_to_set(replaying: Stand, field: str, evaluation: bool) -> None:
    talk = replaying.talk(evaluation=evaluation)
    values = {"input_ids": [1, 2], "routed_experts_start_len": 0, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    response = talk.chat([user("Hello")], **{field: values[field]})
    assert error_of(response) == (400, "invalid_request")
    assert field in response.json()["error"]["message"]
    assert (talk.types(), talk.generations()) == (["SessionCreated"], 0)
    assert talk.chat([user("Hello")], **{field: None}).status_code == 200
    other = replaying.talk()
    assert other.chat([user("Hello")], input_ids=[1, 2], routed_experts_start_len=0).status_code == 200


@pytest.mark.parametrize("evaluation", [{}, {"evaluation": False}, {"evaluation": True}])
def test_a_reply_of_the_newer_wire_has_what_was_asked_for(replaying: Stand, evaluation: dict[str, Any]) -> None:
    """At the address that an agent of miles asks: the session's own, without /v1."""
    talk = replaying.talk(**evaluation)
    for asked in ({}, {"logprobs": True}, {"return_meta_info": True}, {"return_token_ids": True}):
        body = talk.body([user(f"With {asked}")], **asked)
        [choice] = replaying.http.post(f"{talk.path}/chat/completions", json=body).json()["choices"]
        told = {name for name in ("logprobs", "meta_info", "token_ids") if choice.get(name) is not None}
        wanted = {name.removeprefix("return_") for name in asked}
        assert told == (wanted if evaluation else {"logprobs", "meta_info"})
    assert len(talk.committed()) == 4


@pytest.mark.parametrize(
    ("given", "status"), [({"evaluation": True}, 503), ({"evaluation": False, "on_abort": "return"}, 200), ({}, 200)]
)
def test_an_aborted_generation_is_recorded_nowhere(replaying: Stand, given: dict[str, Any], status: int) -> None:
    talk = replaying.talk(**given)
    response = talk.chat([user("Hello")], sim={"finish_reason": "abort"})
    assert response.status_code == status, response.text
    if status == 503:
        assert error_of(response) == (503, "generation_aborted")
        assert (talk.committed(), talk.rows()) == ([], [])
        talk.say("Hello")
        assert len(talk.committed()) == 1


@pytest.mark.parametrize("evaluation", [{}, {"evaluation": False}, {"evaluation": True}])
def test_weight_versions_are_spans_in_the_newer_wire(replaying: Stand, evaluation: dict[str, Any]) -> None:
    talk = replaying.talk(**evaluation)
    talk.say("One", sim={"weight_version": "4"})
    talk.say("Two", sim={"weight_versions": ["4", "5"]})
    [row] = talk.rows(evaluation=True)
    [sample] = collected(replaying, talk)[1]["samples"]
    if evaluation:
        spans = [span for call in sample["weight_versions"] for span in call]
        told = [span["version"] for span in spans for _ in range(span["abs_start"], span["abs_end"])]
        assert told == [str(version) for version in row["weight_versions"] if version >= 0]
        assert [len(call) for call in sample["weight_versions"]] == [1, 2]
    else:
        assert sample["weight_versions"] == ["4", "4", "5"]


@pytest.mark.parametrize(("given", "history"), [({}, "linear"), ({"evaluation": False}, "tree")])
def test_what_an_agent_returned_survives_its_driver(tito: Stand, history: str, given: dict[str, Any]) -> None:
    """Both drivers: one sends what the agent returned, the other writes `session_metadata` over it."""
    talk = tito.talk(history=history, attempt=3, group_id="g", **given)
    talk.say("One")
    _, meta = collected(tito, talk)
    assert meta["samples"][0]["reward"] is None
    tree = {"tree"} if history == "tree" else set()
    assert set(meta["session_metadata"]) == {"accumulated_token_ids", "max_trim_tokens", "tito_session_mismatch"} | tree
    sent = {**AGENT, "leaf": "mine", "tito_session_mismatch": "mine", "turnlog": "mine", "task": {"id": 2**70}}
    _, meta = collected(tito, talk, metadata=sent)
    [sample] = meta["samples"]
    assert sample["reward"] == 0.75
    own = {"tito_session_mismatch", "turnlog"} | ({"leaf"} if history == "tree" else set())
    assert {name: value for name, value in sample["metadata"].items() if name not in own} == {
        name: value for name, value in sent.items() if name not in own
    }
    assert (sample["metadata"]["tito_session_mismatch"], sample["metadata"]["turnlog"]["attempt"]) == ([], 3)
    assert meta["session_metadata"]["agent"] == sent
    assert {name: talk.state()["metadata"][name] for name in ("reward", "status", "group_id", "attempt")} == {
        "reward": 0.75,
        "status": "open",
        "group_id": "g",
        "attempt": 3,
    }
    assert [row["reward"] for row in talk.rows()] == [0.75]


def test_a_reward_that_put_reward_refuses_is_refused_here(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One")
    for reward in ("1", True, {"accuracy": 1.0}, [1], 1e39):
        response = stand.http.post(f"{talk.path}/samples", json={"metadata": {"reward": reward}})
        assert error_of(response) == (400, "invalid_request")
        assert "metadata.reward" in response.json()["error"]["message"]
    assert "RewardAssigned" not in talk.types()


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_finished_session_is_what_its_snapshot_names(stand: Stand, history: str) -> None:
    talk = stand.talk(history=history, evaluation=False)
    talk.say("One")
    latency(stand, 1.0)
    running = stand.meanwhile(talk.say, "Two", headers={"idempotency-key": "two"})
    stand.until_generating(talk, 2)
    soon = stand.http.post(f"{talk.path}/finish", json={"producer_finished": True, "timeout": 0}).json()
    assert (soon["complete"], soon["unfinished_requests"]) == (False, 1)
    _, meta = collected(stand, talk, snapshot_id=soon["snapshot_id"])
    assert (meta["samples"], meta["empty_reason"]) == ([], "incomplete")
    done = stand.http.post(f"{talk.path}/finish", json={"producer_finished": True}).json()
    assert done == {
        "snapshot_id": soon["snapshot_id"],
        "complete": True,
        "producer_finished": True,
        "unfinished_requests": 0,
    }
    latency(stand, 0.0)
    told = running.result().json()
    body = {**talk.body(talk.messages[:3])}
    again = stand.http.post(talk.chat_path, json=body, headers={"idempotency-key": "two"})
    assert again.json()["choices"][0]["message"] == told["choices"][0]["message"], "its reply is still to be had"
    refused = talk.chat([*talk.messages, user("Three")])
    assert (error_of(refused), refused.headers["x-should-retry"]) == ((409, "session_finished"), "false")
    for path, other in (("samples", {"snapshot_id": "another"}), ("finish", {"producer_finished": False})):
        assert error_of(stand.http.post(f"{talk.path}/{path}", json=other)) == (409, "session_finished")
    tensors, meta = collected(stand, talk, snapshot_id=done["snapshot_id"], metadata=AGENT)
    [row] = talk.rows()
    assert (tensors["tokens.0"].tolist(), meta["samples"][0]["reward"]) == (row["tokens"], 0.75)
    assert talk.types().count("SessionFinished") == 1
    assert stand.http.delete(talk.path).status_code == 204
    assert error_of(stand.http.post(f"{talk.path}/finish", json={"producer_finished": True})) == (404, "session_closed")


def test_an_agent_that_did_not_come_to_its_end_has_no_samples_but_its_rows(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One")
    finished = stand.http.post(f"{talk.path}/finish", json={"producer_finished": False}).json()
    assert (finished["complete"], finished["unfinished_requests"]) == (False, 0)
    _, meta = collected(stand, talk, snapshot_id=finished["snapshot_id"])
    assert (meta["samples"], meta["empty_reason"]) == ([], "incomplete")
    assert len(talk.rows()) == len(collected(stand, talk)[1]["samples"]) == 1
    for wrong in ({}, {"producer_finished": 1}, {"producer_finished": True, "timeout": -1}, {"finished": True}):
        assert error_of(stand.http.post(f"{talk.path}/finish", json=wrong)) == (400, "invalid_request")
    unfinished = stand.talk()
    assert error_of(stand.http.post(f"{unfinished.path}/samples", json={"snapshot_id": "x"})) == (
        409,
        "session_finished",
    )


def test_a_delete_closes_nothing_that_its_driver_has_not_seen(stand: Stand) -> None:
    talk = stand.talk(history="tree")

    def generation() -> str:
        return str(stand.http.post(f"{talk.path}/samples", json={}).headers[GENERATION])

    def delete(named: str) -> httpx.Response:
        return stand.http.delete(talk.path, headers={GENERATION: named})

    assert int(empty := generation()) > 0, "drivers take 0 for none"
    talk.say("One")
    assert error_of(delete(empty)) == (412, "session_changed")
    seen = generation()
    latency(stand, HOURS)
    running = stand.meanwhile(talk.chat, [*talk.messages, user("Two")])
    stand.until_generating(talk, 2)
    for named in (seen, during := generation()):
        assert error_of(delete(named)) == (412, "session_changed")
    assert stand.sim.post("/abort_request", json={"abort_all": True}).status_code == 200
    latency(stand, 0.0)
    assert running.result().status_code == 200
    assert error_of(delete(during)) == (412, "session_changed")
    for wrong in ("bad", "", "-1"):
        assert error_of(delete(wrong)) == (400, "invalid_request")
    current = generation()
    talk.noted(note="Seen")
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert "SessionClosed" not in talk.types()
    assert delete(current).status_code == 204, "what is said of it changes no sample"
    assert error_of(delete(current)) == (404, "session_closed")
    for _ in range(2):  # an erasure is asked for until it is done
        erased = stand.http.delete(f"{talk.path}?erase=true", headers={GENERATION: current})
        assert erased.status_code == 204
    assert error_of(stand.http.delete("/sessions/never-seen", headers={GENERATION: "1"})) == (404, "session_not_found")
