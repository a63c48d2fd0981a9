"""Random answers of the simulator, cut at random tokens and joined: nothing tells them from those that were not cut."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from helpers.replies import parse_reply

from ops.simulator.app import Simulator
from ops.simulator.wire import Config, Dialect
from workers.join import Piece, Shape, join, stopped
from workers.parse import Protocol, VersionSpan

CASES = 200
PATIENCE_S = 60.0

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = "Hello there, and tell me what you think of all of this and that, and of the rest of it"
STOPS = [" the", "e ", "ing", "\n", "Z", " мир", "an"]

Fields = dict[str, Any]


async def _never() -> None:
    await asyncio.sleep(PATIENCE_S)


class Cutting:
    """One engine, one route, and a way to ask it in pieces."""

    def __init__(self, dialect: Dialect, protocol: Protocol) -> None:
        self.simulator = Simulator(Config(dialect=dialect, seed=5))
        self.dialect: Dialect = dialect
        self.protocol: Protocol = protocol

    async def ask(self, body: Fields) -> Fields:
        path = "/v1/chat/completions" if self.protocol == "chat" else "/v1/completions"
        reply = await self.simulator.generate(path, json.dumps(body).encode(), _never)
        assert reply is not None
        assert reply.status == 200, reply.body
        found: Fields = json.loads(reply.body)
        return found

    async def whole(self, body: Fields) -> Fields:
        self.simulator.engine.reset()
        return await self.ask(body)

    async def joined(self, body: Fields, rng: random.Random, stops: list[str]) -> Fields:
        self.simulator.engine.reset()
        prompt: list[int] | None = None
        tokens: list[int] = []
        pieces: list[Piece] = []
        for _ in range(rng.randint(1, 4)):
            shape, done = await self._add(pieces, body, prompt, tokens, stops, rng.randint(0, 12))
            prompt = prompt or done["prompt"]
            tokens += done["tokens"]
            is_spent = len(tokens) == body.get("max_tokens")
            if not done["aborted"] or is_spent or stopped(pieces, shape) is not None:
                break
        else:
            shape, done = await self._add(pieces, body, prompt, tokens, stops, None)
        stop = stopped(pieces, shape)
        text = join(pieces, shape, stop=stop, finish="length" if stop is None and done["aborted"] else None)
        parse_reply(text, self.dialect, None, self.protocol)
        found: Fields = json.loads(text)
        return found

    async def _add(
        self,
        pieces: list[Piece],
        body: Fields,
        prompt: list[int] | None,
        tokens: list[int],
        stops: list[str],
        cut: int | None,
    ) -> tuple[Shape, Fields]:
        asked = {**body, "sim": {**body["sim"]}}
        first_row = 0
        if cut is not None:
            asked["sim"]["fault"] = {"fault": "abort", "tokens": cut}
        if prompt is not None:
            asked["input_ids" if self.protocol == "chat" else "prompt"] = prompt + tokens
            first_row = len(prompt) + len(tokens) - 1
            asked |= {"routed_experts_start_len": first_row, "routed_experts_prompt_start": first_row}
            if "max_tokens" in body:
                asked["max_tokens"] = body["max_tokens"] - len(tokens)
        reply = await self.ask(asked)
        [choice] = reply["choices"]
        parsed = parse_reply(json.dumps(reply).encode(), self.dialect, None, self.protocol)
        ids = memoryview(parsed.output_ids).cast("i").tolist()
        seen = choice["prompt_token_ids"]
        rows = {"routed_experts": (first_row, len(seen) + len(ids) - 1)}
        if self.protocol == "chat":
            rows["indexer_topk"] = (0, rows["routed_experts"][1])
        versions = [VersionSpan(span.version, span.start, span.end) for span in parsed.weight_versions]
        pieces.append(Piece(json.dumps(reply).encode(), len(ids), versions, rows))
        shape = Shape(
            dialect=self.dialect,
            protocol=self.protocol,
            prompt_tokens=len(prompt or seen),
            stops=stops,
            has_tools="tools" in body,
        )
        return shape, {"prompt": seen, "tokens": ids, "aborted": choice["finish_reason"] == "abort"}


def as_said(reply: Fields) -> Fields:
    """Without what no two have in common."""
    said = copy.deepcopy(reply)
    del said["id"], said["created"]
    said["usage"].pop("prompt_tokens_details")
    for choice in said["choices"]:
        for name in ("id", "cached_tokens", "e2e_latency"):
            choice.get("meta_info", {}).pop(name, None)
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            call["id"] = number
    return said


def wish(rng: random.Random, protocol: Protocol) -> Fields:
    sim: Fields = {"completion_tokens": rng.randint(1, 70), "reasoning": rng.random() < 0.5}
    body: Fields = {"sim": sim, "return_routed_experts": True, "return_token_ids": True, "temperature": 1}
    if rng.random() < 0.4:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    if rng.random() < 0.4:
        body["max_tokens"] = rng.randint(1, 60)
    if protocol == "completions":
        return {"max_tokens": 100, **body, "prompt": ASKED, "logprobs": 0, "return_weight_versions": True}
    body |= {"messages": [{"role": "user", "content": ASKED}], "logprobs": True}
    body |= {"return_meta_info": True, "return_prompt_token_ids": True, "return_indexer_topk": True}
    if rng.random() < 0.5:
        body["tools"] = [WEATHER]
        sim["tool_calls"] = True
    return body


@pytest.mark.parametrize(
    ("dialect", "protocol"), [("sglang", "chat"), ("sglang", "completions"), ("vllm", "completions")]
)
def test_cut_anywhere(dialect: Dialect, protocol: Protocol) -> None:
    cutting = Cutting(dialect, protocol)
    rng = random.Random(f"{dialect} {protocol}")

    async def all_cases() -> None:
        for _ in range(CASES):
            body = wish(rng, protocol)
            assert as_said(await cutting.joined(body, rng, body.get("stop", []))) == as_said(
                await cutting.whole(body)
            ), body

    asyncio.run(all_cases())
