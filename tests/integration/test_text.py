"""Sessions that capture text alone, against a vendor's API in OpenAI's shape."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fault.verified import acknowledgement, verified

from app.export.formats import SHAPES
from integration.places import Places
from integration.stand import Stand, Talk, error_of, serving, tool_of, until, user
from ops.simulator.process import SimulatorProcess

KEY = "canary-key-of-a-vendor"

CALL = {"calls": [{"name": "look", "arguments": '{"at": 7}'}], "call_ids": ["call_7"]}

PINNED = {"seed": 7, "top_logprobs": 2}

ROLES = ["user", "assistant", "tool", "assistant", "user", "assistant"]

SENT = {"host", "content-type", "content-length", "accept-encoding", "authorization", "user-agent"}
"""All that an upstream is told in headers."""


@pytest.fixture(scope="module")
def vendor() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--dialect", "openai", "--api-key", KEY, "--seed", "5") as upstream:
        yield upstream


@pytest.fixture(scope="module")
def stand(sglang: SimulatorProcess, vendor: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server with an engine that has a key of its own, and upstreams of text; `sim` is the vendor."""
    upstreams = {
        "judge": {"url": f"{vendor.base_url}/v1/", "key_env": "KEY_OF_THE_JUDGE", "model": "large"},
        "stranger": {"url": vendor.base_url, "key": "canary-wrong-key", "model": "large"},
        "gone": "http://127.0.0.1:9",
        "local": {"url": sglang.base_url, "key": "Expected", "model": "simulator"},
    }
    environment = {
        "TURNLOG_TEXT_UPSTREAMS": json.dumps(upstreams),
        "KEY_OF_THE_JUDGE": KEY,
        "TURNLOG_UPSTREAM_API_KEY": "key-of-the-engines",
        "TURNLOG_FEATURES": "all",
        "TURNLOG_FILE_ROOT": tempfile.gettempdir(),
        # What is for engines must not hold up or change a turn of text.
        "TURNLOG_REPLAY": "routed_experts",
        "TURNLOG_ENGINE_SESSION_IDS": "true",
        "TURNLOG_STAGE_TOKENS_S": "1",
    }
    with serving(places.new("text"), sglang.base_url, environment=environment, engine_url=vendor.base_url) as made:
        yield made


def judge(stand: Stand, protocol: str = "chat", **body: Any) -> Talk:
    return stand.talk(protocol, **{"capture": "text", "upstream": "judge", **body})


def asked(url: str, path: str = "") -> list[dict[str, Any]]:
    return [one for one in httpx.get(f"{url}/sim/requests", params={"last": 256}).json() if path in one["path"]]


def messages_of(talk: Talk) -> list[list[str]]:
    """The texts of each row of the format `messages`."""
    return [[message["content"] for message in row["messages"]] for row in talk.rows(format="messages")]


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_a_session_in_each_protocol(
    stand: Stand, sglang: SimulatorProcess, vendor: SimulatorProcess, protocol: str, history: str
) -> None:
    assert stand.sim.post("/sim/reset").status_code == 200
    before = len(asked(sglang.base_url)), len(asked(vendor.base_url))
    talk = judge(stand, protocol, history=history, params=PINNED)
    key = {"idempotency-key": f"{protocol}-{history}", "authorization": "Bearer of-the-client", "traceparent": "00-1"}
    tools = [tool_of(protocol)]
    first = talk.say("Look", headers=key, tools=tools, sim=CALL)
    again = talk.chat([user("Look")], headers=key, tools=tools, sim=CALL)
    assert (again.headers["x-turnlog-replayed"], again.content) == ("true", first.content)
    call = {
        "chat": {"role": "tool", "tool_call_id": "call_7", "content": "seen"},
        "messages": {"role": "user", "content": [{"type": "tool_result", "content": "seen"}]},
        "responses": {"type": "function_call_output", "output": "seen"},
    }[protocol]
    if protocol == "messages":
        call["content"][0]["tool_use_id"] = first.json()["content"][-1]["id"]
    elif protocol == "responses":
        call["call_id"] = first.json()["output"][-1]["call_id"]
    second = talk.add(call, tools=tools, sim={"text": "It is 7", "reasoning": False})
    streamed = talk.chat([*talk.messages, user("Sure?")], stream=True, sim={"text": "Certainly", "reasoning": False})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert "Certainly" in streamed.text
    # The vendor was asked for three turns and told nothing but these; the engine was not asked at all.
    requests = asked(vendor.base_url)[before[1] :]
    assert [request["path"] for request in requests] == ["/v1/chat/completions"] * 3
    for request in requests:
        assert set(request["headers"]) == SENT
        assert request["headers"]["authorization"] == f"Bearer {KEY}"
        needed = {"max_tokens"} if protocol == "messages" else set[str]()
        assert set(request["body"]) - {"tools"} == {"model", "messages", "sim", *PINNED, *needed}
        assert (request["body"]["model"], request["body"]["seed"]) == ("large", 7)
    assert len(asked(sglang.base_url)) == before[0]
    state = talk.state()
    if protocol == "chat":
        assert [record["response"] for record in state["records"]][:2] == [first.json(), second.json()]
    assert [record["request"]["messages"] for record in state["records"]] == [
        request["body"]["messages"] for request in requests
    ]
    assert state["metadata"]["accumulated_token_ids"] == []
    assert {name: state["session"][name] for name in ("capture", "upstream", "model")} == {
        "capture": "text",
        "upstream": "judge",
        "model": "large",
    }
    assert KEY not in json.dumps(state)
    assert not any(event["type"] == "AffinityBound" for event in talk.events())
    usage = [record["response"]["usage"] for record in state["records"]]
    assert [(turn["engine"], turn["suffix_tokens"], turn["output_tokens"]) for turn in talk.committed()] == [
        ("judge", used["prompt_tokens"], used["completion_tokens"]) for used in usage
    ]
    [row] = talk.rows(format="messages")
    assert [message["role"] for message in row["messages"]] == ROLES
    [trajectory] = talk.rows(format="atif")
    metrics = [step["metrics"] for step in trajectory["steps"] if step["source"] == "agent"]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in metrics] == [
        (used["prompt_tokens"], used["completion_tokens"]) for used in usage
    ]
    assert all(set(one) <= {"prompt_tokens", "completion_tokens", "cached_tokens"} for one in metrics)
    verified(stand)


def test_where_its_rows_are(stand: Stand) -> None:
    """A tree with two branches, its fork, a linear session that went back; none of them in a shape with tokens."""
    tree = judge(stand, history="tree", group_id="texts")
    tree.say("Begin", sim={"text": "Begun", "reasoning": False})
    begun = list(tree.messages)
    tree.say("left", sim={"text": "Left", "reasoning": False})
    tree.messages = begun
    tree.say("right", sim={"text": "Right", "reasoning": False})
    paths = [["Begin", "Begun", "left", "Left"], ["Begin", "Begun", "right", "Right"]]
    assert messages_of(tree) == paths
    turns = tree.tree()["turns"]
    assert [(turn["parent"], turn["branch"], turn["cause"], turn["reason"]) for turn in turns] == [
        (0, 0, "start", "text_only"),
        (1, 0, None, "text_only"),
        (1, 1, "fork", "text_only"),
    ]
    [forked] = stand.http.post(f"{tree.path}/fork", json={"turn": 2}).json()["sessions"]
    fork = stand.known(forked["session_id"])
    assert messages_of(fork) == []  # its copied turns are in the tree's rows
    fork.messages = [*begun, user("left"), {"role": "assistant", "content": "Left"}]
    fork.say("on", sim={"text": "On", "reasoning": False})
    assert messages_of(fork) == [[*paths[0], "on", "On"]]
    linear = judge(stand, history="linear", group_id="texts")
    linear.say("Begin", sim={"text": "Wrong", "reasoning": False})
    linear.messages = []
    linear.say("Begin", sim={"text": "Better", "reasoning": False})
    assert messages_of(linear) == [["Begin", "Better"]]
    for shape in SHAPES:
        of_group = {"group_id": "texts"} if shape == "atropos" else {}
        for talk in (tree, fork, linear):
            rows = talk.rows(shape=shape, explain=True, **of_group)
            assert {row["excluded"] for row in rows} & {"text_only"} or shape == "atropos", rows
            assert talk.rows(shape=shape) == []
    [explained] = linear.rows(explain=True)
    assert (explained["excluded"], explained["turn"]) == ("text_only", None)
    said = f"{linear.path}/turns/1/annotations"
    assert stand.http.put(f"{said}/right", json={"value": True}).status_code == 200
    column = {"values": [0.5] * linear.committed()[0]["output_tokens"], "over": "output"}
    assert error_of(stand.http.put(f"{said}/scores", json=column)) == (400, "invalid_request")
    samples = stand.http.post(f"{tree.path}/samples").content
    assert b'"samples":[]' in samples
    assert b'"empty_reason":"text_only"' in samples
    tokens = stand.get(f"/ui/api/sessions/{tree.id}/tokens")
    assert tokens["error"] == 'this session was created with capture "text": it has no tokens'
    assert stand.get(f"/ui/api/sessions/{tree.id}")["turns"][0]["output_tokens"] > 0
    assert [hit["session_id"] for hit in stand.get("/search", q="Better")["hits"]] == [linear.id]
    verified(stand)


def test_a_judge_leaves_its_group_whole(stand: Stand) -> None:
    """A rollout with a judge of text below it counts the rows that are in the shape; one that is text is missing."""
    for attempt in range(2):
        root = stand.talk(group_id="judged", attempt=attempt)
        root.say("Solve it")
        judge(stand, parent_session_id=root.id).say("Is it right?")
        assert stand.http.put(f"{root.path}/reward", json={"reward": attempt}).status_code == 200
        assert stand.http.delete(root.path).status_code == 204
    rows = stand.rows(group_id="judged")
    assert [(row["attempt"], row["rollout_rows"]) for row in rows] == [(0, 1), (1, 1)]
    assert [row["rollout_rows"] for row in stand.rows(group_id="judged", format="messages")] == [2] * 4
    [group] = stand.rows(group_id="judged", shape="atropos", advantage="grpo")
    assert len(group["tokens"]) == 2
    lonely = judge(stand, group_id="judged", attempt=2)
    lonely.say("I am a rollout")
    assert stand.http.put(f"{lonely.path}/reward", json={"reward": 1}).status_code == 200
    assert stand.http.delete(lonely.path).status_code == 204
    left_out, *_ = stand.rows(group_id="judged", shape="atropos", explain=True)
    assert left_out["excluded"] == f"a session of the group is left out: {lonely.id}: text_only"


def test_text_completions(stand: Stand) -> None:
    talk = judge(stand)
    path = f"{talk.path}/v1/completions"
    first = stand.http.post(path, json={"prompt": "Once", "sim": {"text": " upon"}})
    assert (first.status_code, first.json()["choices"][0]["text"]) == (200, " upon")
    second = stand.http.post(path, json={"prompt": "Once upon a", "sim": {"text": " time"}})
    assert second.status_code == 200
    assert messages_of(talk) == [["Once", " upon", " a", " time"]]
    assert error_of(stand.http.post(path, json={"prompt": [1, 2]})) == (400, "unsupported")


def test_what_else_a_session_can_do(stand: Stand, tmp_path: Path) -> None:
    talk = judge(stand)
    talk.say("Hello")
    assert stand.get(f"{talk.path}/v1/models")["data"][0]["id"] == "large"
    count = {"model": "any", "messages": [user("Hello")]}
    assert error_of(stand.http.post(f"{talk.path}/v1/messages/count_tokens", json=count))[0] == 400
    assert error_of(talk.chat([user("Hello")], input_ids=[1])) == (400, "unsupported")
    # A shut gate is of engines.
    assert stand.http.post("/fleet/pause").status_code == 200
    try:
        talk.say("Nobody holds me back")
    finally:
        assert stand.http.post("/fleet/resume").status_code == 200
    # The agents of a linear session have sessions of their own, of its kind.
    lines = judge(stand, session_id="lines", history="linear")
    lines.say("Hello")
    headers = {"x-claude-code-session-id": "lines", "x-claude-code-agent-id": "helper"}
    body = {"model": "any", "messages": [user("Help")], "max_tokens": 100}
    assert stand.http.post("/v1/messages", json=body, headers=headers).status_code == 200
    assert stand.known("lines:helper").state()["session"]["upstream"] == "judge"
    assert stand.http.post("/checkpoints", json={"name": "text"}).status_code == 200
    talk.say("Later")
    assert stand.http.post("/checkpoints/text/restore").status_code == 200
    assert len(talk.state()["records"]) == 2
    assert stand.http.delete("/checkpoints/text").status_code == 204
    left = judge(stand)
    left.say("I leave")
    assert stand.http.put(f"{left.path}/reward", json={"reward": 0.5}).status_code == 200
    assert stand.http.delete(left.path).status_code == 204
    before, events = messages_of(left), left.events()
    step = stand.http.post("/archives", json={"to": tmp_path.as_uri(), "older_than_s": 0}).json()
    assert error_of(stand.http.get(left.path)) == (404, "session_archived"), step
    assert stand.http.post("/archives/import", json={"file": step["file"]}).json()["imported"] == step["archived"]
    assert (messages_of(left), left.events()) == (before, events)
    verified(stand)
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert talk.rows(format="messages") == []


def test_a_close_ends_the_generation(stand: Stand, sglang: SimulatorProcess, vendor: SimulatorProcess) -> None:
    """By hanging up: no engine is told to abort it."""
    before = asked(sglang.base_url, "/abort_request")
    seen = len(asked(vendor.base_url))
    talk = judge(stand)
    answer = stand.meanwhile(talk.chat, [user("Take your time")], sim={"latency_s": 3600})
    until(lambda: len(asked(vendor.base_url)) > seen)
    assert stand.http.delete(talk.path).status_code == 204
    assert error_of(answer.result()) == (404, "session_closed")
    until(lambda: stand.stats()["disconnected"] > 0)
    assert asked(sglang.base_url, "/abort_request") == before


def test_limits_count_what_the_vendor_says(stand: Stand) -> None:
    """A reply without `usage` counts as no tokens; it is a turn all the same."""
    talk = judge(stand, limits={"tokens": 20, "turns": 3}, on_limit="length")
    talk.say("One", sim={"completion_tokens": 12, "reasoning": False})
    assert asked(str(stand.sim.base_url))[-1]["body"]["max_tokens"] == 20  # the client gave none
    talk.say("Two", sim={"completion_tokens": 9, "reasoning": False, "fault": "no_usage"}, max_completion_tokens=9)
    body = asked(str(stand.sim.base_url))[-1]["body"]
    assert (body["max_completion_tokens"], "max_tokens" in body) == (8, False)
    [told] = talk.state()["session"]["budgets"]
    assert (told["used"]["tokens"], told["left"], told["in_flight"]["tokens"]) == (12, {"tokens": 8, "turns": 1}, 0)
    cut = talk.say("Three", sim={"completion_tokens": 30, "reasoning": False})
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert talk.committed()[-1]["limit"] == "tokens"
    [row] = talk.rows(format="messages")
    assert row["status"] == "truncated"
    assert error_of(talk.chat([*talk.messages, user("Four")])) == (409, "over_budget")
    late = judge(stand, limits={"seconds": 0.5})
    assert error_of(late.chat([user("One")], sim={"latency_s": 3600})) == (409, "over_budget")
    tight = judge(stand, limits={"tokens": 5})
    assert error_of(tight.chat([user("One")], sim={"completion_tokens": 9, "reasoning": False})) == (409, "over_budget")
    assert tight.state()["session"]["budgets"][0]["used"]["tokens"] == 5


FAULTS = {
    **dict.fromkeys(
        (
            *("empty_200", "not_json", "truncated_json", "bad_utf8", "not_object", "no_choices"),
            *("two_choices", "message_null", "duplicate_choices", "deep_nesting"),
        ),
        (502, "upstream_invalid"),
    ),
    "error_200": (500, 500),
    "finish_error": (502, 502),
    "status_429": (429, 429),
    "status_500": (500, 500),
    "redirect": (502, "upstream_invalid"),
    "reset": (502, "upstream_unreachable"),
}


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_a_vendor_that_fails(stand: Stand, protocol: str) -> None:
    talk = judge(stand, protocol)
    for fault, (status, code) in FAULTS.items():
        reply = talk.chat([user("Hello")], sim={"fault": fault})
        assert reply.status_code == status, (fault, reply.text)
        if protocol == "chat":
            assert reply.json().get("error", reply.json())["code"] == code
        assert reply.headers.get("retry-after") == ("1" if fault == "status_429" else None)
        assert "openai-organization" not in reply.headers
        if fault in ("error_200", "finish_error"):
            assert "simulated" in reply.text  # The vendor's own reason, which a retry may mend.
            assert "x-should-retry" not in reply.headers
    unknown = talk.chat([user("Hello")], sim={}, nonsense=1)
    assert (unknown.status_code, "nonsense" in unknown.text) == (400, True)
    assert talk.committed() == []
    echoed = talk.say("Hello", sim={"text": f"Your key is {KEY}", "reasoning": False})
    assert KEY not in echoed.text
    assert "Your key is (hidden)" in echoed.text
    strangers = judge(stand, protocol, upstream="stranger")
    refused = strangers.chat([user("Hello")])
    assert (refused.status_code, refused.headers["x-should-retry"]) == (502, "false")
    assert "www-authenticate" not in refused.headers
    assert "canary" not in refused.text
    assert strangers.events()[-1]["reason"] == "upstream_unauthorized"
    nobody = judge(stand, protocol, upstream="gone", model="any").chat([user("Hello")])
    assert nobody.status_code == 502
    assert KEY not in stand.server.log_path.read_text()


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_a_key_that_is_a_word_is_hidden_in_errors_alone(stand: Stand, protocol: str) -> None:
    talk = judge(stand, protocol, upstream="local")
    text = "As Expected"
    call = {"name": "look", "arguments": '{"at": "Expected"}'}
    reply = talk.say("Hello", tools=[tool_of(protocol)], sim={"text": text, "reasoning": False, "calls": [call]})
    assert reply.text.count("Expected") == 2
    [row] = talk.rows(format="messages")
    message = row["messages"][-1]
    assert message["content"] == text
    assert message["tool_calls"][0]["function"]["arguments"] == call["arguments"]
    refused = judge(stand, upstream="local").chat([user("Hello")], temperature="hot")
    assert refused.status_code == 400
    assert "(hidden) `float | null`, got `str`" in refused.text


REFUSED = (
    ({"capture": "text"}, 400, "upstream must be one of gone, judge, local, stranger"),
    ({"capture": "text", "upstream": "nobody"}, 400, "upstream must be one of"),
    ({"capture": "text", "upstream": "gone"}, 400, "model is missing"),
    ({"capture": "text", "upstream": "judge", "adapter": "one"}, 400, "adapter requires capture"),
    ({"upstream": "judge"}, 400, "upstream requires capture"),
    ({"capture": "sound"}, 400, "capture"),
)


def test_a_wrong_session_is_refused(stand: Stand) -> None:
    for body, status, told in REFUSED:
        reply = stand.http.post("/sessions", json=body)
        assert (reply.status_code, told in reply.text) == (status, True), (body, reply.text)


def test_without_its_upstream_a_session_stays_readable(vendor: SimulatorProcess, places: Places) -> None:
    place = places.new("upstream-gone")
    environment = {"TURNLOG_TEXT_UPSTREAMS": json.dumps({"judge": {"url": vendor.base_url, "key": KEY, "model": "m"}})}
    with serving(place, environment=environment) as stand:
        until(lambda: stand.http.get("/ready").status_code == 200)
        talk = judge(stand, session_id="kept")
        key = {"idempotency-key": "once"}
        first = talk.say("Hello", headers=key)
        seen = acknowledgement("kept", first)
    for settings in (
        {},
        {**environment, "TURNLOG_FEATURES": "forks"},
        {"TURNLOG_TEXT_UPSTREAMS": '{"other": "http://x:1"}'},
    ):
        with serving(place, environment=settings) as stand:
            again = stand.known("kept")
            assert again.chat([user("Hello")], headers=key).content == first.content
            assert error_of(again.chat([*talk.messages, user("More")])) == (503, "no_upstream")
            assert len(again.rows(format="messages")) == 1
            created = stand.http.post("/sessions", json={"capture": "text", "upstream": "judge", "model": "m"})
            assert created.status_code == 400
            verified(stand, [seen])


def test_a_session_for_training_does_not_become_text(stand: Stand, vendor: SimulatorProcess) -> None:
    """An engine that loses the ids is refused, also beside upstreams of text."""
    before = len(asked(vendor.base_url))
    talk = stand.talk()
    assert error_of(talk.chat([user("Hello")], sim={"fault": "missing_meta_info"})) == (502, "upstream_invalid")
    assert (talk.committed(), len(asked(vendor.base_url))) == ([], before)
