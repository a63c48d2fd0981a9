"""Replies of a chosen size.

Most of a large reply is `routed_experts`: a row for each token of prompt and output but the last.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ops.bench.client import Broken, Connection
from ops.bench.sessions import Script, opening_messages, reply_message

REQUESTED_FIELDS = (
    b',"logprobs":true,"top_logprobs":0,"return_meta_info":true,"return_prompt_token_ids":true,"return_token_ids":true'
)
"""The fields that Turnlog adds to a request for an engine. The client sends them too, so that an engine called directly
has the same work."""

KIB = 1 << 10
MIB = 1 << 20

FEW_TOKENS = 5
"""Output tokens of the smallest replies; with more, their logprobs alone would exceed the size."""


LAYERS, TOP_K = 48, 4
TOKEN_BYTES = LAYERS * TOP_K * 4 * 4 / 3
"""Bytes of `routed_experts` for each token: int32 ids in base64, 1 KiB."""


def _script(prompt_bytes: int, completion_tokens: int) -> Script:
    """A script whose sessions begin with `prompt_bytes` of prompt."""
    sim: dict[str, object] = {"completion_tokens": completion_tokens, "tool_calls": False, "reasoning": False}
    more = REQUESTED_FIELDS
    if completion_tokens > FEW_TOKENS:
        sim["experts"] = {"layers": LAYERS, "top_k": TOP_K, "experts": 128}
        more += b',"return_routed_experts":true'
    return Script(opening_messages(prompt_bytes), msgspec.json.encode(sim), more)


class Size(NamedTuple):
    """A size of replies, with the load to measure it. `ideal_ms` is the measured CPU in ms of a whole durable turn in a
    pipeline without a server; None: not measured."""

    reply_bytes: int
    clients: int
    turns_per_session: int
    completion_tokens: int
    ideal_ms: float | None

    async def script(self, engine_url: str) -> Script:
        """A script whose replies have the size on average. The engine has generated each of them once. Raises Broken.

        The size of a reply is linear in the size of the prompt, so two small prompts determine it.
        """
        with_payload = self.completion_tokens > FEW_TOKENS
        guess = int(self.reply_bytes / TOKEN_BYTES * 4) if with_payload else self.reply_bytes
        small, large = max(guess // 8, 40), max(guess // 2, 400)
        async with await Connection.connect(engine_url) as engine:
            at_small = await self._mean_size(engine, _script(small, self.completion_tokens), 2)
            at_large = await self._mean_size(engine, _script(large, self.completion_tokens), 2)
            slope = (at_large - at_small) / (large - small)
            prompt = max(40, round(small + (self.reply_bytes - at_small) / slope))
            made = _script(prompt, self.completion_tokens)
            await self._mean_size(engine, made, self.turns_per_session)
        return made

    async def _mean_size(self, engine: Connection, made: Script, turns: int) -> float:
        """Mean bytes of a reply over a session, from its first and its last, since the size grows linearly."""
        conversation = made.begin()
        sizes: list[int] = []
        while conversation.turns < turns:
            response = await engine.request("POST", "/v1/chat/completions", conversation.body())
            if response.status != 200:
                raise Broken(f"the engine answered {response.status}: {response.body[:200]!r}")
            sizes.append(len(response.body))
            conversation.answered(reply_message(response.body))
        return sizes[0] + (sizes[-1] - sizes[0]) / max(len(sizes) - 1, 1) * (self.turns_per_session - 1) / 2


SIZES = {
    "2KiB": Size(2 * KIB, 64, 8, FEW_TOKENS, 0.19),
    "100KiB": Size(100 * KIB, 64, 4, 10, None),
    "1.3MiB": Size(13 * MIB // 10, 64, 8, 32, 2.7),
    "50MiB": Size(50 * MIB, 2, 4, 200, 140.0),
}
