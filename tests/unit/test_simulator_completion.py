"""The simulator's `/v1/completions`: prompts, limits, both dialects' shapes, faults; and its other prompt for chat."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from array import array
from typing import Any

import httpx
import numpy as np
import pytest
from simulating import CHAT, SGLANG_ASKS, engine

from ops.simulator.config import Dialect
from ops.simulator.faults import FAULTS
from ops.simulator.tokenizer import Tokenizer
from workers.parse import PromptDiffers, Rejected, Span, parse_reply, token_text

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
ASKS = {"logprobs": 0, "return_token_ids": True}
CHAT_ASKS = {**SGLANG_ASKS, "top_logprobs": 0}
DIALECTS: list[Dialect] = ["sglang", "vllm"]
TEXT = "Once upon a time, in Zürich 🚀"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


async def ask(client: httpx.AsyncClient, prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"prompt": prompt, **ASKS, **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", ["text", "ids", "a list of one text", "a list of one prompt's ids"])
async def test_a_prompt_is_text_or_ids(dialect: Dialect, form: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.ids(TEXT) if "text" in form else [5, 2**31 - 1, 0, 7]
    prompt: Any = {"text": TEXT, "ids": ids, "a list of one text": [TEXT]}.get(form, [ids])
    async with engine(dialect) as client:
        reply = await ask(client, prompt)
        (choice,) = reply["choices"]
        assert choice["prompt_token_ids"] == ids
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 16, "max_tokens is 16"
        assert choice["finish_reason"] == "length"
        assert tokenizer.decode(choice["token_ids"]) == choice["text"]
        assert reply["object"] == "text_completion"
        assert reply["usage"]["prompt_tokens"] == len(ids)
        bare = (await client.post(PATH, json={"prompt": prompt})).json()["choices"][0]
        assert bare["logprobs"] is None
        assert not bare.get("token_ids")
        assert not bare.get("prompt_token_ids")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_the_validator_reads(dialect: Dialect) -> None:
    async with engine(dialect, weight_version="7") as client:
        for number in range(20):
            ids = [*range(number + 1)]
            body = {
                "prompt": ids,
                **ASKS,
                "max_tokens": 60,
                "return_weight_versions": True,
                "return_routed_experts": True,
                "sim": {"weight_versions": ["7", "8"]},
            }
            response = await client.post(PATH, json=body)
            (choice,) = response.json()["choices"]
            parsed = parse_reply(response.content, "auto", protocol="completions", sent=token_text(ids))
            assert parsed.dialect == dialect
            assert array("i", parsed.output_ids).tolist() == choice["token_ids"]
            assert array("d", parsed.logprobs).tolist() == choice["logprobs"]["token_logprobs"]
            assert json.loads(parsed.message) == choice["text"]
            half = parsed.weight_versions[0].end
            assert parsed.weight_versions == [Span("7", 0, half), Span("8", half, len(choice["token_ids"]))]
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
        (whole,) = (await ask(client, max_tokens=500))["choices"]
        assert whole["finish_reason"] == "stop"
        end = tokenizer.special_ids["<|im_end|>"]
        assert whole["token_ids"][-1] == end
        assert whole[reason] == (end if dialect == "sglang" else None)
        assert whole["text"] == tokenizer.decode(whole["token_ids"][:-1])
        stop = whole["text"][20:26]
        await client.post("/sim/reset")
        (cut,) = (await ask(client, max_tokens=500, stop=["never said", stop]))["choices"]
        assert (cut["finish_reason"], cut[reason]) == ("stop", stop)
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        ids = cut["token_ids"]
        assert ids == whole["token_ids"][: len(ids)]
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])
        await client.post("/sim/reset")
        assert (await ask(client, max_tokens=500, stop="never said"))["choices"] == [whole]
        (aborted,) = (await ask(client, max_tokens=500, sim={"finish_reason": "abort"}))["choices"]
        assert aborted["finish_reason"] == "abort"
        (short,) = (await ask(client, max_tokens=3))["choices"]
        assert (len(short["token_ids"]), short["finish_reason"], short[reason]) == (3, "length", None)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_echoed_prompt_is_no_sound_completion(dialect: Dialect) -> None:
    """What engines do: the prompt's logprobs come first, the first of them null."""
    async with engine(dialect) as client:
        response = await client.post(PATH, json={"prompt": TEXT, **ASKS, "logprobs": 1, "echo": True})
        (choice,) = response.json()["choices"]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"]) + len(choice["token_ids"])
        assert choice["text"].startswith(TEXT) is (dialect == "sglang")
        with pytest.raises(Rejected):
            parse_reply(response.content, "auto", protocol="completions")
        (silent,) = (await client.post(PATH, json={"prompt": TEXT, "echo": True})).json()["choices"]
        assert silent["text"].startswith(TEXT)


async def test_logprobs_of_each_dialect() -> None:
    async with engine("vllm") as client:
        (choice,) = (await ask(client))["choices"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert [choice["text"][at] for at in logprobs["text_offset"]] == [token[0] for token in logprobs["tokens"]]
        pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        assert logprobs["top_logprobs"] == [{token: value} for token, value in pairs]
    async with engine() as client:
        (choice,) = (await ask(client))["choices"]
        assert choice["logprobs"]["top_logprobs"] == []
        assert set(choice["logprobs"]["text_offset"]) == {-1}
        (choice,) = (await ask(client, logprobs=2))["choices"]
        assert len(choice["logprobs"]["top_logprobs"]) == 16


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": None},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
        {"prompt": 3},
        {"prompt": {}},
        {"prompt": [1, "x"]},
        {"prompt": [1.5]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2]], "n": 2},
        {"prompt": "x", "n": 2},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "logprobs": -1},
        {"prompt": "x", "logprobs": True},
        {"prompt": "x", "stop": 3},
        {"prompt": "x", "stream": True},
        {"prompt": "x", "sim": {"fault": "unheard-of"}},
        {"prompt": "x", "routed_experts_start_len": 1000},
    ],
)
async def test_bad_requests(fields: dict[str, Any]) -> None:
    async with engine() as client:
        refused = await client.post(PATH, json=fields)
        assert refused.status_code == 400
        assert set(refused.json()) == {"object", "message", "type", "param", "code"}
        assert (await client.get("/sim/stats")).json()["refused"] == 1
        assert (await client.get(PATH)).status_code == 404


async def test_a_seeded_answer_and_a_prompt_of_its_own() -> None:
    async with engine(seed=5) as client:
        first, again, other = [(await ask(client, prompt))["choices"][0]["text"] for prompt in (TEXT, TEXT, "else")]
        await client.post("/sim/reset")
        assert (await ask(client))["choices"][0]["text"] == first
        assert len({first, again, other}) == 3


async def test_latency_abort_versions_and_the_prefix_cache() -> None:
    async with engine(latency_s=1.0, weight_version="1") as client:
        asked = asyncio.create_task(ask(client, rid="group:1", max_tokens=900, sim={"completion_tokens": 800}))
        while (await client.get("/sim/stats")).json()["in_flight"] != 1:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        await client.post("/update_weight_version", json={"new_version": "2", "abort_all_requests": False})
        await asyncio.sleep(0.05)
        await client.post("/abort_request", json={"rid": "group"})
        reply = await asked
        (choice,) = reply["choices"]
        assert (reply["id"], choice["finish_reason"]) == ("group:1", "abort")
        assert 0 < len(choice["token_ids"]) < 700
        assert [span["version"] for span in reply["metadata"]["weight_versions"]] == ["1", "2"]
        whole = choice["prompt_token_ids"] + choice["token_ids"]
        later = await ask(client, [*whole, 7], sim={"latency_s": 0})
        assert later["usage"]["prompt_tokens_details"] == {"cached_tokens": len(whole)}


SOUND_OR_DELIVERY = {
    "never",
    "reset",
    "drip",
    "abort",
    "wrong_experts_rows",
    "bad_experts_base64",
    "misaligned_experts",
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", sorted(set(FAULTS) - SOUND_OR_DELIVERY))
async def test_every_fault_spoils_a_completion(name: str, dialect: Dialect) -> None:
    async with engine(dialect) as client:
        body = {"prompt": [5, 6, 7], **ASKS}
        bad = await client.post(PATH, json={**body, "sim": {"fault": name}})
        if not FAULTS[name].generates and name != "empty_200":
            assert bad.status_code >= 300
            return
        assert bad.status_code == 200
        sent = None if name == "missing_prompt_ids" else token_text([5, 6, 7])
        if name.endswith("prompt_tokens"):
            assert parse_reply(bad.content, "auto", protocol="completions", sent=sent).miscounted
        else:
            with pytest.raises(Rejected) as raised:
                parse_reply(bad.content, "auto", protocol="completions", sent=sent)
            assert isinstance(raised.value, PromptDiffers) is (name == "other_prompt")
        good = await client.post(PATH, json=body)
        parsed = parse_reply(good.content, "auto", protocol="completions", sent=token_text([5, 6, 7]))
        assert (parsed.dialect, parsed.miscounted) == (dialect, None)


@pytest.mark.parametrize("name", ["bad_experts_base64", "misaligned_experts", "wrong_experts_rows"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_faults_of_payloads(name: str, dialect: Dialect) -> None:
    async with engine(dialect) as client:
        body = {"prompt": [5, 6, 7], **ASKS, "return_routed_experts": True}
        good, bad = [
            dict(parse_reply((await client.post(PATH, json=fields)).content, dialect, protocol="completions").payloads)
            for fields in (body, {**body, "sim": {"fault": name}})
        ]
        assert bytes(good["routed_experts"]) != bytes(bad["routed_experts"])


async def test_vllms_chat_does_not_know_input_ids() -> None:
    async with engine("vllm") as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "input_ids": [5, 6, 7], **CHAT_ASKS}
        assert json.loads((await client.post(CHAT, json=body)).content)["prompt_token_ids"] != [5, 6, 7]


async def test_another_prompt_in_a_chat_reply() -> None:
    async with engine("sglang") as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "input_ids": [5, 6, 7], **CHAT_ASKS}
        for fault, differs in (({}, False), ({"sim": {"fault": "other_prompt"}}, True)):
            content = (await client.post(CHAT, json={**body, **fault})).content
            prompt = json.loads(content)
            ids = prompt.get("prompt_token_ids") or prompt["choices"][0]["prompt_token_ids"]
            assert (ids == [5, 6, 7]) is not differs
            if differs:
                with pytest.raises(PromptDiffers, match="from token 1 on"):
                    parse_reply(content, "auto", sent=token_text([5, 6, 7]))
            else:
                assert parse_reply(content, "auto", sent=token_text([5, 6, 7])).dialect == "sglang"


async def test_weight_versions_of_vllms_chat_reply() -> None:
    async with engine("vllm", weight_version="9") as client:
        body = {"messages": [{"role": "user", "content": "hi"}], **CHAT_ASKS, "return_weight_versions": True}
        parsed = parse_reply((await client.post(CHAT, json=body)).content, "auto")
        assert parsed.weight_versions == [Span("9", 0, len(parsed.output_ids) // 4)]


async def test_a_padded_body_has_its_length() -> None:
    for dialect in DIALECTS:
        async with engine(dialect) as client:
            body = {"prompt": "x", **ASKS, "return_routed_experts": True, "sim": {"body_bytes": 100_000}}
            response = await client.post(PATH, json=body)
            assert len(response.content) == 100_000
            parse_reply(response.content, dialect, protocol="completions")
