"""The start-up settings of a simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dialect = Literal["sglang", "vllm", "openai"]


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the process; everything else comes with each request.

    ``latency_s`` is the duration of a generation if the request has none. ``reasoning`` is the share of generations
    with reasoning. ``experts`` is the default ``(layers, top_k, experts)`` of a routing payload.
    ``max_turn_tool_results`` is the upper bound of the seeded number (from 1) of tool results after which the policy
    stops calling tools. ``cache_tokens`` is the size of the prefix cache, and ``prefill_s`` the time for each prompt
    token that is not in it. ``adapters`` are the loaded LoRA adapters. If there are any, other names are refused as the
    engine does; if there are none, every name is accepted. With ``token_in`` a chat takes its prompt's ids from the
    dialect's own field, as newer builds do. With ``silent_versions`` replies name no weight version, as those of vLLM
    0.32. With ``scale_out``, vLLM has its route for prompts of ids: as 0.33, or with ``silent_versions`` as 0.32, which
    parses no message there. With ``logprobs_mode``, vLLM's ``/server_info`` names it; it does not change the logprobs.
    With ``incremental``, SGLang's ``/generate`` streams what is new in each event, and ``/server_info`` says so. It
    also says ``sampling_defaults``: where a chat takes the parameters that a request does not name. With
    ``cache_report``, SGLang's ``usage`` counts cached tokens. It refuses what does not fit ``context_length``.
    ``api_key`` is what the vendor of the dialect ``openai`` wants in each request.
    """

    dialect: Dialect = "sglang"
    seed: int = 0
    latency_s: float = 0.0
    weight_version: str = "default"
    silent_versions: bool = False
    scale_out: bool = False
    model: str = "simulator"
    adapters: tuple[str, ...] = ()
    reasoning: float = 0.25
    experts: tuple[int, int, int] = (4, 2, 64)
    indexer: tuple[int, int] = (2, 8)
    max_turn_tool_results: int = 3
    cache_tokens: int = 2**22
    prefill_s: float = 0.0
    token_in: bool = True
    logprobs_mode: str | None = None
    incremental: bool = False
    cache_report: bool = False
    context_length: int = 2**20
    sampling_defaults: str = "openai"
    api_key: str = ""
    keep_requests: int = 256
    keep_request_bytes: int = 64 * 2**20
