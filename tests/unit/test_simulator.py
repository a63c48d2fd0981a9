"""The engine simulator: canonical ids, what it does as ordered, faults that a reader refuses, its prefix cache."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from helpers.amounts import cases
from helpers.replies import parse_reply

from ops.simulator.app import Simulator
from ops.simulator.faults import FAULTS
from ops.simulator.prefixes import PrefixCache
from ops.simulator.tokenizer import Tokenizer
from ops.simulator.wire import ChatRequest, Config, Dialect, Sim
from workers.parse import PromptDiffers, Rejected, VersionSpan, token_text

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
        draft = policy.within(policy.whole(conversation, request, continuing=False), request)
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
            second = choice_of(await ask(client, [*messages, first["message"], *user("go on")]))
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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


async def complete(client: httpx.AsyncClient, prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json={"prompt": prompt, **COMPLETION_ASKS, **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", ["text", "ids", "a list of one text", "a list of one prompt's ids"])
async def test_a_prompt_is_text_or_ids(dialect: Dialect, form: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.ids(TEXT) if "text" in form else [5, 2**31 - 1, 0, 7]
    prompt: Any = {"text": TEXT, "ids": ids, "a list of one text": [TEXT]}.get(form, [ids])
    async with engine(dialect) as client:
        reply = await complete(client, prompt)
        (choice,) = reply["choices"]
        assert choice["prompt_token_ids"] == ids
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 16, "max_tokens is 16"
        assert choice["finish_reason"] == "length"
        assert tokenizer.decode(choice["token_ids"]) == choice["text"]
        assert reply["object"] == "text_completion"
        assert reply["usage"]["prompt_tokens"] == len(ids)
        bare = (await client.post(COMPLETIONS, json={"prompt": prompt})).json()["choices"][0]
        assert bare["logprobs"] is None
        assert not bare.get("token_ids")
        assert not bare.get("prompt_token_ids")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_the_validator_reads(dialect: Dialect) -> None:
    async with engine(dialect, weight_version="7", cache_report=True) as client:
        for number in range(20):
            ids = [*range(number + 1)]
            body = {
                "prompt": ids,
                **COMPLETION_ASKS,
                "max_tokens": 60,
                "return_weight_versions": True,
                "return_routed_experts": True,
                "sim": {"weight_versions": ["7", "8"]},
            }
            response = await client.post(COMPLETIONS, json=body)
            (choice,) = response.json()["choices"]
            parsed = parse_reply(response.content, "auto", protocol="completions", sent=token_text(ids))
            assert parsed.dialect == dialect
            assert array("i", parsed.output_ids).tolist() == choice["token_ids"]
            assert array("d", parsed.logprobs).tolist() == choice["logprobs"]["token_logprobs"]
            assert json.loads(parsed.message) == choice["text"]
            half = parsed.weight_versions[0].end
            assert parsed.weight_versions == [
                VersionSpan("7", 0, half),
                VersionSpan("8", half, len(choice["token_ids"])),
            ]
            assert parsed.cached_tokens == number
            ((kind, raw),) = parsed.payloads
            data = base64.b64decode(json.loads(bytes(raw)))
            rows = np.load(io.BytesIO(data)) if dialect == "vllm" else np.frombuffer(data, "<i4").reshape(-1, 4, 2)
            assert kind == "routed_experts"
            assert len(rows) == len(ids) + len(choice["token_ids"]) - 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_end_a_limit_and_a_stop_string(dialect: Dialect, tokenizer: Tokenizer) -> None:
    reason = "matched_stop" if dialect == "sglang" else "stop_reason"
    async with engine(dialect) as client:
        (whole,) = (await complete(client, max_tokens=500))["choices"]
        assert whole["finish_reason"] == "stop"
        end = tokenizer.special_ids["<|im_end|>"]
        assert whole["token_ids"][-1] == end
        assert whole[reason] == (end if dialect == "sglang" else None)
        assert whole["text"] == tokenizer.decode(whole["token_ids"][:-1])
        stop = whole["text"][20:26]
        await client.post("/sim/reset")
        (cut,) = (await complete(client, max_tokens=500, stop=["never said", stop]))["choices"]
        assert (cut["finish_reason"], cut[reason]) == ("stop", stop)
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        ids = cut["token_ids"]
        assert ids == whole["token_ids"][: len(ids)]
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])
        await client.post("/sim/reset")
        assert (await complete(client, max_tokens=500, stop="never said"))["choices"] == [whole]
        (aborted,) = (await complete(client, max_tokens=500, sim={"finish_reason": "abort"}))["choices"]
        assert aborted["finish_reason"] == "abort"
        (short,) = (await complete(client, max_tokens=3))["choices"]
        assert (len(short["token_ids"]), short["finish_reason"], short[reason]) == (3, "length", None)


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


async def in_flight(client: httpx.AsyncClient, count: int) -> None:
    while (await client.get("/sim/stats")).json()["in_flight"] != count:
        await asyncio.sleep(0.005)


async def test_abort_by_prefix_keeps_the_tokens_so_far() -> None:
    async with engine(latency_s=600.0) as client:
        long = {"sim": {"completion_tokens": 600_000}}
        asked = asyncio.create_task(ask(client, user(), rid="group-1:turn-2", **long))
        other = asyncio.create_task(ask(client, user("other"), rid="other", sim={"latency_s": 0.3}))
        await in_flight(client, 2)
        await asyncio.sleep(0.1)
        assert (await client.post("/abort_request", json={"rid": "group-1"})).content == b""
        choice = choice_of(await asked)
        assert choice["finish_reason"] == choice["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(choice["response_token_ids"]) < 600_000
        assert choice_of(await other)["finish_reason"] != "abort"
        stats = (await client.get("/sim/stats")).json()
        assert (stats["started"], stats["finished"], stats["aborted"], stats["in_flight"]) == (2, 2, 1, 0)


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


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def leading(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


def test_against_a_list_of_all_sequences() -> None:
    """While nothing is dropped, a hit is the longest prefix that any sequence shares."""
    rng = random.Random(6)
    cache = PrefixCache(10**6)
    seen: list[list[int]] = []
    for _ in range(cases(4000)):
        base = rng.choice(seen)[: rng.randint(0, 40)] if seen and rng.random() < 0.8 else []
        sequence = base + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        longest = max((leading(sequence, other) for other in seen), default=0)
        assert cache.cached(packed(sequence)) == min(longest, len(sequence) - 1)
        cache.served(packed(sequence))
        seen.append(sequence)
    prefixes = {tuple(sequence[:end]) for sequence in seen for end in range(1, len(sequence) + 1)}
    assert cache.tokens == len(prefixes)


def test_the_ends_of_the_oldest_sequences_go_first() -> None:
    cache = PrefixCache(100)
    system = list(range(20))
    sessions = [system + [1000 * number + place for place in range(30)] for number in range(1, 4)]
    for sequence in sessions[:2]:
        cache.served(packed(sequence))
    assert cache.tokens == 80
    cache.served(packed(sessions[2]))
    assert cache.tokens == 100
    assert [cache.cached(packed([*sequence, 7])) for sequence in sessions] == [40, 50, 50]
    cache.served(packed(sessions[0]))
    assert [cache.cached(packed([*sequence, 7])) for sequence in sessions] == [50, 40, 50]


def test_many_sequences_through_a_small_cache() -> None:
    """Whatever is dropped, the bound holds and what is newest is there."""
    rng = random.Random(7)
    cache = PrefixCache(60)
    for _ in range(3000):
        sequence = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        cache.served(packed(sequence))
        assert cache.tokens <= 60
        assert cache.cached(packed([*sequence, 9])) == len(sequence)
    cache.served(packed(list(range(100))))
    assert (cache.tokens, cache.cached(packed(list(range(100))))) == (60, 60)
    cache.clear()
    assert (cache.tokens, cache.cached(packed([1, 2]))) == (0, 0)


async def chat(client: httpx.AsyncClient, *texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
    response = await client.post(CHAT, json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def stats(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/sim/stats")).json()
    return found


async def test_sessions_share_what_they_begin_with() -> None:
    async with engine(cache_report=True) as client:
        rules = "These are the rules of the house. " * 20
        first = (await chat(client, rules + "One."))["usage"]
        second = (await chat(client, rules + "Two."))["usage"]
        hit = second["prompt_tokens_details"]["cached_tokens"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert 100 < hit < second["prompt_tokens"] - 1
        again = (await chat(client, rules + "Two."))["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
        found = await stats(client)
        assert found["prompt_tokens"] == sum(one["prompt_tokens"] for one in (first, second, again))
        assert found["prefix_hit_tokens"] == hit + again["prompt_tokens"] - 1


async def test_health_hangs_while_paused_but_not_model_info() -> None:
    async with engine() as client:
        await client.post("/pause_generation", json={})
        health = asyncio.create_task(client.get("/health"))
        assert (await client.get("/model_info")).status_code == 200
        await asyncio.sleep(0.05)
        assert not health.done()
        await client.post("/continue_generation", json={})
        assert (await health).status_code == 200
        await client.post("/pause_generation", json={})
        await client.post("/sim/behaviour", json={"health_hangs_when_paused": False})
        assert (await client.get("/health")).status_code == 200
        await client.post("/sim/behaviour", json={"health": "error"})
        assert (await client.get("/health")).status_code == 500
        found = await stats(client)
        assert (found["probes"], found["requests"][-1]["path"]) == (
            {"/health": 3, "/model_info": 1},
            "/pause_generation",
        )
