"""What engines give now and then: arguments that are no object, odd ids, reasoning in the content, empty replies."""

from __future__ import annotations

from typing import Any

import pytest
from simulating import CHAT, ask, choice_of, engine, user

from ops.simulator.config import Dialect

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "Bash"}}]
BAD_ARGUMENTS = ('{"cmd": "echo', "[1]", "null", "", '{"cmd": "a\tb"}')


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "Bash", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Fine"}
    return [*user("Go"), {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
async def test_arguments_that_are_no_object(dialect: Dialect, arguments: str) -> None:
    """They are given as ordered; in a history SGLang refuses them, unless the prompt comes as ids, and vLLM reads them
    as `{}`."""
    async with engine(dialect=dialect) as http:
        sim = {"calls": [{"name": "Bash", "arguments": arguments}]}
        choice = choice_of(await ask(http, user("Go"), tools=TOOLS, sim=sim))
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [arguments]
        body = {"model": "m", "messages": called(arguments), "temperature": 0}
        response = await http.post(CHAT, json=body)
        if dialect == "vllm":
            mended = await http.post(CHAT, json={**body, "messages": called("{}")})
            assert response.json()["choices"] == mended.json()["choices"]
            return
        error = response.json()
        assert (response.status_code, error["object"], error["code"]) == (400, "error", 400)
        assert (await http.post(CHAT, json={**body, "input_ids": [1, 2, 3]})).status_code == 200


@pytest.mark.parametrize(
    ("given", "drawn"),
    [([""], 1), ([7], 1), ([None], 1), (["a", "a"], 0), (["functions.Bash:0", "functions.Bash:1"], 0)],
)
async def test_ids_of_calls(given: list[str | int | None], drawn: int) -> None:
    """The calls have the ordered ids, and drawn ones after them, in every turn."""
    async with engine() as http:
        sim = {"calls": [{"name": "Bash"}] * 2, "call_ids": given}
        for _ in range(2):
            choice = choice_of(await ask(http, user("Go"), tools=TOOLS, sim=sim))
            ids = [call["id"] for call in choice["message"]["tool_calls"]]
            assert ids[: len(given)] == given
            assert sum(str(name).startswith("call_") for name in ids) == drawn


@pytest.mark.parametrize("text", ["<think>\nIt may.\n</think>\n\nHi", "It may.</think>Hi", ""])
async def test_reasoning_in_content_and_empty_replies(text: str) -> None:
    async with engine() as http:
        choice = choice_of(await ask(http, user("Go"), tools=TOOLS, sim={"text": text}))
        message = choice["message"]
        assert (message["content"], message["reasoning_content"], "tool_calls" in message) == (text, None, False)
        assert choice["finish_reason"] == "stop"
