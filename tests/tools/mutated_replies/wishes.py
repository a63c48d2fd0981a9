"""What the clients ask for, so that the replies to be mutated are of every sort that an engine gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TEXTS = ("Zürich 東京 🚀", 'a "quoted" word\nand a \\ backslash', "мир", "/// ++ ==", "plain words", "\u2028 \u00a0")

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "object"}},
            "required": ["text"],
        },
    },
}


ALL = ("logprobs", "return_token_ids", "return_meta_info", "return_weight_versions")


@dataclass(frozen=True, slots=True)
class Habit:
    """What stays the same for a session: the engine's dialect, the kinds of payload its client asks for itself, and
    whether it also asks for all that Turnlog does."""

    dialect: str
    asks: frozenset[str]
    start: int
    payloads: bool
    width: tuple[int, int]
    nested: bool
    tools: bool
    asks_for_all: bool


def habit(rng: random.Random) -> Habit:
    """A session's habit. Payloads come unasked to most, so that they are there whatever the server asks for."""
    asks = frozenset({"routed_experts"} if rng.random() < 0.25 else ())
    return Habit(
        dialect="sglang" if rng.random() < 0.6 else "vllm",
        asks=asks,
        start=rng.randint(0, 3) if asks and rng.random() < 0.2 else 0,
        payloads=rng.random() < 0.6,
        width=(rng.randint(1, 2), rng.randint(1, 3)),
        nested=rng.random() < 0.15,
        tools=rng.random() < 0.3,
        asks_for_all=rng.random() < 0.3,
    )


def request(rng: random.Random, habit: Habit) -> dict[str, Any]:
    """A chat request without its messages; `sim` tells the simulator what to say."""
    sim: dict[str, Any] = {"completion_tokens": rng.choice((2, 3, 5, 8))}
    body: dict[str, Any] = {"model": "simulator", "temperature": 1.0}
    if habit.asks_for_all:
        body |= dict.fromkeys(ALL, True)
    layers, top_k = habit.width
    experts = {"layers": layers, "top_k": top_k, "experts": rng.choice((8, 256, 300, 70_000)), "nested": habit.nested}
    if habit.payloads:
        sim["experts"] = {**experts, "unasked": True}
        if habit.dialect == "sglang" and rng.random() < 0.5:
            sim["indexer_topk"] = {"layers": 1, "top_k": top_k, "nested": habit.nested}
    else:
        sim["experts"] = experts
    if "routed_experts" in habit.asks:
        body["return_routed_experts"] = True
        if habit.start:
            name = "routed_experts_start_len" if habit.dialect == "sglang" else "routed_experts_prompt_start"
            body[name] = habit.start
    if rng.random() < 0.25:
        sim["weight_versions"] = rng.choice((["1", "2"], ["7", "8", "9"], ["a", "b"], ["step-1", "2"]))
    elif rng.random() < 0.5:
        sim["weight_version"] = rng.choice(("1", "12", "v-é", "default"))
    _said(rng, habit, sim, body)
    return {**body, "sim": sim}


def _said(rng: random.Random, habit: Habit, sim: dict[str, Any], body: dict[str, Any]) -> None:
    """Text, thoughts, tool calls or nothing, and how it ends."""
    if habit.tools:
        body["tools"] = [TOOL]
        sim.update(tool_calls=rng.random() < 0.7, completion_tokens=None)
    elif rng.random() < 0.3:
        sim["text"] = rng.choice(TEXTS)
    sim["reasoning"] = rng.random() < 0.25
    if sim["reasoning"] and sim["completion_tokens"] is not None:
        sim["completion_tokens"] = 24
    if rng.random() < 0.2:
        sim["finish_reason"] = rng.choice(("abort", "length"))
    if rng.random() < 0.05:
        body["max_tokens"] = 0
