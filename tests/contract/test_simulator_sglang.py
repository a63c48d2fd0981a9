"""The simulator's replies beside those recorded of SGLang 0.5.23, and read by the models that its package publishes.

`recorded_sglang.jsonl` was recorded of the published server over a scripted scheduler: of a reply the names in their
order and the kinds of their values, of an error and of what is no JSON the text. An abort in the waiting queue has the
`weight_versions` that SGLang's own scheduler puts into it, and the scripted one does not. Each request has the `sim`
that orders what the scheduler's script said. Of the package only the ``protocol`` module is loaded, from its file:
importing the package itself would need torch. That part is skipped where SGLang is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from ops.simulator.app import Simulator
from ops.simulator.wire import Config

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
NAME = "sglang.srt.entrypoints.openai.protocol"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]
ASKS = {
    "logprobs": True,
    "return_meta_info": True,
    "return_prompt_token_ids": True,
    "return_token_ids": True,
    "return_routed_experts": True,
}


RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded_sglang.jsonl").read_text().splitlines()]
KINDS = {str: "", int: "#", float: "#", bool: "?", type(None): "-"}


def shape(value: Any) -> str:
    """The names of a value in their order, and the kinds of their values; of a list its first object's."""
    if isinstance(value, dict):
        return "{" + " ".join(name + shape(one) for name, one in value.items()) + "}"
    if isinstance(value, list):
        has_fields = value and isinstance(value[0], dict) and "token" not in value[0]
        return "[" + (shape(value[0]) if has_fields else "") + "]"
    return KINDS[type(value)]


def shown(response: httpx.Response) -> Any:
    """What the recording has of a reply: of a stream each shape once while it repeats."""
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return [name for name, _ in groupby(shape(json.loads(event)) for event in events)]
    if not kind:
        return response.text
    value = response.json()
    return value if response.status_code >= 400 or not isinstance(value, dict) else shape(value)


@pytest.mark.parametrize("recorded", RECORDED, ids=[one["name"] for one in RECORDED])
async def test_replies_are_those_that_were_recorded(recorded: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(app=Simulator(Config(context_length=32768)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        response = await client.request(recorded["method"], recorded["path"], json=recorded["body"])
    assert (response.status_code, shown(response)) == (recorded["status"], recorded["says"])


@pytest.fixture(scope="module")
def protocol() -> Iterator[ModuleType]:
    """SGLang's protocol module, with its one import of its own stubbed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed")
    path = Path(found.submodule_search_locations[0]) / "srt/entrypoints/openai/protocol.py"
    utils = ModuleType("sglang.utils")
    utils.convert_json_schema_to_str = json.dumps  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setitem(sys.modules, "sglang", ModuleType("sglang"))
        patch.setitem(sys.modules, "sglang.utils", utils)
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, NAME, module)
        spec.loader.exec_module(module)
        yield module


def same(published: Any, sent: Any) -> None:
    """What the model writes again is what was sent, field by field."""
    written = json.loads(published.model_dump_json())
    assert {name: value for name, value in written.items() if name in sent} == sent


@pytest.mark.parametrize(
    "fields",
    [
        {},
        ASKS,
        {**ASKS, "tools": TOOLS},
        {**ASKS, "max_tokens": 5},
        {**ASKS, "sim": {"finish_reason": "abort"}},
        {**ASKS, "sim": {"reasoning": True}},
        {"return_routed_experts": True},
    ],
)
async def test_replies_fit_the_published_models(protocol: ModuleType, fields: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(app=Simulator(Config()))  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        response = await client.post(CHAT, json=body)
        reply = protocol.ChatCompletionResponse.model_validate_json(response.content)
        sent = response.json()
        ours = sent["choices"][0]
        theirs = json.loads(reply.choices[0].model_dump_json())
        assert theirs == ours
        assert set(sent) <= set(json.loads(reply.model_dump_json()))
        protocol.ChatCompletionRequest.model_validate(body)
        refused = await client.post(CHAT, json={"messages": []})
        same(protocol.ErrorResponse.model_validate_json(refused.content), refused.json())


async def test_stream_chunks_fit_the_published_model(protocol: ModuleType) -> None:
    transport = httpx.ASGITransport(app=Simulator(Config()))  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "stream": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        response = await client.post(CHAT, json=body)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        for line in lines:
            protocol.ChatCompletionStreamResponse.model_validate_json(line)


COMPLETION_ASKS = {"logprobs": 1, "return_token_ids": True, "return_routed_experts": True}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        COMPLETION_ASKS,
        {**COMPLETION_ASKS, "prompt": [5, 6, 7], "max_tokens": 500},
        {**COMPLETION_ASKS, "echo": True},
        {**COMPLETION_ASKS, "stop": [" ", "a"]},
        {**COMPLETION_ASKS, "sim": {"finish_reason": "abort"}},
        {**COMPLETION_ASKS, "sim": {"weight_versions": ["1", "2"]}},
    ],
)
async def test_completions_fit_the_published_models(protocol: ModuleType, fields: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(app=Simulator(Config()))  # type: ignore[arg-type]
    body = {"prompt": "hi", **fields}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        response = await client.post("/v1/completions", json=body)
        reply = protocol.CompletionResponse.model_validate_json(response.content)
        sent = response.json()
        written = json.loads(reply.model_dump_json())
        assert written["choices"] == sent["choices"]
        assert sent["usage"].items() <= written["usage"].items()
        same(reply, {**sent, "usage": written["usage"]})
        asked = protocol.CompletionRequest.model_validate(body)
        assert {name for name in fields if name != "sim"} <= set(asked.model_dump())
        refused = await client.post("/v1/completions", json={"prompt": ""})
        same(protocol.ErrorResponse.model_validate_json(refused.content), refused.json())
