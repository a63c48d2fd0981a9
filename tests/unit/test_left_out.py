"""What a client offers and no engine is sent is told by code and place; what it forces is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tables import rows

from app.domain.events import COMPLETIONS
from app.domain.left_out import MOST, bounded
from app.domain.request import ChatRequest
from app.errors import InvalidRequest, Unsupported
from app.protocols.registry import PROTOCOLS

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {}}
USER = {"role": "user", "content": "Hi"}
LOOK = {
    "chat": {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    "messages": {"name": "look", "input_schema": SCHEMA},
    "responses": {"type": "function", "name": "look", "parameters": SCHEMA},
}
"""One tool that a client runs, in each protocol."""

SERVERS: dict[str, list[Json]] = {
    "chat": [{"type": "web_search"}, {"type": "mcp", "server_url": "https://secret.example"}],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "secret"},
        {**LOOK["messages"], "name": "called", "allowed_callers": ["code_execution_20250825"]},
    ],
    "responses": [
        *(
            {"type": kind}
            for kind in ("web_search", "web_search_preview", "image_generation", "local_shell", "computer")
        ),
        {"type": "file_search", "vector_store_ids": ["secret"]},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "secret", "server_url": "https://secret.example"},
        {"type": "of_next_year"},
        {**LOOK["responses"], "name": "called", "allowed_callers": ["programmatic"]},
    ],
}
"""Tools that no engine can be sent."""

FORCED: dict[str, list[Any]] = {
    "chat": [{"type": "web_search"}],
    "messages": [{"type": "tool", "name": "web_search"}],
    "responses": [{"type": "web_search"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}],
}
ANY = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}
AUTO = {"chat": "auto", "messages": {"type": "auto"}, "responses": "auto"}


def parsed(protocol: str, **fields: Any) -> ChatRequest:
    history = "input" if protocol == "responses" else "messages"
    body = {"model": "m", "max_tokens": 9, history: [USER], **fields}
    if protocol == "responses":
        del body["max_tokens"]
    request = PROTOCOLS[protocol].parse(json.dumps(body).encode())
    assert isinstance(request, ChatRequest)
    return request


def names(request: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(bytes(request.tools or b"[]"))]


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS.keys() - COMPLETIONS))
def test_a_servers_tools_that_are_only_offered_are_left_out_and_told(protocol: str) -> None:
    servers = SERVERS[protocol]
    request = parsed(protocol, tools=[LOOK[protocol], *servers], tool_choice=AUTO[protocol])
    assert names(request) == ["look"]
    assert list(request.left_out) == [f"server_tool:tools[{place}]" for place in range(1, len(servers) + 1)]
    assert json.loads(bytes(request.params["tool_choice"])) == "auto"

    alone = parsed(protocol, tools=servers, tool_choice=AUTO[protocol])
    assert alone.tools is None
    assert not {"tool_choice", "parallel_tool_calls"} & set(alone.params)


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS.keys() - COMPLETIONS))
def test_a_choice_that_forces_one_is_refused(protocol: str) -> None:
    for choice in FORCED[protocol]:
        for others in ([], [LOOK[protocol]]):
            with pytest.raises(Unsupported, match="tool_choice"):
                parsed(protocol, tools=[*others, *SERVERS[protocol]], tool_choice=choice)
    with pytest.raises(Unsupported, match="tool_choice"):
        parsed(protocol, tools=SERVERS[protocol], tool_choice=ANY[protocol])
    assert names(parsed(protocol, tools=[LOOK[protocol], *SERVERS[protocol]], tool_choice=ANY[protocol])) == ["look"]


FOUND = {"type": "tool_reference", "tool_name": "look"}
OTHERS: list[tuple[str, Json, list[str]]] = rows("left_out_others")


LATE = {"name": "late", "input_schema": SCHEMA}
CHANGES: list[tuple[list[Json], list[Json], list[str], list[str]]] = rows("left_out_changes")
"""Tools beside `look`, their changes in a system message, the names that the engine gets, and what is told."""


@pytest.mark.parametrize(("tools", "changes", "offered", "left_out"), CHANGES)
def test_late_tools(tools: list[Json], changes: list[Json], offered: list[str], left_out: list[str]) -> None:
    """They leave no trace in the conversation, whether in a system message or in a block of the user's."""
    say = {"type": "text", "text": "Tools changed."}
    own = [LOOK["messages"], *tools]
    in_message = parsed("messages", messages=[USER, {"role": "system", "content": [say, *changes]}], tools=own)
    block = {"type": "mid_conv_system", "content": [say, *changes]}
    in_block = parsed("messages", messages=[USER, {"role": "user", "content": [block]}], tools=own)
    for request in (in_message, in_block):
        assert names(request) == offered
        assert json.loads(bytes(request.messages[-1])) == {"role": "user", "content": "Hi\n\nTools changed."}
    assert list(in_message.left_out) == left_out
    with pytest.raises(InvalidRequest, match=re.escape("messages[1].content[0].tool")):
        parsed("messages", messages=[USER, {"role": "system", "content": [{"type": "tool_addition", "tool": 5}]}])


def test_a_defined_tool_takes_the_place_of_the_one_before() -> None:
    wider = {**LATE, "name": "look", "description": "more"}
    change = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": wider}}
    changed = [USER, {"role": "system", "content": [change]}]
    request = parsed("messages", messages=changed, tools=[LOOK["messages"], LATE])
    assert names(request) == ["look", "late"]
    assert json.loads(bytes(request.tools or b""))[0]["function"]["description"] == "more"


@pytest.mark.parametrize(("protocol", "fields", "left_out"), OTHERS)
def test_what_is_told(protocol: str, fields: Json, left_out: list[str]) -> None:
    request = parsed(protocol, **fields)
    assert list(request.left_out) == left_out
    sent = b"".join(map(bytes, request.messages)) + bytes(request.tools or b"")
    assert b'"detail":"original"' not in sent
    assert b"defer_loading" not in sent
    assert sent.count(b'"detail":"auto"') == sum(one.startswith("image_detail") for one in left_out)


def test_a_tool_reference_is_a_part_of_its_result() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [FOUND]}
    request = parsed("messages", messages=[USER, {"role": "user", "content": [result]}])
    reference = {"type": "tool_reference", "name": "look"}
    assert json.loads(bytes(request.messages[-1])) == {"role": "tool", "tool_call_id": "a", "content": [reference]}


def test_what_is_told_is_bounded_and_holds_none_of_the_clients_text() -> None:
    request = parsed("responses", tools=[*SERVERS["responses"], *({"type": "sécret, \n"} for _ in range(100))])
    told = ", ".join(bounded(request.left_out))
    assert len(bounded(request.left_out)) == MOST + 1
    assert told.endswith(f"more:{len(request.left_out) - MOST}")
    assert told.isascii()
    assert "cret" not in told
    assert bounded(("a:b",)) == ("a:b",)
