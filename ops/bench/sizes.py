"""Replies of a wanted size: most of one is `routed_experts`, a row for each token of prompt and output but the last."""

from __future__ import annotations

import msgspec

from ops.bench.client import Broken, Connection
from ops.bench.latency import ASK
from ops.bench.load import Script, opening_messages, reply_message

KIB = 1 << 10
MIB = 1 << 20

FEW_TOKENS = 5
"""Output of the smallest replies, whose logprobs would otherwise be all of them."""


class Payload(msgspec.Struct, frozen=True):
    """A routing payload's shape: `layers * top_k` ids a token, as base64 of int32 (1 KiB a token) or nested lists.

    `asked`: the client wants it too, so it passes through to the client; else the engine sends it unasked.
    """

    layers: int = 48
    top_k: int = 4
    nested: bool = False
    asked: bool = True

    @property
    def token_bytes(self) -> float:
        """Bytes of base64 a token."""
        return self.layers * self.top_k * 4 * 4 / 3

    def wish(self) -> dict[str, object]:
        """The simulator's `experts` wish."""
        shape = {"layers": self.layers, "top_k": self.top_k, "experts": 128}
        return {**shape, "nested": self.nested, "unasked": not self.asked}


def script(prompt_bytes: int, completion_tokens: int, payload: Payload | None) -> Script:
    """Sessions that begin with so many bytes of prompt. The client asks for all that Turnlog would ask for."""
    sim: dict[str, object] = {"completion_tokens": completion_tokens, "tool_calls": False, "reasoning": False}
    more = ASK
    if payload is not None:
        sim["experts"] = payload.wish()
        more += b',"return_routed_experts":true' if payload.asked else b""
    return Script(opening_messages(prompt_bytes), msgspec.json.encode(sim), more)


async def fitted(
    engine_url: str, wanted: int, turns: int, payload: Payload | None = None, completion_tokens: int = FEW_TOKENS
) -> Script:
    """Sessions of so many turns whose replies have `wanted` bytes on the average; the engine is asked what fits.

    A reply's size is a line over the prompt's, so two small prompts tell it. Raises Broken.
    """
    guess = wanted if payload is None else int(wanted / payload.token_bytes * 4)
    small, large = max(guess // 8, 40), max(guess // 2, 400)
    async with await Connection.connect(engine_url) as engine:
        at_small = await _mean_size(engine, script(small, completion_tokens, payload), turns)
        at_large = await _mean_size(engine, script(large, completion_tokens, payload), turns)
    slope = (at_large - at_small) / (large - small)
    return script(max(40, round(small + (wanted - at_small) / slope)), completion_tokens, payload)


async def warm(engine_url: str, made: Script, turns: int) -> None:
    """Let the engine make each reply of a session once, so that no measured turn waits for that. Raises Broken."""
    async with await Connection.connect(engine_url) as engine:
        await _mean_size(engine, made, turns, all_turns=True)


async def _mean_size(engine: Connection, made: Script, turns: int, *, all_turns: bool = False) -> float:
    """Bytes of a reply, the mean of a session's first and last; the middle ones lie between."""
    conversation = made.begin()
    sizes: list[int] = []
    while conversation.turns < (turns if all_turns else min(turns, 2)):
        response = await engine.request("POST", "/v1/chat/completions", conversation.body())
        if response.status != 200:
            raise Broken(f"the engine answered {response.status}: {response.body[:200]!r}")
        sizes.append(len(response.body))
        conversation.answered(reply_message(response.body))
    return sizes[0] + (sizes[-1] - sizes[0]) / max(len(sizes) - 1, 1) * (turns - 1) / 2
