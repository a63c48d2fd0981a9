"""Requests of the Messages API as chats."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest

from app.domain.canonical import canonical_hash
from app.domain.prefill import CONTINUES
from app.domain.request import ChatRequest
from app.domain.request import canonical_hash as hash_of_request
from app.errors import InvalidRequest, Unsupported
from app.protocols.messages.parse import parse_messages
from app.protocols.registry import PROTOCOLS

MESSAGES = PROTOCOLS["messages"]
PROOF, OTHER = ("1_" + "a" * 24, "2_" + "b" * 24)
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "does f", "input_schema": SCHEMA}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **({} if content is None else {"content": content}), **more}


def thought(value: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": signature}


def call(call_id: str | None, arguments: str) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def request(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": messages, **fields}


def parsed(messages: list[Any] | None = None, **fields: Any) -> ChatRequest:
    found = MESSAGES.parse(json.dumps(request([USER] if messages is None else messages, **fields)).encode())
    assert isinstance(found, ChatRequest)
    return found


def chat(found: ChatRequest) -> list[Any]:
    return [json.loads(bytes(raw)) for raw in found.messages]


def params(**fields: Any) -> dict[str, Any]:
    found = {name: json.loads(bytes(raw)) for name, raw in parsed(**fields).params.items()}
    assert found.pop("model") == "m"
    assert found.pop("max_tokens") == 9
    return found


BILLING = text("x-anthropic-billing-header: cc_version=1; cch=9f;")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IMAGE_AT = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}

CONVERSATIONS: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("text", None, [USER], [USER]),
    ("system text", "Be", [USER], [system("Be"), USER]),
    ("empty system", [BILLING, text("")], [USER], [USER]),
    ("system blocks", [BILLING, text("A", cache_control={}), text("B")], [USER], [system("A\n\nB"), USER]),
    ("leading system", "A", [system("B"), system([BILLING, text("C")]), USER], [system("A\n\nB\n\nC"), USER]),
    ("system in the middle", None, [USER, system("S"), said("x")], [{**USER, "content": "Hi\n\nS"}, said("x")]),
    ("system after a reply", None, [USER, said("x"), system("S")], [USER, said("x"), {**USER, "content": "S"}]),
    ("billing in the middle", None, [USER, system([BILLING]), USER], [{**USER, "content": "Hi\n\nHi"}]),
    ("texts", None, [user(text("a"), text(""), text("b")), USER], [{**USER, "content": "a\nb\n\nHi"}]),
    ("an empty user", None, [user(), said("x"), user(text("")), said("y")], [
        {**USER, "content": ""}, said("x"), {**USER, "content": ""}, said("y")
    ]),
    ("images", None, [user(text("a"), PNG, text("b"), text("c")), user(URL)], [
        {**USER, "content": [text("a"), IMAGE, text("b\nc"), IMAGE_AT]}
    ]),
    ("a document", None, [user(DOCUMENT, text("a"))], [{**USER, "content": "T\nD\na"}]),
    ("results between texts", None, [
        user(text("a"), result("1", "r"), result("2", [text("x"), text("y")]), text("b")),
        user(result("3"), result("4", [PNG], is_error=True)),
    ], [
        {**USER, "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "tool", "tool_call_id": "2", "content": "x\ny"},
        {**USER, "content": "b"},
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {"role": "tool", "tool_call_id": "4", "content": [IMAGE], "is_error": True},
    ]),
    ("a reply", None, [
        USER, assistant(thought("t"), thought("u"), text("a"), text("b"), use("1", x=[1, 2]), use("2"))
    ], [
        USER, said("ab", reasoning_content="t\nu", tool_calls=[call("1", '{"x":[1,2]}'), call("2", "{}")])
    ]),
    ("a reply in parts", None, [
        USER, assistant(thought("t")), said("a"), assistant(use("1")), assistant(use("2")), said("b"), said("c")
    ], [
        USER, said("a", reasoning_content="t", tool_calls=[call("1", "{}"), call("2", "{}")]), said("b"), said("c")
    ]),
    ("calls alone", None, [assistant(use("1")), USER], [said(None, tool_calls=[call("1", "{}")]), USER]),
    ("nothing", None, [USER, assistant(), USER], [USER, said(""), USER]),
    ("redacted", None, [USER, assistant({"type": "redacted_thinking", "data": "x"}), USER], [USER, said(""), USER]),
    ("invalid arguments", None, [assistant(use("1", INVALID_JSON="{x")), USER], [
        said(None, tool_calls=[call("1", "{x")]), USER
    ]),
    ("a field of that name", None, [assistant(use("1", INVALID_JSON=1)), USER], [
        said(None, tool_calls=[call("1", '{"INVALID_JSON":1}')]), USER
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "messages", "expected"), [c[1:] for c in CONVERSATIONS], ids=[c[0] for c in CONVERSATIONS]
)
def test_a_conversation_as_chat_messages(system: Any, messages: list[Any], expected: list[Any]) -> None:
    found = parsed(messages) if system is None else parsed(messages, system=system)
    assert chat(found) == expected
    assert (CONTINUES in found.params) == (messages[-1]["role"] == "assistant")
    counted = parse_messages(
        json.dumps({"model": "m", "messages": messages, "system": system}).encode(), generates=False
    )
    assert (chat(counted), CONTINUES in counted.params) == (expected, False)


def test_arguments_keep_the_clients_own_bytes() -> None:
    raw = (
        '{"model":"m","max_tokens":9,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",'
    )
    raw += '"input":{"b" : 1e3, "a":\n"\\u00e9 x"}}]}, {"role":"user","content":"Hi"}]}'
    (first, _) = chat(MESSAGES.parse(raw.encode()))  # type: ignore[arg-type]
    assert first["tool_calls"][0]["function"]["arguments"] == '{"b":1e3,"a":"\\u00e9 x"}'


def test_signatures_name_turns_the_newest_last() -> None:
    signed = [assistant(thought("a", f"tl_{PROOF}")), USER, assistant(thought("", "EqQB")), USER]
    assert parsed([USER, *signed, assistant(thought("b", f"tl_{OTHER}")), USER]).proofs == (PROOF, OTHER)


CHOICE = {"type": "function", "function": {"name": "f"}}
PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 4, "min_p": None}, {
        "temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 4, "min_p": None
    }),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_sequences": [], "stream": True, "rid": "r", "n": 1, "stream_options": {}}, {}),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {}),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": None, "x": 1}}, {
        "chat_template_kwargs": {"enable_thinking": False, "thinking": None, "x": 1}
    }),
    ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "high"}),
    ({"output_config": {"effort": "low"}, "reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
    *(
        (fields, {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}})
        for fields in (
            {"output_config": {"effort": None, "format": {"type": "json_schema", "schema": SCHEMA}}},
            {"output_format": {"type": "json_schema", "schema": SCHEMA}, "output_config": None},
        )
    ),
    ({"metadata": {"user_id": "u"}, "context_management": {}, "cache_control": {}, "service_tier": "auto"}, {}),
    ({"mcp_servers": [], "container": None, "inference_geo": "x", "speed": "fast", "betas": []}, {}),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": []}, {}),
    ({"tool_choice": {"type": "none"}}, {}),
    ({"tools": [TOOL]}, {}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, {
        "tool_choice": "required", "parallel_tool_calls": False
    }),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": False}}, {
        "tool_choice": CHOICE
    }),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), PARAMS)
def test_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params(**fields) == expected


def test_tools() -> None:
    more = {"cache_control": {}, "input_examples": [{}], "eager_input_streaming": True, "defer_loading": None}
    bare = {"type": "custom", "name": "g", "input_schema": {}, "strict": True, "allowed_callers": ["direct"]}
    found = parsed(tools=[{**TOOL, **more}, bare])
    assert json.loads(bytes(found.tools or b"")) == [
        {"type": "function", "function": {"name": "f", "description": "does f", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "parameters": {}, "strict": True}},
    ]


WITH_TOOLS = {"tools": [TOOL]}
REFUSED: list[tuple[str, dict[str, Any], bool]] = [
    ("model", {"model": 5}, False),
    ("max_tokens", {"max_tokens": True}, False),
    ("max_tokens", {"max_tokens": 0}, False),
    ("max_tokens", {"max_tokens": None}, False),
    ("messages", {"messages": []}, False),
    ("messages", {"messages": {}}, False),
    ("messages", {"messages": [system("x")]}, False),
    ("messages[0]", {"messages": [5]}, False),
    ("messages[1].role", {"messages": [USER, {"role": "tool", "content": ""}]}, False),
    ("messages[0].content", {"messages": [{"role": "user"}]}, False),
    ("messages[0].content[1].text", {"messages": [user(text("a"), {"type": "text"})]}, False),
    ("messages[0].content[0].type", {"messages": [user({"text": "a"})]}, False),
    ("messages[0].content[1].tool_use_id", {"messages": [user(text("a"), {"type": "tool_result"})]}, False),
    ("messages[0].content[0].content[0].text", {"messages": [user(result("1", [{"type": "text"}]))]}, False),
    ("messages[0].content[0].input", {"messages": [assistant({**use("1"), "input": "{}"}), USER]}, False),
    ("messages[0].content[0].name", {"messages": [assistant({**use("1"), "name": 1}), USER]}, False),
    (
        "messages[0].content[0].source.data",
        {"messages": [user({**PNG, "source": {"type": "base64", "media_type": "x"}})]},
        False,
    ),
    ("messages[1].content[0].type", {"messages": [USER, system([PNG])]}, False),
    ("messages[0].content[0]", {"messages": [assistant(result("1")), USER]}, True),
    ("messages[0].content[0]", {"messages": [user(use("1"))]}, True),
    ("messages[0].content[0]", {"messages": [assistant({"type": "server_tool_use", "id": "1"}), USER]}, True),
    ("messages[0].content[0].source", {"messages": [user({"type": "document", "source": {"type": "file"}})]}, True),
    ("messages[0].content[0].citations", {"messages": [user({**DOCUMENT, "citations": {"enabled": True}})]}, True),
    ("system", {"system": 5}, False),
    ("system[0].type", {"system": [PNG]}, False),
    ("stream", {"stream": "yes"}, False),
    ("temperature", {"temperature": "0"}, False),
    ("top_p", {"top_p": -1}, False),
    ("top_k", {"top_k": 1.5}, False),
    ("stop_sequences", {"stop_sequences": "a"}, False),
    ("stop_sequences[0]", {"stop_sequences": [""]}, False),
    ("thinking.type", {"thinking": {"type": "deep"}}, False),
    ("output_config.effort", {"output_config": {"effort": "huge"}}, False),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}, False),
    ("output_config.task_budget", {"output_config": {"task_budget": {"total": 5}}}, True),
    ("tools", {"tools": {}}, False),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}, False),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}, False),
    ("tool_choice.type", {**WITH_TOOLS, "tool_choice": {"type": "x"}}, False),
    ("tool_choice.type", {"tool_choice": {"type": "any"}}, False),
    ("tool_choice.name", {**WITH_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, False),
    ("container", {"container": "c"}, True),
    ("thread", {"thread": {"type": "create"}}, True),
    ("n", {"n": 2}, True),
]


@pytest.mark.parametrize(("place", "fields", "is_unsupported"), REFUSED)
def test_what_is_refused_is_named(place: str, fields: dict[str, Any], is_unsupported: bool) -> None:
    with pytest.raises(InvalidRequest) as raised:
        MESSAGES.parse(json.dumps(request([USER]) | fields).encode())
    assert str(raised.value).startswith((f"{place} ", f"{place}:"))
    assert isinstance(raised.value, Unsupported) == is_unsupported


def block(random: Random) -> Any:
    made = [text("a"), text(""), text(" b"), PNG, DOCUMENT, result("1", "r"), result("2", [text("x"), URL])]
    return random.choice(made)


def reply_of(random: Random) -> dict[str, Any]:
    parts = [thought("t", f"tl_{PROOF}"), text("x"), use("1", a=1e3), use("2")]
    return assistant(*(part for part in parts if random.randrange(2)))


def test_a_history_that_grows_begins_with_what_it_was() -> None:
    """Over random conversations: request N and its reply begin request N + 1, whatever is marked for a cache."""
    for seed in range(500):
        random = Random(seed)
        history: list[Any] = [system("S")] if random.randrange(3) == 0 else []
        before: list[str] = []
        for _ in range(4):
            for _ in range(random.randrange(1, 4)):
                said_now = [
                    user(*(block(random) for _ in range(random.randrange(4)))),
                    USER,
                    system("S"),
                    system([BILLING]),
                ]
                history.append(random.choice(said_now))
            history.append(USER)
            marked = copy.deepcopy(history)
            if isinstance(marked[-1]["content"], list) and marked[-1]["content"]:
                marked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
            hashes = hashes_of(parsed(marked))
            assert hashes[: len(before)] == before
            reply = reply_of(random)
            history.append(reply)
            before = hashes_of(parsed(history))
            assert before[:-1] == hashes


def hashes_of(found: ChatRequest) -> list[str]:
    return [canonical_hash(json.loads(bytes(raw)), "tolerant") for raw in found.messages]


def test_what_moves_from_turn_to_turn_is_not_in_the_hash_of_a_request() -> None:
    one = parsed(
        [user(text("a", cache_control={"type": "ephemeral"}))], system=[BILLING, text("A")], metadata={"user_id": "1"}
    )
    other = parsed([user(text("a"))], system=[{**BILLING, "text": BILLING["text"] + "2"}, text("A", cache_control={})])
    assert hash_of_request(one, "h") == hash_of_request(other, "h")
    assert [bytes(raw) for raw in one.messages] == [bytes(raw) for raw in other.messages]
    assert one.echo == other.echo
