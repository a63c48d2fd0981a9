"""What a simulator is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dialect = Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class Config:
    """Start-up choices; everything else is asked for per request.

    ``latency_s`` is the time a generation takes where the request names none.
    ``reasoning`` is the share of generations that think first. ``experts`` is
    the default ``(layers, top_k, experts)`` of a routing payload.
    ``max_turn_tool_results`` bounds the seeded number (from 1) of tool results
    after which the policy stops calling tools. ``cache_tokens`` bounds the
    prefix cache, ``prefill_s`` is the time that a token takes which is not in it.
    ``adapters`` are the LoRA adapters that are loaded: with any, another one is
    refused as the engine does; with none, every name is taken.
    """

    dialect: Dialect = "sglang"
    seed: int = 0
    latency_s: float = 0.0
    weight_version: str = "default"
    weight_versions: bool = False
    model: str = "simulator"
    adapters: tuple[str, ...] = ()
    reasoning: float = 0.25
    experts: tuple[int, int, int] = (4, 2, 64)
    indexer: tuple[int, int] = (2, 8)
    max_turn_tool_results: int = 3
    cache_tokens: int = 2**22
    prefill_s: float = 0.0
    keep_requests: int = 256
    keep_request_bytes: int = 64 * 2**20
