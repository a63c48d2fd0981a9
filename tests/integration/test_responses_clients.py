"""The openai package against a server: each way in which a client goes on with a response is the same conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from integration.stand import Stand

PARAMETERS = {"type": "object", "properties": {"at": {"type": "number"}}}
LOOK = {"type": "function", "name": "look", "parameters": PARAMETERS}
TOOLS = [{"type": "namespace", "name": "eye", "description": "", "tools": [LOOK]}, {"type": "custom", "name": "patch"}]
CALLS = [
    {"name": "eye__look", "arguments": '{"at": 1e3,  "b":"ü"}'},
    {"name": "patch", "arguments": '{"input": "x\\ny"}'},
    {"name": "patch", "arguments": '{"other": 1}'},
]
USER = {"role": "user", "content": "Go on"}
WAYS: dict[str, Callable[[Any], Any] | None] = {
    "to_dict": lambda item: item.to_dict(),
    "model_dump": lambda item: item.model_dump(),
    "references": lambda item: {"type": "item_reference", "id": item.id},
    "previous_response_id": None,
}


def ask(client: OpenAI, number: int, history: list[Any], previous: str | None) -> Response:
    """Turn `number`: every second one has calls, and every second one is streamed."""
    with_calls = number % 2 == 0
    fields: dict[str, Any] = {"model": "simulator", "instructions": "sys", "tools": TOOLS, "input": history}
    sim = {"calls": CALLS} if with_calls else {"tool_calls": False, "reasoning": True}
    fields |= {"previous_response_id": previous, "extra_body": {"sim": sim}}
    if with_calls:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_is_one_branch(stand: Stand, way: str) -> None:
    talk = stand.talk(history="tree")
    base = str(stand.http.base_url).rstrip("/") + talk.path + "/v1"
    history: list[Any] = [{"role": "developer", "content": "Be brief"}, USER]
    previous, spell, prompts = None, WAYS[way], []
    with OpenAI(base_url=base, api_key="x", max_retries=0) as client:
        for number in range(4):
            response = ask(client, number, history, previous)
            assert response.usage is not None
            prompts.append(response.usage.input_tokens)
            kept = client.responses.retrieve(response.id)
            assert [item.id for item in kept.output] == [item.id for item in response.output]
            called = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
            new = [{"type": f"{item.type}_output", "call_id": item.call_id, "output": "Seen"} for item in called] or [
                USER
            ]
            if spell is None:
                history, previous = new, response.id
            else:
                history = [*history, *map(spell, response.output), *new]
        listed = list(client.responses.input_items.list(response.id))
    assert len(listed) == 17
    assert [(turn["parent"], turn["branch"]) for turn in talk.tree()["turns"]] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert prompts == [223, 331, 389, 497], "the same tokens, whichever way the history came"


def test_a_history_is_compacted_and_gone_on_with(stand: Stand) -> None:
    """By the route for it and by an item, also streamed: each is a turn behind the history, and its summary is all
    that a new beginning has of it."""
    talk = stand.talk(history="tree")
    base = str(stand.http.base_url).rstrip("/") + talk.path + "/v1"
    trigger: Any = {"type": "compaction_trigger"}
    body = {"sim": {"tool_calls": False, "text": "It counts."}}
    with OpenAI(base_url=base, api_key="x", max_retries=0) as client:
        first = client.responses.create(model="simulator", input=[USER], extra_body=body)  # type: ignore[list-item]
        history: list[Any] = [USER, *(item.to_dict() for item in first.output)]
        raw = client.responses.with_raw_response.compact(model="simulator", input=history, extra_body=body)
        assert raw.parse().object == "response.compaction"
        by_route = json.loads(raw.text)["output"]
        by_item = client.responses.create(model="simulator", input=[*history, trigger], extra_body=body)
        with client.responses.stream(model="simulator", input=[*history, trigger], extra_body=body) as stream:
            streamed = stream.get_final_response()
        by_id = client.responses.compact(model="simulator", previous_response_id=first.id, extra_body=body)
        compacted = [raw.parse().output[-1], *by_item.output, *streamed.output, *by_id.output]
        assert [item.type for item in compacted] == ["compaction"] * 4
        assert by_route == [USER, compacted[0].to_dict()]
        client.responses.create(model="simulator", input=[*by_route, USER], extra_body=body)
        kept = client.responses.retrieve(by_item.id)
        assert [item.to_dict() for item in kept.output] == [item.to_dict() for item in by_item.output]
    assert [turn["parent"] for turn in talk.tree()["turns"]] == [0, 1, 1, 1, 1, 0]
    sent = stand.engine_requests(talk.id)[-1]["body"]["messages"]
    assert [message["role"] for message in sent] == ["user"] * 3
    assert sent[1]["content"].endswith("\n\nIt counts.")
    assert sum(sum(row["loss_mask"]) for row in talk.rows()) == sum(turn["output_tokens"] for turn in talk.committed())
