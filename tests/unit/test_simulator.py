"""The engine simulator: canonical ids, what it does as ordered, faults that a reader refuses, its prefix cache."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from helpers.replies import parse_reply

from ops.simulator.app import Simulator
from ops.simulator.faults import FAULTS
from ops.simulator.wire import Config, Dialect
from workers.parse import PromptDiffers, Rejected, token_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SGLANG_ASKS = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True, "return_token_ids": True}
VLLM_ASKS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
COMPLETION_ASKS = {"logprobs": 0, "return_token_ids": True}
DIALECTS: list[Dialect] = ["sglang", "vllm"]
TEXT = "Once upon a time, in Zürich 🚀"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_files",
            "description": "Finds files — even “odd” ones.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "minLength": 3},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 5},
                    "mode": {"enum": ["fast", "deep"]},
                    "paths": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    "score": {"type": "number", "minimum": 0, "maximum": 1},
                    "nested": {"$ref": "#/$defs/extra"},
                },
                "required": ["query", "limit", "nested"],
                "$defs": {"extra": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TEXTS = [
    "hello",
    "  padded \n\n",
    "Zürich 東京 🚀👩‍🔬",
    "<|im_end|> inside",
    "a\tb\n\n\n c",
    "",
    "\u0000\u2028x",
    "e\u0301 مرحبا",
]


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def engine(dialect: Dialect = "sglang", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = Simulator(Config(dialect=dialect, **options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:  # type: ignore[arg-type]
        yield client


def user(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={"messages": messages, **SGLANG_ASKS, **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def choice_of(reply: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = reply["choices"][0]
    return choice


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator(Config(reasoning=0.5, seed=3))


@pytest.mark.parametrize("seed", range(12))
async def test_a_history_sent_back_is_a_token_prefix(simulator: Simulator, seed: int) -> None:
    """Over random conversations, through every round of tool calls."""
    rng = random.Random(seed)
    transport = httpx.ASGITransport(app=simulator)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": rng.choice(TEXTS)})
        messages += user(f"{seed} {rng.choice(TEXTS)}")
        tools = {"tools": TOOLS} if rng.random() < 0.8 else {}
        before: list[int] = []
        for _ in range(14):
            sim = rng.choice([{}, {"reasoning": True}, {"completion_tokens": rng.randint(20, 200)}])
            choice = choice_of(await ask(client, messages, sim=sim, **tools))
            prompt, sampled = choice["prompt_token_ids"], choice["response_token_ids"]
            assert prompt[: len(before)] == before
            assert [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]] == sampled
            before = prompt + sampled
            message = choice["message"]
            messages.append(message)
            for call in message.get("tool_calls") or []:
                json.loads(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TEXTS)})
            if not message.get("tool_calls"):
                messages += user(rng.choice(TEXTS))


PAYLOADS_OR_DELIVERY = {
    "never",
    "reset",
    "drip",
    "abort",
    "wrong_experts_rows",
    "bad_experts_base64",
    "misaligned_experts",
}


@pytest.mark.parametrize("protocol", ["chat", "completions"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", sorted(set(FAULTS) - PAYLOADS_OR_DELIVERY))
async def test_a_fault_spoils_one_reply(name: str, dialect: Dialect, protocol: Any) -> None:
    async with engine(dialect) as client:
        body: dict[str, Any] = {"prompt": [5, 6, 7], **COMPLETION_ASKS}
        if protocol == "chat":
            body = {"messages": user(), **(SGLANG_ASKS if dialect == "sglang" else VLLM_ASKS)}
        path, sent = (CHAT, None) if protocol == "chat" else (COMPLETIONS, token_text([5, 6, 7]))
        assert (await client.post("/sim/faults", json={"fault": name})).json() == {"queued": [name]}
        bad = await client.post(path, json=body)
        if not FAULTS[name].generates and name != "empty_200":
            assert bad.status_code >= 300
        elif protocol == "chat" and name == "duplicate_meta_key" and dialect == "vllm":
            pass  # its chats have no such object
        elif protocol == "chat" and name == "no_usage" and dialect == "sglang":
            pass  # its counts are read from meta_info
        elif protocol == "chat" and (name == "other_prompt" or name.endswith("prompt_tokens")):
            pass  # which only the caller can tell
        elif name.endswith("prompt_tokens"):
            assert parse_reply(bad.content, "auto", protocol=protocol, sent=sent).miscounted
        else:
            known = None if name == "missing_prompt_ids" else sent
            with pytest.raises(Rejected) as raised:
                parse_reply(bad.content, "auto", protocol=protocol, sent=known)
            assert isinstance(raised.value, PromptDiffers) is (name == "other_prompt")
        good = parse_reply((await client.post(path, json=body)).content, "auto", protocol=protocol, sent=sent)
        assert (good.dialect, good.miscounted) == (dialect, None)


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
    async with engine(dialect) as http:
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
