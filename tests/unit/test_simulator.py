"""The engine simulator: canonical ids, wire shapes, faults."""

from __future__ import annotations

import base64
import io
import json
import random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from simulating import CHAT, SGLANG_ASKS, ask, choice_of, engine, user

from ops.simulator.app import Simulator
from ops.simulator.config import Config, Dialect
from ops.simulator.faults import FAULTS
from ops.simulator.wire import ChatRequest, Sim
from workers.parse import Rejected, parse_reply

VLLM_ASKS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
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


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator(Config(reasoning=0.5, seed=3))


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """A small independent check of the keywords that TOOLS uses."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties", {})
        return set(schema.get("required", ())) <= set(value) <= set(known)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) >= schema.get("minLength", 0)
    return True


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
                schema: dict[str, Any] = next(
                    tool["function"].get("parameters", {})  # type: ignore[attr-defined]
                    for tool in TOOLS
                    if tool["function"]["name"] == call["function"]["name"]  # type: ignore[index]
                )
                arguments = json.loads(call["function"]["arguments"])
                assert fits(arguments, {"type": "object", **schema})
                assert all(fits(value, schema["properties"][name]) for name, value in arguments.items())
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TEXTS)})
            if not message.get("tool_calls"):
                messages += user(rng.choice(TEXTS))


async def test_sampled_ids_are_what_the_tokenizer_gives(simulator: Simulator) -> None:
    """Ids known without encoding equal a real encoding, prompt included."""
    policy, tokenizer, template = (
        simulator.engine.policy,
        simulator.engine.tokenizer,
        simulator.engine.template,
    )
    for number in range(200):
        raw = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": f"{number} {TEXTS[number % 8]}"}))]
        conversation = template.read(raw, msgspec.Raw(msgspec.json.encode(TOOLS) if number % 3 else b""))
        body: dict[str, Any] = {"messages": user(), "sim": {"reasoning": bool(number % 2)}}
        if number % 5 == 0:
            body["sim"]["completion_tokens"] = 100 + number
        request = ChatRequest(messages=[], sim=msgspec.convert(body["sim"], Sim))
        draft = policy.draft(conversation, request, continuing=False)
        assert tokenizer.ids(draft.text) == draft.ids[:-1]
        assert tokenizer.decode(draft.ids) == draft.text + "<|im_end|>"
        if body["sim"].get("completion_tokens") and draft.content:
            assert abs(len(draft.ids) - (100 + number)) <= 1
        whole = "".join(template.pieces(conversation))
        assert template.prompt(conversation).ids() == tokenizer.ids(whole)


async def test_same_seed_same_answers() -> None:
    async def answers(seed: int) -> list[Any]:
        async with engine(seed=seed) as client:
            found = []
            for number in (1, 1, 2):
                choice = choice_of(await ask(client, user(f"question {number}"), tools=TOOLS))
                found.append([choice["message"], choice["meta_info"]["output_token_logprobs"]])
            return found

    one, again, other = await answers(1), await answers(1), await answers(2)
    assert one == again != other
    assert one[0] != one[1]
    logprobs = [entry[0] for entry in one[0][1]]
    assert all(-1e4 < value < 0 for value in logprobs)
    assert len(set(logprobs)) == len(logprobs)


async def test_default_length_and_limits() -> None:
    async with engine(reasoning=0.0) as client:
        choice = choice_of(await ask(client, user()))
        assert 40 <= len(choice["response_token_ids"]) <= 60
        assert choice["finish_reason"] == "stop"
        assert choice["matched_stop"] == choice["response_token_ids"][-1]
        for limit in (1, 7, 30):
            cut = choice_of(await ask(client, user("x"), max_tokens=limit))
            assert len(cut["response_token_ids"]) == limit
            assert cut["finish_reason"] == cut["meta_info"]["finish_reason"]["type"] == "length"
        exact = choice_of(await ask(client, user("y"), sim={"completion_tokens": 3000}))
        assert exact["meta_info"]["completion_tokens"] == 3000 == len(exact["response_token_ids"])
        text = choice_of(await ask(client, user("z"), sim={"text": "Just this — ü"}))
        assert text["message"]["content"] == "Just this — ü"
        empty = choice_of(await ask(client, user("z"), max_completion_tokens=0))
        assert empty["response_token_ids"] == []


async def test_a_cut_answer_sent_back_is_a_prefix_too() -> None:
    async with engine(reasoning=0.5) as client:
        for number in range(30):
            messages = user(f"cut {number}")
            sim = {"finish_reason": "abort"} if number % 2 else {}
            first = choice_of(await ask(client, messages, sim=sim, max_tokens=30 + number % 7))
            back = [*messages, first["message"], *user("go on")]
            second = choice_of(await ask(client, back))
            whole = first["prompt_token_ids"] + first["response_token_ids"]
            assert second["prompt_token_ids"][: len(whole)] == whole


async def test_input_ids_bypass_the_template_and_continue() -> None:
    async with engine(reasoning=1.0) as client:
        ids = [5, 6, 7, 300]
        choice = choice_of(await ask(client, user(), input_ids=ids, tools=TOOLS))
        assert choice["prompt_token_ids"] == ids
        assert choice["message"].get("tool_calls") is None
        assert choice["message"]["reasoning_content"] is None
        refused = await client.post(CHAT, json={"messages": user(), "input_ids": [-1]})
        assert refused.status_code == 400


async def test_routed_experts_rows_and_prefix() -> None:
    async with engine() as client:
        fields = {"return_routed_experts": True, "sim": {"experts": {"layers": 3, "top_k": 2, "experts": 8}}}
        first = choice_of(await ask(client, user(), **fields))
        rows = np.frombuffer(base64.b64decode(first["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
        total = len(first["prompt_token_ids"]) + len(first["response_token_ids"])
        assert len(rows) == total - 1
        assert 0 <= rows.min() <= rows.max() < 8
        messages = [*user(), first["message"], *user("more")]
        second = choice_of(await ask(client, messages, **fields))
        longer = np.frombuffer(base64.b64decode(second["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
        assert (longer[: len(rows)] == rows).all()
        later = choice_of(await ask(client, messages, **fields, routed_experts_start_len=4))
        patch = np.frombuffer(base64.b64decode(later["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
        shared = min(len(longer) - 4, len(patch))
        assert (patch[:shared] == longer[4:][:shared]).all()
        nested = choice_of(await ask(client, user(), return_routed_experts=True, sim={"experts": {"nested": True}}))
        assert np.array(nested["meta_info"]["routed_experts"]).shape[1:] == (4, 2)
        bare = await client.post(CHAT, json={"messages": user(), "return_routed_experts": True})
        assert bare.json()["sglext"]["routed_experts"]
        topk = choice_of(await ask(client, user(), return_indexer_topk=True))["meta_info"]["indexer_topk"]
        positions = np.frombuffer(base64.b64decode(topk), "<i4").reshape(-1, 2, 8)
        assert (positions <= np.arange(len(positions))[:, None, None]).all()
        beyond = await client.post(CHAT, json={"messages": user(), "routed_experts_start_len": 10_000})
        assert beyond.status_code == 400


async def test_prefix_cache_and_padding_and_versions() -> None:
    async with engine(weight_version="7") as client:
        key = {"x-smg-routing-key": "s1"}
        body = {
            "messages": user(),
            **SGLANG_ASKS,
            "sim": {"body_bytes": 300_000, "weight_versions": ["7", "8"]},
        }
        response = await client.post(CHAT, json=body, headers=key)
        assert len(response.content) == 300_000
        first = choice_of(response.json())
        assert first["meta_info"]["cached_tokens"] == 0
        assert first["meta_info"]["weight_version"] == "8"
        spans = first["meta_info"]["weight_versions"]
        assert spans[0] == {"version": "7", "start": 0, "end": spans[1]["start"]}
        assert spans[1]["end"] == len(first["response_token_ids"])
        body = {"messages": [*user(), first["message"], *user("next")], **SGLANG_ASKS}
        second = choice_of((await client.post(CHAT, json=body, headers=key)).json())
        served = len(first["prompt_token_ids"]) + len(first["response_token_ids"])
        assert second["meta_info"]["cached_tokens"] == served
        whole = choice_of((await client.post(CHAT, json=body)).json())
        assert whole["meta_info"]["cached_tokens"] == len(whole["prompt_token_ids"]) - 1


async def test_vllm_shape() -> None:
    async with engine("vllm", reasoning=0.0) as client:
        body = {"messages": user(), **VLLM_ASKS, "return_routed_experts": True}
        reply = (await client.post(CHAT, json=body)).json()
        choice = choice_of(reply)
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        assert len(ids) == len(content) == reply["usage"]["completion_tokens"]
        assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == choice["message"]["content"]
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert rows.dtype == np.int32
        assert rows.shape == (len(reply["prompt_token_ids"]) + len(ids) - 1, 4, 2)
        emptied = (await client.post(CHAT, json={**body, "top_logprobs": None})).json()
        assert choice_of(emptied)["logprobs"]["content"] == []
        refused = await client.post(CHAT, json={"messages": []})
        assert refused.json()["error"]["code"] == 400


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
async def test_stream_carries_the_same_message(dialect: Dialect) -> None:
    async with engine(dialect) as client:
        plain = choice_of((await client.post(CHAT, json={"messages": user(), "tools": TOOLS})).json())["message"]
        await client.post("/sim/reset")
        body: dict[str, Any] = {
            "messages": user(),
            "tools": TOOLS,
            "stream": True,
            "return_token_ids": dialect == "vllm",
        }
        response = await client.post(CHAT, json={**body, "stream_options": {"include_usage": True}})
        assert response.headers["content-type"] == "text/event-stream"
        events = events_of(response.text)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (plain["content"] or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        for place, call in enumerate(plain.get("tool_calls") or []):
            text = "".join(part["function"]["arguments"] for part in calls if part["index"] == place)
            assert text == call["function"]["arguments"]
        if dialect == "vllm":
            ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
            assert len(ids) == events[-1]["usage"]["completion_tokens"]
            assert events[0]["prompt_token_ids"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"messages": null}',
        b'{"messages": []}',
        b'{"messages": [1]}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "wizard", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "return_meta_info": true}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "return_token_ids": true}',
        b'{"messages": [{"role": "user", "content": "x"}], "sim": {"falt": "typo"}}',
        b'{"messages": [{"role": "user", "content": "x"}], "sim": {"fault": "unheard-of"}}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
async def test_bad_requests_are_flat_400s(body: bytes) -> None:
    async with engine() as client:
        response = await client.post(CHAT, content=body)
        assert response.status_code == 400
        assert set(response.json()) == {"object", "message", "type", "param", "code"}


BROKEN_JSON = {
    "not_json",
    "truncated_json",
    "bad_utf8",
    "nan_logprob",
    "deep_nesting",
    "empty_200",
    "inf_logprob",
}
REPEATED = {
    "duplicate_meta_key": b'"completion_tokens"',
    "duplicate_choices": b'"choices"',
    "duplicate_prompt_ids": b'"prompt_token_ids"',
}
"""Faults that readers of JSON do not see, and the key that stands twice."""
NO_DELIVERY = {"never", "reset", "drip"}


def strict(content: bytes) -> Any:
    def refuse(text: str) -> Any:
        raise ValueError(text)

    def finite(text: str) -> float:
        value = float(text)
        return value if abs(value) < 1e300 else refuse(text)

    return json.loads(content.decode(), parse_constant=refuse, parse_float=finite)


def malformed(dialect: Dialect) -> set[str]:
    """Faults after which a chat's reply must be refused. Of a miscount and another prompt only the caller can tell."""
    told = {"usage_prompt_tokens", "meta_prompt_tokens", "other_prompt", "drip", "abort"}
    payloads = {"bad_experts_base64", "misaligned_experts", "wrong_experts_rows"}
    own = set() if dialect == "sglang" else {"duplicate_meta_key"}
    return {name for name, fault in FAULTS.items() if fault.generates} - told - payloads - own


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("name", sorted(set(FAULTS) - NO_DELIVERY))
async def test_every_fault_shows_once(name: str, dialect: Dialect) -> None:
    async with engine(dialect, reasoning=0.0) as client:
        body = {"messages": user(), **(SGLANG_ASKS if dialect == "sglang" else VLLM_ASKS)}
        good = (await client.post(CHAT, json=body)).content
        await client.post("/sim/reset")
        queued = await client.post("/sim/faults", json={"fault": name})
        assert queued.json() == {"queued": [name]}
        bad = await client.post(CHAT, json=body)
        asked = {"sim": {"fault": name}} if dialect == "sglang" else {}
        if name.startswith("status_"):
            assert bad.status_code == int(name[-3:])
        elif name in BROKEN_JSON:
            with pytest.raises((ValueError, RecursionError)):
                strict(bad.content)
        elif name in REPEATED:
            key = REPEATED[name]
            assert bad.content.count(key) > good.count(key) or (dialect == "vllm" and name == "duplicate_meta_key")
        elif name != "redirect" and not (dialect == "vllm" and name == "completion_tokens_bool"):
            assert stable(bad.content) != stable(good)
        if name in malformed(dialect):
            with pytest.raises(Rejected):
                parse_reply(bad.content, "auto")
        await client.post("/sim/reset")
        after = await client.post(CHAT, json=body)
        assert stable(after.content) == stable(good)
        if asked:
            assert (await client.post(CHAT, json={**body, **asked})).status_code == bad.status_code


def stable(content: bytes) -> Any:
    value = json.loads(content)
    if isinstance(value, dict):
        value.pop("created", None)
        value.pop("id", None)
        for choice in value.get("choices", []):
            choice.get("meta_info", {}).pop("id", None)
    return value


async def test_fault_details() -> None:
    async with engine() as client:
        body = {"messages": user(), **SGLANG_ASKS}

        async def entry(name: str) -> Any:
            response = await client.post(CHAT, json={**body, "sim": {"fault": name}})
            return choice_of(response.json())["meta_info"]["output_token_logprobs"][0]

        assert (await entry("bool_id"))[1] is True
        assert (await entry("huge_id"))[1] == 2**70
        assert (await entry("float_id"))[1] == 1.5
        assert (await entry("null_logprob"))[0] is None
        assert (await entry("minus_9999_logprob"))[0] == -9999.0
        assert (await entry("inf_logprob"))[0] == float("inf")
        await client.post("/sim/faults", json={"fault": "status_429", "count": 2, "retry_after": "3"})
        for _ in range(2):
            limited = await client.post(CHAT, json=body)
            assert (limited.status_code, limited.headers["retry-after"]) == (429, "3")
        fields = {**body, "return_routed_experts": True, "sim": {"fault": "wrong_experts_rows"}}
        wrong = choice_of((await client.post(CHAT, json=fields)).json())
        ids = len(base64.b64decode(wrong["meta_info"]["routed_experts"])) // 4
        assert ids % (4 * 2) == 7
        assert (await client.post("/sim/faults", json={"fault": "nope"})).status_code == 400
