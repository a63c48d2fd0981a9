"""The openai package against a server: each way in which a client goes on with a response is the same conversation."""

from __future__ import annotations

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
