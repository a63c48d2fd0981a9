"""`count_tokens` of Messages: what is counted is the prompt that the same request gets as a turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration.guarded import ADMIN, Guarded, bearer
from integration.places import Places
from integration.stand import Stand, error_of, serving, user
from ops.simulator.process import SimulatorProcess

COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "look", "description": "Looks — there", "input_schema": {"type": "object", "properties": {}}}
THINKING = {"type": "thinking", "thinking": "Where is it?", "signature": ""}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, "ü"]}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "There."}]}
BODY: dict[str, Any] = {
    "model": "simulator",
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [TOOL],
    "messages": [
        user("Look"),
        {"role": "assistant", "content": [THINKING, {"type": "text", "text": "So:"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
    ],
}


@pytest.fixture(scope="module", params=["stand", "vllm_stand", "tokenizer"])
def counting(
    request: pytest.FixtureRequest, places: Places, sglang: SimulatorProcess, vllm: SimulatorProcess, tokenizer: str
) -> Iterator[Stand]:
    engine = vllm if request.param == "vllm_stand" else sglang
    environment = {"TURNLOG_TOKENIZER": tokenizer} if request.param == "tokenizer" else {}
    with serving(places.new("counting"), engine.base_url, environment=environment) as made:
        assert made.sim.post("/sim/reset").status_code == 200
        yield made


@pytest.mark.parametrize("left_out", [(), ("system", "tools"), ("system",)])
def test_the_count_is_the_prompts(counting: Stand, left_out: tuple[str, ...]) -> None:
    talk = counting.talk("messages")
    body = {name: value for name, value in BODY.items() if name not in left_out}
    if "tools" in left_out:
        body["messages"] = [user("Look"), {"role": "assistant", "content": "So:"}, user("And?")]
    for path in (COUNT, talk.path + COUNT):
        counted = counting.http.post(path, json=body)
        assert counted.status_code == 200, counted.text
    assert talk.types() == ["SessionCreated"]
    usage = counting.http.post(talk.chat_path, json={**body, "max_tokens": 100}).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_what_cannot_be_counted_is_refused_in_the_protocols_shape(counting: Stand) -> None:
    talk = counting.talk()
    counting.http.delete(talk.path)
    for path, body, expected in (
        (f"/sessions/nobody{COUNT}", BODY, (404, "session_not_found")),
        (talk.path + COUNT, BODY, (404, "session_closed")),
        (COUNT, {**BODY, "messages": 7}, (400, "invalid_request")),
        (COUNT, [], (400, "invalid_request")),
    ):
        refused = counting.http.post(path, json=body)
        assert error_of(refused) == expected
        assert refused.json()["type"] == "error"


@pytest.mark.parametrize(
    ("outcome", "expected"), [("missing", (400, "unsupported")), ("refused", (400, 400)), ("error", (500, 500))]
)
def test_an_engine_that_does_not_count(stand: Stand, outcome: str, expected: tuple[int, Any]) -> None:
    stand.sim.post("/sim/behaviour", json={"count_tokens": outcome})
    refused = stand.http.post(COUNT, json=BODY)
    assert error_of(refused) == expected
    assert refused.json()["type"] == "error"
    assert ("TURNLOG_TOKENIZER" in refused.text) == (outcome == "missing")


def test_only_what_makes_the_prompt_reaches_the_engine(stand: Stand) -> None:
    """Some other fields would let a session's token do more than its turns may."""
    assert stand.http.post(COUNT, json={**BODY, "session_params": {"id": "x"}, "max_tokens": 7}).status_code == 200
    sent = stand.sim.get("/sim/requests", params={"last": 1}).json()[0]
    assert (sent["path"], set(sent["body"])) == (COUNT, set(BODY))


def test_errors_below_a_protocols_route_have_its_shape(guarded: Guarded) -> None:
    mine, admin = guarded.client(), bearer(ADMIN)
    for method, path, headers, expected in (
        ("POST", "/v1/messages", {}, (401, "unauthorized")),
        ("POST", "/v1/messages", {**admin, "x-api-key": mine.token}, (401, "unauthorized")),
        ("POST", "/v1/messages/batches", {"x-api-key": mine.token}, (403, "forbidden")),
        ("POST", f"/sessions/nobody{COUNT}", {"x-api-key": mine.token}, (404, "session_not_found")),
        ("GET", f"{mine.path}/v1/messages", {"x-api-key": mine.token}, (405, "method_not_allowed")),
        ("POST", f"{mine.path}/v1/v1/messages", admin, (404, "not_found")),
        ("POST", f"{mine.path}/v1/messages/batches", admin, (404, "not_found")),
    ):
        refused = guarded.stranger.request(method, path, headers=headers)
        assert error_of(refused) == expected
        reply = refused.json()
        assert (reply["type"], reply["request_id"]) == ("error", refused.headers["x-request-id"])
        assert refused.headers["request-id"] == refused.headers["x-request-id"]
        assert ("must not end in" in refused.text) == ("/v1/v1" in path)
