"""One turn in four spellings: sessions, retries, streams and errors are the same in each protocol."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.protocols.registry import ROUTES
from integration.stand import Message, Stand, Talk, error_of, tool_of, user
from integration.tito import require_consistent

OTHERS = ("messages", "responses")
PLAIN = {"tool_calls": False, "reasoning": False}
CALLS = [{"name": "look", "arguments": '{"at": 1e3,  "b":"ü"}'}, {"name": "look", "arguments": "{}"}]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def answered(protocol: str, reply: dict[str, Any]) -> list[Message]:
    """The history after a reply's tool calls were answered."""
    if protocol == "messages":
        calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
        return [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "Seen"} for id in calls]}
        ]
    calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": id, "output": "Seen"} for id in calls]


def test_one_session_goes_on_in_any_protocol(stand: Stand) -> None:
    session = stand.talk(history="tree")
    history: list[Message] = []
    for protocol in ("chat", "messages", "responses", "messages", "chat"):
        talk = stand.known(session.id, protocol)
        history.append(user(f"In {protocol}"))
        response = talk.chat(history, sim=PLAIN)
        assert response.status_code == 200, response.text
        [message] = talk.spoken.added(response.json())
        content = message["content"]
        history.append({"role": "assistant", "content": content if isinstance(content, str) else content[0]["text"]})
    [row] = session.rows()
    assert [span["turn"] for span in row["turns"]] == [1, 2, 3, 4, 5]
    assert [message["content"] for message in row["messages"]] == [message["content"] for message in history]
    assert [record["protocol"] for record in session.state()["records"]] == [
        "chat",
        "messages",
        "responses",
        "messages",
        "chat",
    ]


@pytest.mark.parametrize("protocol", OTHERS)
def test_calls_and_reasoning_come_back_as_they_were_sampled(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol)
    tools = [tool_of(protocol)]
    first = talk.say("Look twice", tools=tools, sim={"calls": CALLS, "reasoning": True, "text": "So: "}).json()
    talk.messages += answered(protocol, first)
    talk.say("And?", tools=tools, sim=PLAIN)
    [row] = talk.rows()
    assert ([span["turn"] for span in row["turns"]], row["branch_cause"]) == ([1, 2], "start")
    sent = talk.state()["records"][1]["request"]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert [call["function"]["arguments"] for call in sent[1]["tool_calls"]] == [call["arguments"] for call in CALLS]
    assert sent[1]["reasoning_content"]


TURNS = [(route.removeprefix("/v1"), protocol) for route, protocol in ROUTES.items() if route.startswith("/v1/")]


def test_below_a_session_v1_may_be_left_out(stand: Stand) -> None:
    """Which is where a client asks whose base URL is the session's address."""
    talk = stand.talk(history="tree")
    for path, protocol in TURNS:
        for streams in ({}, {"stream": True}) if protocol.name != "compaction" else ({},):
            again = {"idempotency-key": f"{path} {streams}"}
            body = {**protocol.example, **streams}
            short, long = (stand.http.post(f"{talk.path}{v1}{path}", json=body, headers=again) for v1 in ("", "/v1"))
            assert (short.status_code, "x-turnlog-replayed" in short.headers) == (200, False), short.text
            assert (long.content, long.headers["x-turnlog-replayed"]) == (short.content, "true")
            unknown = [stand.http.post(f"/sessions/none{v1}{path}", json=body) for v1 in ("", "/v1")]
            assert {shape_of(protocol.name, reply) for reply in unknown} == {shape_of(protocol.name, unknown[0])}
            assert unknown[0].status_code == 404
        assert error_of(stand.http.put(f"{talk.path}{path}")) == (405, "method_not_allowed")
    answer = stand.http.post(
        f"{talk.path}/responses", json={**ROUTES["/v1/responses"].example, "input": "Again"}
    ).json()
    paths = ("/models", "/models/simulator", f"/responses/{answer['id']}", f"/responses/{answer['id']}/input_items")
    for path in paths:
        assert stand.get(f"{talk.path}{path}") == stand.get(f"{talk.path}/v1{path}") != {}
    counted = [
        stand.http.post(f"{talk.path}{v1}/messages/count_tokens", json=ROUTES["/v1/messages"].example)
        for v1 in ("", "/v1")
    ]
    assert counted[0].json() == counted[1].json()
    assert stand.get(f"{talk.path}/messages")["messages"]  # the conversation, as ever
    assert stand.http.post("/chat/completions", json={}).status_code == 404


def shape_of(protocol: str, response: httpx.Response) -> tuple[Any, ...]:
    body = response.json()
    if protocol == "messages":
        assert (body["type"], body["request_id"]) == ("error", response.headers["x-request-id"])
    error = body["error"]
    return response.status_code, error["type"], error["code"]


def test_errors_have_the_protocols_shape(stand: Stand) -> None:
    linear = {protocol: stand.talk(protocol, history="linear") for protocol in OTHERS}
    for protocol, talk in linear.items():
        invalid = "invalid_request_error"
        missing = "not_found_error" if protocol == "messages" else invalid
        nobody = stand.known("nobody", protocol)
        assert shape_of(protocol, nobody.chat([user("x")])) == (404, missing, "session_not_found")
        bad = stand.http.post(talk.chat_path, content=b"[]")
        assert shape_of(protocol, bad) == (400, invalid, "invalid_request")
        talk.say("One", sim=PLAIN)
        assert shape_of(protocol, talk.chat([user("Else")]))[::2] == (400, "history_mismatch")
        fault = {"fault": {"fault": "status_429", "retry_after": "7"}}
        slow_down = talk.chat([*talk.messages, user("Two")], sim=fault)
        assert slow_down.status_code == 429
        assert slow_down.headers["retry-after"] == "7"
        assert slow_down.json()["error"]["message"]
    busy = linear["messages"]
    call = stand.meanwhile(busy.chat, [*busy.messages, user("Two")], sim={"latency_s": 60})
    stand.until_generating(busy, 3)
    refused = busy.chat([*busy.messages, user("Three")])
    assert shape_of("messages", refused) == (409, "invalid_request_error", "session_busy")
    assert refused.headers["x-should-retry"] == "false"
    assert stand.http.delete(busy.path).status_code == 204
    assert shape_of("messages", call.result()) == (404, "not_found_error", "session_closed")


@pytest.mark.parametrize("protocol", OTHERS)
def test_a_stream_is_kept_alive_and_ends_as_its_protocol_does(tight: Stand, stand: Stand, protocol: str) -> None:
    talk = tight.talk(protocol)
    last = {"messages": "message_stop", "responses": "response.completed"}[protocol]
    failed = {"messages": "error", "responses": "response.failed"}[protocol]
    alive = {"messages": "event: ping", "responses": ": keep-alive"}[protocol]
    whole = talk.chat([user("One")], stream=True, sim={**PLAIN, "latency_s": 0.5})
    assert whole.text.startswith(alive)
    assert events_of(whole)[-1]["type"] == last
    broken = talk.chat([user("Two")], stream=True, sim={"latency_s": 0.5, "fault": "status_503"})
    assert (broken.status_code, broken.text.startswith(alive)) == (200, True)
    assert events_of(broken)[-1]["type"] == failed
    assert len(talk.committed()) == 1
    at_once = stand.talk(protocol).chat([user("One")], stream=True, sim={"fault": "status_503"})
    assert at_once.status_code == 503


PREFILL: dict[str, dict[str, Any]] = {
    "chat": {"continue_final_message": True, "add_generation_prompt": False},
    "messages": {},
    "responses": {},
}


@pytest.mark.parametrize(
    ("protocol", "history"), [("chat", "linear"), ("chat", "tree"), ("messages", "tree"), ("responses", "linear")]
)
def test_a_reply_that_its_client_begins_is_one_message_with_the_rest(stand: Stand, protocol: str, history: str) -> None:
    talk = stand.talk(protocol, history=history)
    talk.say("One", sim=PLAIN)
    asked, begun = [*talk.messages, user("Sun?")], {"role": "assistant", "content": "The best answer is ("}
    item = {**begun, "type": "message", "status": "in_progress"} if protocol == "responses" else begun
    sim, key = {**PLAIN, "text": "B) Helios"}, {"idempotency-key": history}
    first = talk.chat([*asked, item], headers=key, sim=sim, **PREFILL[protocol])
    assert first.status_code == 200, first.text
    assert "B) Helios" in first.text
    assert begun["content"] not in first.text
    again = talk.chat([*asked, item], headers=key, sim=sim, **PREFILL[protocol])
    assert (again.headers["x-turnlog-replayed"], again.content) == ("true", first.content)
    # What the engine was sent, and is told of it later.
    request = talk.state()["records"][1]["request"]
    assert request["messages"][-1] == begun
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    # The client sends back the whole message, or what came of it.
    for sent in ("The best answer is (B) Helios", "B) Helios"):
        after = talk.chat([*asked, {"role": "assistant", "content": sent}, user("Sure?")], sim=PLAIN)
        assert after.status_code == 200, after.text
    assert [turn["parent"] for turn in talk.tree()["turns"] if turn["turn"] > 1] == [
        1,
        *[2] * (len(talk.tree()["turns"]) - 2),
    ]
    for row in talk.rows():
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 3
        assert row["messages"][3]["content"] == "The best answer is (B) Helios"
        # The beginning is the prompt's, and no token of it is in the loss.
        spans = [(turn["output_start"], turn["end"]) for turn in row["turns"]]
        assert [sum(row["loss_mask"][start:end]) for start, end in spans][1] in (0, spans[1][1] - spans[1][0])
        assert sum(row["sampled_mask"]) == sum(end - start for start, end in spans)


def follow(talk: Talk, text: str, before: str | None, **fields: Any) -> dict[str, Any]:
    body = {"model": "simulator", "input": text, "previous_response_id": before, "sim": PLAIN, **fields}
    response = talk._stand.http.post(talk.chat_path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_response_id_names_its_turn_also_after_a_restart(mortal: Stand) -> None:
    talk = mortal.talk("responses")
    first = follow(talk, "One", None, instructions="Be brief")
    second = follow(talk, "Two", first["id"], instructions="Be brief")
    other = follow(talk, "Else", first["id"], instructions="Be long")
    hidden = follow(talk, "Three", second["id"], instructions="Be brief", store=False)
    mortal.server.kill()
    mortal.server.start()
    follow(talk, "Four", hidden["id"], instructions="Be brief")
    assert [turn["parent"] for turn in talk.tree()["turns"]] == [0, 1, 0, 2, 4]
    path = talk.chat_path
    assert mortal.http.get(f"{path}/{second['id']}").json() == second
    listed = mortal.http.get(f"{path}/{second['id']}/input_items", params={"order": "asc"}).json()
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    for lost in (hidden["id"], "resp_1_" + "0" * 24, "resp_else"):
        assert mortal.http.get(f"{path}/{lost}").status_code == 404
    unknown = mortal.http.post(path, json={"model": "m", "input": "x", "previous_response_id": "resp_9_" + "0" * 24})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert other["id"] != second["id"]


@pytest.mark.parametrize("protocol", OTHERS)
def test_prompts_are_ids_whatever_the_protocol(tito: Stand, protocol: str) -> None:
    """With system text first and in the middle, two calls, and a client that drops what was thought."""
    talk = tito.talk(protocol)
    said: dict[str, Any] = {
        "tools": [tool_of(protocol)],
        ("system" if protocol == "messages" else "instructions"): "Be brief",
    }
    calls = [{"name": "look", "arguments": '{"at": 3}'}] * 2
    first = talk.say("Look", **said, sim={"calls": calls, "reasoning": True}).json()
    kept = [item for item in talk.messages if item.get("type") != "reasoning"]
    for message in kept:
        if isinstance(message.get("content"), list):
            message["content"] = [block for block in message["content"] if block["type"] != "thinking"]
    talk.messages = [*kept, *answered(protocol, first), {"role": "system", "content": "Hurry"}]
    talk.say("And?", **said, sim=PLAIN)
    talk.say("So?", **said, sim=PLAIN)
    assert [event["sent_ids"] for event in talk.committed()] == [True] * 3
    assert talk.state()["metadata"]["tito_session_mismatch"] == []
    assert [(turn["parent"], turn["branch"]) for turn in talk.tree()["turns"]] == [(0, 0), (1, 0), (2, 0)]
    require_consistent(tito, talk)


def test_a_client_may_normalise_the_arguments_that_it_got_as_objects(stand: Stand) -> None:
    """Claude Code trims an edit's text before it sends the call back: the ids of the calls tell whose they are."""
    talk = stand.talk("messages")
    said = {
        "tools": [tool_of("messages")],
        "sim": {"calls": [{"name": "look", "arguments": '{"at": 1, "b": "x  "}'}]},
    }
    first = talk.say("Look", **said).json()
    talk.messages[-1]["content"][-1]["input"] = {"at": 1, "b": "x"}
    talk.messages += answered("messages", first)
    talk.say("And?", tools=[tool_of("messages")], sim=PLAIN)
    again = {"role": "user", "content": "So far: a summary"}
    carried = [again, talk.messages[1], *answered("messages", first), user("Go on")]
    assert talk.chat(carried, tools=[tool_of("messages")], sim=PLAIN).status_code == 200
    assert [(turn["parent"], turn["cause"], turn["carries"]) for turn in talk.tree()["turns"]] == [
        (0, "start", None),
        (1, None, None),
        (0, "compaction", 1),
    ]
    [sent] = talk.state()["records"][-1]["request"]["messages"][1]["tool_calls"]
    assert sent["function"]["arguments"] == '{"at":1,"b":"x"}'


@pytest.mark.parametrize("protocol", OTHERS)
def test_a_session_whose_first_turn_is_no_chat_is_a_tree(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol)
    assert talk.tree()["history"] is None
    talk.say("One", sim=PLAIN)
    assert talk.tree()["history"] == "tree"


@pytest.mark.parametrize("protocol", OTHERS)
def test_a_context_error_is_the_protocols_own(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol)
    message = "The input (99 tokens) is longer than the model's context length (8 tokens)."
    order = {"fault": {"fault": "status_400", "message": message}}
    error = talk.chat([user("Long")], sim=order).json()["error"]
    if protocol == "messages":
        assert error["message"] == f"prompt is too long: {message}"
    else:
        assert (error["message"], error["code"]) == (message, "context_length_exceeded")


def test_a_reply_with_another_beginning_is_another_turn(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    for begun in ("A", "B"):
        answer = talk.chat(
            [user("Go"), {"role": "assistant", "content": begun}],
            headers={"x-stainless-retry-count": "1"},
            sim=PLAIN,
            **PREFILL["chat"],
        )
        assert "x-turnlog-replayed" not in answer.headers
    assert [turn["parent"] for turn in talk.tree()["turns"]] == [0, 0]


def test_a_beginning_that_cannot_be_continued_is_refused_by_name(stand: Stand) -> None:
    talk = stand.talk("messages")
    talk.say("One", sim=PLAIN)
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    begun = {"role": "assistant", "content": [thought, {"type": "text", "text": "It"}]}
    refused = talk.chat([*talk.messages, user("Two"), begun])
    assert shape_of("messages", refused)[::2] == (400, "invalid_request")
    assert "continue_final_message" in refused.text
    assert len(talk.committed()) == 1


def test_the_headers_that_made_a_response_find_it_again(stand: Stand) -> None:
    """Also where the agent has a session of its own, as in a linear one."""
    talk = stand.talk(history="linear")
    headers = {"x-turnlog-session-id": talk.path.rpartition("/")[2], "x-turnlog-agent-id": "a1"}
    made = stand.http.post("/v1/responses", json={"model": "m", "input": "One", "sim": PLAIN}, headers=headers).json()
    assert stand.http.get(f"/v1/responses/{made['id']}", headers=headers).json() == made
    del headers["x-turnlog-agent-id"]
    assert stand.http.get(f"/v1/responses/{made['id']}", headers=headers).status_code == 404


def test_what_a_client_proves_to_hold_decides_between_equal_turns(stand: Stand) -> None:
    """Two siblings sampled the same text and thought differently: the signature tells which one goes on."""
    talk = stand.talk("messages")
    said = {"reasoning": True, "text": "Same", "tool_calls": False}
    one, two = (talk.chat([user("Think")], sim=said).json()["content"] for _ in range(2))
    for content, parent in ((one, 1), (two, 2), (one, 1)):
        history = [user("Think"), {"role": "assistant", "content": content}, user("Go on")]
        assert talk.chat(history, sim=PLAIN).status_code == 200
        assert talk.committed()[-1]["parent"] == parent
