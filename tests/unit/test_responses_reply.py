"""A committed reply as a Response and as its events, read by the openai package, and its way back as input."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from helpers.amounts import cases
from openai import OpenAI
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList
from responding import CLIENTS, TOOLS, Json, committed, engine_reply, hashes, parsed, proof, request

from app.domain.calls import with_given_ids
from app.errors import InvalidRequest, PreviousResponseNotFound
from app.protocols.base import CommittedReply, StoredTurn
from app.protocols.errors import ErrorFields
from app.protocols.responses import COMPACTION, RESPONSES
from app.protocols.responses.reply import input_items, read_echo

INCLUDE = ["reasoning.encrypted_content"]
HISTORY: list[Json] = [
    {"role": "developer", "content": "be brief"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
]


class Answers(httpx.BaseTransport):
    """Answers every request with the bytes in `body`."""

    body = b""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=self.body)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def client(answers: Answers) -> OpenAI:
    return OpenAI(base_url="http://turnlog", api_key="x", http_client=httpx.Client(transport=answers))


def assembled(client: OpenAI) -> tuple[list[Any], Any]:
    """The events, and the response that the package's own accumulation makes of them."""
    with client.responses.stream(model="m", input="x") as stream:
        events = list(stream)
    return events, events[-1].response


def from_deltas(events: list[Any]) -> list[str]:
    """Each item's text, arguments or input, of the deltas alone."""
    texts: dict[int, str] = {event.output_index: "" for event in events if event.type.endswith("item.added")}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] += event.delta
    return list(texts.values())


def without_parsed(value: Any) -> Any:
    """Less what the package adds for structured output."""
    if isinstance(value, list):
        return [without_parsed(item) for item in value]
    if isinstance(value, dict):
        return {key: without_parsed(item) for key, item in value.items() if not key.startswith("parsed")}
    return value


def text_of(item: Json) -> str:
    return item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input", ""))


def test_the_stream_assembles_to_the_reply(client: OpenAI, answers: Answers) -> None:
    """The events of generated replies are complete and in order, and say what the Response says."""
    random = Random(17)
    for turn in range(cases(2000)):
        reply = committed(engine_reply(random, turn), turn, include=random.choice([[], INCLUDE]))
        whole = json.loads(RESPONSES.reply(reply))
        Response.model_validate(whole)
        answers.body = RESPONSES.events(reply)
        events, response = assembled(client)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        sent = [part for part in answers.body.split(b"\n") if part.startswith(b"data: ")]
        assert json.loads(sent[-1][6:])["response"] == whole
        assert without_parsed(response.to_dict(mode="json")) == whole
        assert [event.item.to_dict() for event in events if event.type.endswith("item.done")] == whole["output"]
        assert from_deltas(events) == [text_of(item) for item in whole["output"]]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_reply_that_comes_back_is_the_stored_one(name: str) -> None:
    """Whatever a client drops or moves: the history is the request's messages, our reply, and what is new."""
    random = Random(5)
    for turn in range(1, 300):
        engine = engine_reply(random, turn)
        if name == "no ids" and '"raw"' in json.dumps(engine):
            continue  # The only arguments whose way back needs the id: a custom tool's that are no object.
        reply = committed(engine, turn, include=INCLUDE)
        items = CLIENTS[name](json.loads(RESPONSES.reply(reply))["output"])
        outputs = [
            {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
            for item in json.loads(RESPONSES.reply(reply))["output"]
            if "call_id" in item
        ]
        new = outputs or [{"role": "user", "content": "and?"}]
        message = engine["choices"][0]["message"]
        asked = RESPONSES.parse(request(input=[*HISTORY, *items, *new], instructions="sys"))
        stored = StoredTurn([*asked.messages[:2], msgspec.Raw(json.dumps(message).encode())])
        full = RESPONSES.complete(asked, {proof(turn): stored})
        found = hashes([json.loads(bytes(raw)) for raw in full.messages])
        before = hashes(parsed(HISTORY, instructions="sys"))
        assert found[: len(before) + 1] == [*before, *hashes([message])], (name, message)
        assert len(found) == len(before) + 1 + len(new)


def calls_reply(*calls: tuple[str, str], **message: Any) -> Json:
    reply = engine_reply(Random(0))
    made = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    reply["choices"][0] |= {"finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    reply["choices"][0]["message"]["tool_calls"] = made
    return reply


def test_calls_as_their_tools_are_spelled() -> None:
    """Namespaced, custom, custom with other arguments, and unknown; the sampled text stays."""
    calls = [
        ("shell", '{"n": 1e3}'),
        ("ns__look", "{}"),
        ("apply_patch", '{"input":"p"}'),
        ("apply_patch", "{}"),
        ("who", "x"),
    ]
    items = json.loads(RESPONSES.reply(committed(calls_reply(*calls))))["output"]
    base = proof(1)
    assert [(item["type"], item["id"], item["name"], item.get("namespace")) for item in items] == [
        ("function_call", f"fc_{base}_0", "shell", None),
        ("function_call", f"fc_{base}_1", "look", "ns"),
        ("custom_tool_call", f"ctc_{base}_2", "apply_patch", None),
        ("custom_tool_call", f"ctc_{base}_3r", "apply_patch", None),
        ("function_call", f"fc_{base}_4", "who", None),
    ]
    assert [text_of(item) for item in items] == ['{"n": 1e3}', "{}", "p", "{}", "x"]
    assert [item["call_id"] for item in items] == ["c0", "c1", "c2", "c3", "c4"]


@pytest.mark.parametrize("fault", ["id", "name"])
def test_a_call_without_an_id_or_a_name_comes_back_as_it_was(fault: str) -> None:
    """The response names such a call itself; its next request must still hold what the engine sampled."""
    reply = calls_reply(("shell", "{}"), ("" if fault == "name" else "shell", "{}"))
    message = reply["choices"][0]["message"]
    if fault == "id":
        for call in message["tool_calls"]:
            del call["id"]
    whole = committed(reply)
    items = json.loads(RESPONSES.reply(whole))["output"]
    assert all(item["call_id"] for item in items)
    assert hashes(parsed([*HISTORY, *items]))[-1:] == hashes([with_given_ids(message, whole.given_ids)])


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("abort", "incomplete", "abort"),
    ],
)
def test_how_a_reply_ended(finish: str, status: str, reason: str | None) -> None:
    reply = engine_reply(Random(1))
    reply["choices"][0]["finish_reason"] = finish
    whole = json.loads(RESPONSES.reply(committed(reply)))
    assert (whole["status"], (whole["incomplete_details"] or {}).get("reason")) == (status, reason)
    assert whole["output"][-1]["status"] == status
    assert ("completed_at" in whole) is (reason is None)
    assert RESPONSES.events(committed(reply)).count(f"event: response.{status}\n".encode()) == 1


def test_what_the_response_repeats() -> None:
    fields = {
        "instructions": "sys",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "store": False,
        "user": "u",
        "top_p": 1,
    }
    whole = json.loads(RESPONSES.reply(committed(engine_reply(Random(2)), **fields, previous_response_id=None)))
    assert {name: whole[name] for name in fields} == fields
    assert [tool["type"] for tool in whole["tools"]] == [tool["type"] for tool in TOOLS]
    assert not read_echo(committed(engine_reply(Random(2)), store=False).echo).is_stored
    other = Response.model_validate_json(
        RESPONSES.reply(CommittedReply(json.dumps(engine_reply(Random(2))).encode(), proof(1)))
    )
    assert other.tool_choice == "auto"


def test_usage() -> None:
    reply = engine_reply(Random(0))
    reply["usage"] = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    reply["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    usage = Response.model_validate_json(RESPONSES.reply(committed(reply))).usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (7, 4)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens, usage.total_tokens) == (5, 3, 12)


def stored(instructions: str | None, items: list[Json], **fields: Any) -> StoredTurn:
    asked = RESPONSES.parse(request(input=items, instructions=instructions, **fields))
    reply = msgspec.Raw(b'{"role":"assistant","content":"A"}')
    return StoredTurn([*asked.messages, reply], asked.echo)


@pytest.mark.parametrize("before", [None, "old", "old\n\nlonger"])
@pytest.mark.parametrize("now", [None, "old", "new"])
def test_previous_response_id(before: str | None, now: str | None) -> None:
    """The history of the response with this request's instructions; byte for byte if they are the same."""
    turn = stored(before, HISTORY)
    asked = RESPONSES.parse(request(instructions=now, previous_response_id=f"resp_{proof(4)}", input=HISTORY))
    assert (asked.continues, asked.needs, asked.proofs) == (proof(4), (), (proof(4),))
    messages = RESPONSES.complete(asked, {proof(4): turn}).messages
    expected = stored(now, HISTORY).messages
    later = [b'{"role":"user","content":"be brief"}', b'{"role":"user","content":"hi"}']
    assert [bytes(raw) for raw in messages] == [*map(bytes, expected), *later]
    with pytest.raises(PreviousResponseNotFound):
        RESPONSES.complete(asked, {})


@pytest.mark.parametrize("item_id", [f"fc_{proof(4)}_0", f"msg_{proof(5)}"])
def test_a_reference_to_what_the_session_does_not_have(item_id: str) -> None:
    asked = RESPONSES.parse(request(input=[*HISTORY, {"type": "item_reference", "id": item_id}]))
    with pytest.raises(InvalidRequest, match=item_id):
        RESPONSES.complete(asked, {proof(4): stored(None, HISTORY)})


def test_previous_response_of_another_protocol() -> None:
    turn = StoredTurn([msgspec.Raw(b'{"role":"user","content":"q"}')], b'{"protocol":"messages","shown":{}}')
    asked = RESPONSES.parse(request(instructions="s", previous_response_id=f"resp_{proof(4)}"))
    messages = [json.loads(bytes(raw)) for raw in RESPONSES.complete(asked, {proof(4): turn}).messages]
    assert [message["content"] for message in messages] == ["s", "q", "hi"]


@pytest.mark.parametrize(
    ("message", "summary"),
    [({"content": "It counts.", "reasoning_content": "Hm."}, "It counts."), ({"reasoning_content": "Hm."}, "Hm.")],
)
def test_a_compaction_is_the_sampled_summary(client: OpenAI, answers: Answers, message: Json, summary: str) -> None:
    """In place of the history, which the client forgets, it is all that the next request has of it."""
    trigger = {"type": "compaction_trigger"}
    asked = RESPONSES.parse(request(input=[*HISTORY, trigger], tools=TOOLS))
    plain = RESPONSES.parse(request(input=HISTORY, tools=TOOLS))
    assert [bytes(raw) for raw in asked.messages[:-1]] == [bytes(raw) for raw in plain.messages]
    assert (asked.tools, bytes(asked.params["tool_choice"])) == (plain.tools, b'"none"')
    reply = committed(calls_reply(**message), input=[*HISTORY, trigger])
    answers.body = RESPONSES.events(reply)
    events, response = assembled(client)
    [item] = response.output
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.output_item.done", "response.completed"),
    ]
    live = RESPONSES.live(reply)
    assert live.delta({"content": "It "}) == b""
    assert live.end(reply) == answers.body
    next_one = RESPONSES.parse(request(input=[HISTORY[1], item.model_dump(exclude_none=True)]))
    assert [json.loads(bytes(raw))["role"] for raw in next_one.messages] == ["user", "user"]
    assert json.loads(bytes(next_one.messages[-1]))["content"].endswith(f"\n\n{summary}")

    compact = COMPACTION
    listed = compact.parse(request(input=HISTORY, tools=TOOLS))
    assert [bytes(raw) for raw in listed.messages] == [bytes(raw) for raw in asked.messages]
    whole = json.loads(compact.reply(CommittedReply(reply.body, proof(1), listed.echo)))
    assert whole["output"] == [HISTORY[1], item.model_dump(exclude_none=True)]
    continued = compact.parse(request(input=None, previous_response_id=f"resp_{proof(1)}"))
    assert len(continued.messages) == 1


def test_input_items() -> None:
    """The items that a turn was asked with, less its instructions; pages as OpenAI's."""
    calls = [
        {"type": "function_call", "call_id": "a", "name": "look", "namespace": "ns", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "seen"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "p"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
    ]
    asked = RESPONSES.parse(request(input=[*HISTORY, *calls], instructions="sys"))
    listed = json.loads(input_items(asked.messages, proof(2), asked.echo, "asc"))
    assert [(item["type"], item.get("role"), item.get("namespace")) for item in listed["data"]] == [
        ("message", "system", None),
        ("message", "user", None),
        ("function_call", None, "ns"),
        ("function_call_output", None, None),
        ("message", "user", None),
        ("custom_tool_call", None, None),
        ("custom_tool_call_output", None, None),
    ]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "be brief"}]
    assert listed["data"][3]["output"] == "seen"
    ResponseItemList.model_validate(listed)
    again = RESPONSES.parse(request(input=listed["data"], instructions="sys"))
    assert [bytes(raw) for raw in again.messages] == [bytes(raw) for raw in asked.messages]
    names = [item["id"] for item in listed["data"]]
    page = json.loads(input_items(asked.messages, proof(2), asked.echo, "desc", 2, names[4]))
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([names[3], names[2]], True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ErrorFields(400, "long", "invalid_request_error", None, is_context=True), "context_length_exceeded"),
        (ErrorFields(400, "bad", "invalid_request_error", "invalid_request"), "invalid_prompt"),
        (ErrorFields(429, "slow", "rate_limit", None), "rate_limit_exceeded"),
        (ErrorFields(409, "busy", "conflict_error", "session_busy"), "server_error"),
        (ErrorFields(503, "none", "upstream_error", "no_upstream"), "server_error"),
    ],
)
def test_errors(client: OpenAI, answers: Answers, error: ErrorFields, code: str) -> None:
    answers.body = RESPONSES.error_event(error)
    events, response = assembled(client)
    assert [event.type for event in events] == ["response.created", "response.failed"]
    assert (response.status, response.error.code, response.error.message) == ("failed", code, error.message)
    body = json.loads(RESPONSES.error(error))["error"]
    assert body["code"] == ("context_length_exceeded" if error.is_context else error.code)
