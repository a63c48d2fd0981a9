"""An engine that answers in SGLang's shape what follows from the messages, after a while, and sometimes otherwise.

A reply's content names the messages that were asked and the generation: whoever gets it can tell whether it is the
answer to his own question, and two generations of one request differ.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from app.upstream.body import Body
from app.upstream.client import EngineClient, EngineReply, Grow, Lost, NotSent, TimedOut
from app.upstream.headers import Headers
from ops.simulation.weather import Weather

LONG_S = 30.0
"""A generation that takes longer than any lease."""

EXPERTS = 2
"""Ids in a row of `routed_experts`."""

Message = Mapping[str, Any]


def digest(messages: Sequence[Message]) -> str:
    """What a reply to these messages names them by."""
    return hashlib.sha256(msgspec.json.encode(messages, order="sorted")).hexdigest()[:12]


def token_ids(text: str) -> list[int]:
    """Two to five ids that follow from the text."""
    raw = hashlib.sha256(text.encode()).digest()
    return [raw[at] << 8 | raw[at + 1] for at in range(2, 6 + 2 * (raw[0] % 4), 2)]


class SimulatedEngine(EngineClient):
    """Stands where a process's HTTP client does. The weather says how often it fails, and how slow it is."""

    def __init__(self, rng: random.Random, weather: Weather, note: Callable[[str], None]) -> None:
        self._rng = rng
        self._weather = weather
        self._note = note
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        return

    async def get(self, url: str, headers: Headers) -> EngineReply:
        await self._sleep(self._weather.network_s)
        return EngineReply(200, [], Body([b"{}"]))

    async def post(self, url: str, body: bytes, headers: Headers, grow: Grow = lambda size: None) -> EngineReply:
        await self._sleep(self._weather.network_s)
        if url.endswith("/abort_request"):
            return EngineReply(200, [], Body([b"{}"]))
        number = next(self._numbers)
        bad = self._weather.is_bad and self._rng.random() < self._weather.engine_faults
        how = self._rng.choice(FAULTS) if bad else None
        self._note(f"generation {number} of {dict(headers)['x-smg-routing-key']}{'' if how is None else f': {how}'}")
        if how == "not_sent":
            raise NotSent("refused")
        if how == "lost":
            await self._sleep(self._weather.engine_s)
            raise Lost("reset")
        if how == "timed_out":
            await asyncio.sleep(LONG_S)
            raise TimedOut("no answer in time")
        await (asyncio.sleep(LONG_S) if how == "slow" else self._sleep(self._weather.engine_s))
        if how is not None and how.isdigit():
            return EngineReply(int(how), [("content-type", "application/json")], Body([b'{"error":{"message":"no"}}']))
        raw = _broken(reply(body, number), how)
        grow(len(raw))
        return EngineReply(200, [("content-type", "application/json")], Body([raw]))

    async def _sleep(self, mean_s: float) -> None:
        await asyncio.sleep(self._rng.expovariate(1 / mean_s))


FAULTS = ("not_sent", "lost", "timed_out", "slow", "500", "429", "400", "cut", "no_ids", "nan", "not_json", "307")


def reply(body: bytes, number: int) -> dict[str, Any]:
    """A sound reply to a request. Prompts continue: a message's ids are the same wherever it stands."""
    request = msgspec.json.decode(body)
    messages = request["messages"]
    content = f"{digest(messages)}/{number}"
    prompt = [token for message in messages for token in token_ids(message["content"])]
    output = token_ids(content)
    meta: dict[str, Any] = {
        "id": request.get("rid", ""),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "weight_version": str(1 + number // 8),
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0 / (1 + token), token, None] for token in output],
    }
    if request.get("return_routed_experts"):
        rows = array("i", [(token >> shift) & 63 for token in (prompt + output)[:-1] for shift in range(EXPERTS)])
        meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
        "prompt_token_ids": prompt,
        "meta_info": meta,
    }
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "simulated", "choices": [choice]}


def _broken(sound: dict[str, Any], how: str | None) -> bytes:
    meta = sound["choices"][0]["meta_info"]
    if how == "no_ids":
        del meta["output_token_logprobs"]
    raw = msgspec.json.encode(sound)
    if how == "cut":
        return raw[: len(raw) // 2]
    if how == "nan":
        return raw.replace(b'"output_token_logprobs":[[', b'"output_token_logprobs":[[NaN,', 1)
    return b"<html>busy</html>" if how == "not_json" else raw
