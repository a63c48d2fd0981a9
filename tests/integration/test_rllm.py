"""rLLM's gateway wire, as its own client speaks it (rllm_model_gateway 0.1.0): the same requests, by hand."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from integration.guarded import bearer, guarded_serving
from integration.places import Places
from integration.routing import EXPERTS
from integration.stand import CHAT, Stand, error_of, standing, user
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog

ON = {"TURNLOG_FEATURES": "all,rllm"}

SLASHES = "harbor/hello world:0"


@pytest.fixture(scope="module")
def gateway(places: Places) -> Iterator[Stand]:
    replay = {"TURNLOG_REPLAY": EXPERTS, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with standing(places.new("rllm"), "--seed", "21", environment=ON | replay) as made:
        yield made


class Rollout:
    """A session as rLLM's client and its agent see it. `replies` are the engine's, as the agent got them."""

    def __init__(self, stand: Stand, name: str = "") -> None:
        self.http = stand.http
        self.stand = stand
        self.name = name or f"task-{uuid.uuid4().hex[:8]}:0"
        self.path = f"/sessions/{quote(self.name)}"
        self.messages: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []

    def create(self, **body: Any) -> httpx.Response:
        return self.http.post("/sessions", json={"session_id": self.name, **body})

    def say(self, text: str, **fields: Any) -> None:
        self.messages.append(user(text))
        body = {"model": "simulator", "messages": self.messages, **fields}
        response = self.http.post(f"{self.path}{CHAT}", json=body)
        assert response.status_code == 200, response.text
        self.replies.append(response.json())
        self.messages.append(self.replies[-1]["choices"][0]["message"])

    def traces(self, **parameters: Any) -> list[dict[str, Any]]:
        response = self.http.get(f"{self.path}/traces", params=parameters)
        assert response.status_code == 200, response.text
        return list(response.json())

    def delete(self) -> int:
        response = self.http.delete(self.path)
        assert response.status_code == 200, response.text
        return int(response.json()["deleted"])


def sampled(reply: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """The prompt's ids, the output's, and its logprobs, as the engine told them."""
    [choice] = reply["choices"]
    pairs = choice["meta_info"]["output_token_logprobs"]
    return choice["prompt_token_ids"], [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs]


def of(trace: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    return trace["prompt_token_ids"], trace["completion_token_ids"], trace["logprobs"]


def test_traces_are_what_the_engine_sampled_over_a_kill(gateway: Stand) -> None:
    rollouts = [Rollout(gateway, name) for name in ("", SLASHES)]
    for rollout in rollouts:
        made = rollout.create(sampling_params={"temperature": 0.5, "logprobs": 1})
        assert (made.status_code, made.json()["session_id"]) == (200, rollout.name)
        rollout.say("What is 6 times 7?")
    gateway.server.kill()
    gateway.server.start()
    for rollout in rollouts:
        rollout.say("And times 2?")
        require_traces(gateway, rollout)


def require_traces(gateway: Stand, rollout: Rollout) -> None:
    assert gateway.http.post("/admin/flush").json() == {"status": "flushed"}
    traces = rollout.traces()
    assert [of(trace) for trace in traces] == [sampled(reply) for reply in rollout.replies]
    for place, trace in enumerate(traces):
        reply = rollout.replies[place]
        assert trace["session_id"] == rollout.name
        assert trace["model"] == "simulator"
        assert trace["messages"] == rollout.messages[: 2 * place + 1]
        assert trace["response_message"] == reply["choices"][0]["message"]
        assert trace["finish_reason"] == reply["choices"][0]["finish_reason"]
        assert trace["token_counts"] == {
            "prompt": reply["usage"]["prompt_tokens"],
            "completion": reply["usage"]["completion_tokens"],
        }
        assert trace["raw_request"]["temperature"] == 0.5
        assert trace["raw_response"]["id"] == reply["id"]
        assert trace["latency_ms"] > 0
        assert gateway.http.get(f"/traces/{trace['trace_id']}").json() == trace
    assert traces[0]["timestamp"] < traces[1]["timestamp"]
    assert rollout.traces(limit=1) == traces[:1]
    assert rollout.traces(since=traces[1]["timestamp"]) == traces[1:]
    queried = gateway.http.post("/traces/query", json={"session_ids": [rollout.name, "none"], "limit": 1})
    assert queried.json() == traces[:1]
    [row] = gateway.rows(session_id=traces[0]["metadata"]["turnlog_session_id"], shape="rllm", replay="true")
    without = {"raw_request": None, "raw_response": None}
    told = [{**trace, "session_id": row["session_id"], **without} for trace in traces]
    assert row["traces"] == told
    assert rollout.delete() == 2


def test_a_name_comes_again_after_its_deletion(gateway: Stand) -> None:
    """rLLM deletes a step's sessions together, and a failed one before it tries again."""
    rollouts = [Rollout(gateway), Rollout(gateway, "org/task:1")]
    for epoch in range(3):
        for rollout in rollouts:
            rollout.messages.clear()
            rollout.create(sampling_params={"temperature": 0.25 * (epoch + 1)})
            rollout.say(f"Epoch {epoch}")
            [trace] = rollout.traces()
            assert trace["messages"] == [user(f"Epoch {epoch}")]
            assert trace["raw_request"]["temperature"] == 0.25 * (epoch + 1)
            assert of(trace) == sampled(rollout.replies[-1])
        names = [rollout.name for rollout in rollouts]
        gone = gateway.http.post("/sessions/batch_delete", json={"session_ids": [*names, "never"]})
        assert gone.json() == {"deleted": 2}
        assert [rollout.traces() for rollout in rollouts] == [[], []]
        assert [rollout.delete() for rollout in rollouts] == [0, 0]
        assert gateway.http.get(f"/traces/{trace['trace_id']}").status_code == 404
        assert gateway.http.get(rollouts[0].path).status_code == 404
    rows = [row for row in gateway.rows() if row["messages"][0]["content"].startswith("Epoch")]
    assert len(rows) == 6  # nothing is lost: exports still have what was deleted


def test_a_sessions_parameters_override_those_of_the_request(gateway: Stand) -> None:
    rollout = Rollout(gateway)
    rollout.create()
    given = {"temperature": 0.125, "presence_penalty": 0.7, "top_k": -1, "logprobs": 1, "model": "mine"}
    assert rollout.create(sampling_params=given).status_code == 200  # nothing was generated yet
    rollout.say("hi", temperature=0.9, top_p=0.5)
    [trace] = rollout.traces()
    sent = trace["raw_request"]
    assert {name: sent[name] for name in ("temperature", "presence_penalty", "top_k", "top_p")} == {
        "temperature": 0.125,
        "presence_penalty": 0.7,
        "top_k": -1,
        "top_p": 0.5,
    }
    assert trace["model"] == sent["model"] == "mine"
    refused = rollout.create(sampling_params={"temperature": 1.0})
    assert (refused.status_code, list(refused.json())) == (409, ["error"])


def test_a_session_and_the_list_of_them(gateway: Stand) -> None:
    rollout, unused = Rollout(gateway, "listed/one:0"), Rollout(gateway)
    rollout.create(metadata={"prompt_idx": 42})
    unused.create()
    rollout.say("hi")
    info = gateway.http.get(rollout.path).json()
    assert (info["session_id"], info["trace_count"], info["metadata"]["prompt_idx"]) == (rollout.name, 1, 42)
    assert info["created_at"] > 0
    assert info["records"][0]["response"] == rollout.replies[0]
    listed = gateway.http.get("/sessions").json()
    [own] = [one for one in listed if one["session_id"] == rollout.name]
    assert own == {**own, "trace_count": 1, "metadata": {"prompt_idx": 42}}
    assert unused.name not in [one["session_id"] for one in listed]
    assert gateway.http.get("/sessions", params={"limit": 1}).json() == listed[:1]
    assert gateway.http.get("/sessions", params={"since": own["created_at"] + 3600}).json() == []
    with Turnlog(gateway.base_url) as turnlog:  # Turnlog's own client goes on reading its own list
        assert rollout.name.replace("/", "..2F") in [one["session_id"] for one in turnlog.sessions(limit=1000)]


def test_the_weight_version_is_that_of_the_turns_after_it(gateway: Stand) -> None:
    rollout = Rollout(gateway)
    rollout.say("before")
    assert rollout.traces()[0]["weight_version"] is None
    assert gateway.http.get("/admin/weight_version").json() == {"weight_version": None}
    for version in (7, 8):
        assert gateway.http.post("/admin/weight_version", json={"weight_version": version}).json() == {
            "weight_version": version
        }
        assert gateway.http.get("/admin/weight_version").json() == {"weight_version": version}
        rollout.say("after")
    assert [trace["weight_version"] for trace in rollout.traces()] == [None, 7, 8]
    assert gateway.http.post("/fleet/pause").status_code == 200
    assert gateway.http.post("/admin/weight_version", json={"weight_version": 9}).status_code == 200
    assert gateway.get("/fleet")["paused"]  # the trainer that paused it opens it
    assert gateway.http.post("/fleet/resume").status_code == 200


def test_workers_are_the_engines(gateway: Stand) -> None:
    [first] = gateway.get("/admin/workers")
    assert (first["url"], first["healthy"], first["api_path"]) == (str(gateway.sim.base_url), True, "/v1")
    with SimulatorProcess() as engine:
        added = gateway.http.post("/admin/workers", json={"url": f"{engine.base_url}/v1", "api_path": "/v1"}).json()
        assert added["url"] == engine.base_url
        assert added["worker_id"] in [one["worker_id"] for one in gateway.get("/admin/workers")]
        assert gateway.get("/health/workers")["total"] == 2
        removed = gateway.http.delete(f"/admin/workers/{added['worker_id']}")
        assert removed.json() == {"removed": added["worker_id"]}
    assert gateway.get("/admin/workers") == [first]
    assert gateway.http.post("/admin/reload").json() == {"status": "ok"}
    assert gateway.get("/health")["status"] == "ok"


ERRORS: list[tuple[str, str, Any, int, str]] = [
    *(("GET", path, None, 404, "error") for path in ("/sessions/none", "/sessions/none/at:all", "/traces/none.1")),
    *(("GET", path, None, 422, "detail") for path in ("/sessions/none/traces?since=soon", "/sessions?limit=few")),
    *(("POST", "/sessions", body, 400, "error") for body in ({"session_id": 7}, {"unknown": 1})),
    *(
        ("POST", "/sessions", {"sampling_params": {name: value}}, 400, "error")
        for name, value in (("messages", []), ("model", 7), ("seed", 2**80))
    ),
    ("POST", "/sessions/batch_delete", {"session_ids": "all"}, 400, "error"),
    *(("POST", "/admin/workers", body, 400, "error") for body in ({}, {"url": "http://h:9", "api_path": "/v2"})),
    ("DELETE", "/admin/workers/none", None, 404, "error"),
    *(
        ("POST", "/admin/weight_version", body, 400, "error")
        for body in ({}, {"weight_version": "abc"}, {"weight_version": -1})
    ),
]


def test_errors_have_the_gateways_shape(gateway: Stand) -> None:
    for method, path, body, status, field in ERRORS:
        response = gateway.http.request(method, path, json=body)
        assert (response.status_code, list(response.json())) == (status, [field]), response.text


def test_experts_are_told_as_rllms_trainer_for_verl_reads_them(gateway: Stand) -> None:
    rollout = Rollout(gateway)
    rollout.say("hi")
    [trace] = rollout.traces()
    header, text = trace["routing_matrices"]
    told = json.loads(header)
    experts = np.frombuffer(base64.b64decode(text), told["dtype"]).reshape(-1, *told["shape"])
    assert experts.tobytes() == gateway.http.get(f"{rollout.path}/turns/1/{EXPERTS}").content
    assert experts.shape == (sum(trace["token_counts"].values()) - 1, 4, 2)


@pytest.mark.threat("session token on an admin route")
def test_a_sessions_token_reads_its_own_traces_alone(places: Places, sglang: SimulatorProcess) -> None:
    with guarded_serving(places.new("rllm-guarded"), sglang.base_url, environment=ON) as guarded:
        mine, other = guarded.client(session_id="batch_delete"), guarded.client(session_id="other/one")
        assert mine.chat_at(mine.chat_path).status_code == 200
        assert len(mine.ask("GET", f"{mine.path}/traces").json()) == 1
        [trace] = guarded.admin.get(f"{mine.path}/traces").json()
        for method, path in (
            ("GET", "/sessions/other/one/traces"),
            ("GET", "/sessions/other..2Fone"),
            ("DELETE", "/sessions/other/one"),
            ("POST", f"/sessions/other/one{CHAT}"),
            ("POST", f"/sessions/batch_delete/x{CHAT}"),
            ("GET", "/sessions/batch_delete/x/traces"),
        ):
            assert mine.ask(method, path, json={"messages": [user("hi")]}).status_code == 404, path
        for method, path in (
            ("POST", "/sessions"),
            ("GET", "/sessions"),
            ("POST", "/sessions/batch_delete"),
            ("POST", "/traces/query"),
            ("GET", f"/traces/{trace['trace_id']}"),
            *(("POST", f"/admin/{route}") for route in ("workers", "flush", "reload", "weight_version")),
            *(("GET", path) for path in ("/admin/workers", "/admin/weight_version", "/health/workers")),
            ("DELETE", "/admin/workers/any"),
        ):
            assert mine.ask(method, path, json={"session_ids": [other.id]}).status_code == 403, path
            assert guarded.stranger.request(method, path).status_code == 401, path
        assert other.ask("GET", "/sessions/other/one/traces").json() == []
        assert httpx.get(f"{guarded.stand.base_url}/sessions/x/traces", headers=bearer("no")).status_code == 401
        assert mine.ask("DELETE", mine.path).json() == {"deleted": 1}


def test_the_first_request_makes_the_session_and_equal_requests_are_traces_of_their_own(gateway: Stand) -> None:
    rollout = Rollout(gateway)
    assert rollout.traces() == []
    for _ in range(3):
        rollout.messages.clear()
        rollout.say("hi")
    assert [of(trace) for trace in rollout.traces()] == [sampled(reply) for reply in rollout.replies]
    assert rollout.create().status_code == 200  # as it is
    rollout.say("more")
    assert [of(trace) for trace in rollout.traces()] == [sampled(reply) for reply in rollout.replies[2:]]  # superseded


def test_turnlogs_own_paths_stay_its_own(gateway: Stand) -> None:
    rollout = Rollout(gateway)
    rollout.say("hi")
    for part in ("events", "tree", "state", "messages"):
        assert gateway.http.get(f"{rollout.path}/{part}").status_code == 200
    assert gateway.http.get("/sessions", params={"count": "true"}).json()["sessions"]
    body = {"model": "simulator", "messages": rollout.messages}
    missing = gateway.http.post(f"{rollout.path}{CHAT}", params={"generation": 2}, json=body)
    assert error_of(missing) == (404, "session_not_found")
    assert gateway.http.put(f"{rollout.path}/reward", json={"reward": 1}).status_code == 200
    assert gateway.http.delete(f"{rollout.path}?erase=true").status_code == 204
    assert rollout.traces() == []


def test_names_are_those_of_the_run_in_the_header(gateway: Stand) -> None:
    """Two trainers call their tasks alike: to create, ask and delete in one run leaves the other's."""
    plain = Rollout(gateway)
    other = Rollout(gateway, plain.name)
    with httpx.Client(base_url=gateway.base_url, headers={"x-turnlog-run": "exp-1"}, timeout=20) as other.http:
        for rollout in (plain, other):
            assert rollout.create().json()["session_id"] == rollout.name
            rollout.say("Hello")
        assert other.create(group_id="more").status_code == 409
        other.say("More")
        assert [len(rollout.traces()) for rollout in (plain, other)] == [1, 2]
        query = other.http.post("/traces/query", json={"session_ids": [other.name]}).json()
        assert query == other.traces()
        assert other.delete() == 2
        assert [len(rollout.traces()) for rollout in (plain, other)] == [1, 0]
        assert other.create().status_code == 200
        body = {"session_ids": [other.name]}
        assert other.http.post("/sessions/batch_delete", json=body).json() == {"deleted": 0}
        plain.say("Still")
        assert len(plain.traces()) == 2
