"""Requests of OpenAI Responses: what they become as chats, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from responding import TOOLS, Json, hashes, parsed, proof, request
from tables import rows

from app.domain.request import ChatRequest, canonical_hash, join_object
from app.errors import InvalidRequest, PreviousResponseNotFound, Unsupported
from app.protocols.responses import RESPONSES
from app.protocols.responses.reply import read_echo

USER = {"role": "user", "content": "hi"}


def text(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": "abc"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,x", "detail": "low"}


@pytest.mark.parametrize(("items", "messages"), rows("responses_items"))
def test_items_as_messages(items: list[Json], messages: list[Json]) -> None:
    """Each also with a beginning, of which the messages are then the end: a history that grows keeps its messages."""
    assert parsed(items) == messages
    for count in range(1, len(items)):
        *before, last = parsed(items[:count])
        assert hashes(parsed(items))[: len(before)] == hashes(before), last


def test_input_as_text_and_instructions() -> None:
    assert parsed("hi", instructions="sys") == [text("system", "sys"), USER]  # type: ignore[arg-type]
    assert parsed([text("developer", "d"), USER], instructions="sys") == [text("system", "sys\n\nd"), USER]


def chat(**fields: Any) -> ChatRequest:
    return RESPONSES.parse(request(**fields))


def params_of(**fields: Any) -> Json:
    params: Json = json.loads(join_object({name: bytes(raw) for name, raw in chat(**fields).params.items()}))
    del params["model"]
    return params


@pytest.mark.parametrize(("fields", "params"), rows("responses_params"))
def test_parameters(fields: Json, params: Json) -> None:
    assert params_of(**fields) == params


def test_tools_as_functions() -> None:
    asked = chat()
    assert asked.tools is not None
    shell, look, patch = [tool["function"] for tool in json.loads(bytes(asked.tools))]
    assert shell == {"name": "shell", "description": "runs", "parameters": {"type": "object"}, "strict": False}
    assert look == {"name": "ns__look"}
    assert patch["parameters"]["required"] == ["input"]
    assert "start: X" in patch["description"]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "namespace": "ns", "name": "look"}],
    }
    some = chat(tool_choice=choice)
    assert some.tools is not None
    assert [tool["function"]["name"] for tool in json.loads(bytes(some.tools))] == ["ns__look"]
    assert json.loads(bytes(some.params["tool_choice"])) == "required"
    more = chat(tools=[], input=[{"type": "additional_tools", "role": "developer", "tools": TOOLS[:1]}, USER])
    assert more.tools is not None
    assert [tool["function"] for tool in json.loads(bytes(more.tools))] == [shell]


def test_proofs_and_needs() -> None:
    """Each turn that the items name, the newest last; what must be read is only what they refer to."""
    items = [
        {**THOUGHT, "id": f"rs_{proof(1)}", "encrypted_content": f"tl_{proof(1)}"},
        {**SAID, "id": f"msg_{proof(1)}"},
        USER,
        {**SUMMARY, "id": "rs_other", "encrypted_content": f"tl_{proof(2)}"},
        {"type": "item_reference", "id": f"msg_{proof(3)}"},
    ]
    asked = chat(input=items)
    assert (asked.proofs, asked.needs) == ((proof(1), proof(2), proof(3)), (proof(3),))


def test_the_echo_is_small_and_the_same_every_turn() -> None:
    """Tools by name: 24 tools of 3 KB each are told in less than 2 KB, whatever the order of a request's fields."""
    tools = [{**TOOLS[0], "name": f"tool_{index}", "description": "d" * 3000} for index in range(24)]
    first, second = chat(tools=tools), chat(input=[USER, SAID, USER], tools=tools)
    assert first.echo == second.echo
    assert first.echo is not None
    assert len(first.echo) < 2000
    again = RESPONSES.parse(json.dumps(dict(reversed(json.loads(request(tools=tools)).items()))).encode())
    assert canonical_hash(again, "") == canonical_hash(first, "")
    assert not read_echo(chat(store=False).echo).is_stored


REFUSED: list[tuple[Json, str]] = rows("responses_refused")

UNSUPPORTED: list[tuple[Json, str]] = [
    *[({"input": [{"type": kind}]}, "input[0].type") for kind in ("web_search_call", "mcp_call", "x")],
    ({"input": [{"type": "compaction", "encrypted_content": "gAAAAA"}]}, "input[0].encrypted_content"),
    ({"input": [text("user", [{"type": "input_file"}])]}, "input[0].content[0].type"),
    ({"input": [text("user", [{**IMAGE, "file_id": "f"}])]}, "input[0].content[0].file_id"),
    ({"input": [text("system", [IMAGE])]}, "input[0].content"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"include": ["message.input_image.image_url"]}, "include[0]"),
    ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
    ({"tools": [{**TOOLS[0], "async": True}]}, "tools[0].async"),
    ({"input": [{"type": "item_reference", "id": f"msg_{proof(n)}"} for n in range(300)]}, "input[256]"),
    *[({name: {"id": "x"}}, name) for name in ("conversation", "prompt", "max_tool_calls", "context_management")],
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(
    ("fields", "field", "error"),
    [(*case, InvalidRequest) for case in REFUSED] + [(*case, Unsupported) for case in UNSUPPORTED],
)
def test_what_is_refused_and_how_it_is_named(fields: Json, field: str, error: type[InvalidRequest]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**fields)
    assert type(refusal.value) is error
    assert str(refusal.value).startswith(field)


@pytest.mark.parametrize("response_id", ["resp_68ab", f"msg_{proof(1)}", f"resp_{proof(1)}x", ""])
def test_a_previous_response_that_is_not_ours(response_id: str) -> None:
    with pytest.raises(PreviousResponseNotFound):
        chat(previous_response_id=response_id)
