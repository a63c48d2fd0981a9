"""SGLang's `/generate`, for a chat whose prompt's ids are known (0.5.23): the chat's stream has no ids.

A chat's parameters are spelled otherwise there. One that has no counterpart, or that means something only to the
template or a grammar, keeps the turn a chat.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.domain.request import join_object
from workers.parse_json import is_null

GENERATE = "/generate"

Fields = Mapping[str, msgspec.Raw]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens", "custom_params"),
)
"""Members of `sampling_params` with the same name."""

_LIMITS = ("max_completion_tokens", "max_tokens")
"""In the order in which a chat reads them, for `max_new_tokens`."""

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Where a request has none, a chat takes the model's own and `/generate` does not, unless the engine runs with
`--sampling-defaults openai`."""

_OF_CHATS = frozenset(
    {
        *("model", "n", "stream", "stream_options", "logprobs", "top_logprobs", "user", "response_format"),
        *("return_meta_info", "return_prompt_token_ids", "return_token_ids", "return_weight_versions"),
        *("chat_template_kwargs", "separate_reasoning", "stream_reasoning", "tool_choice", "parallel_tool_calls"),
    }
)
"""What says how a chat is rendered, parsed and shown; the ids are the prompt already."""

_ONLY_CHATS = frozenset(
    {
        *("logit_bias", "seed", "return_routed_experts", "return_indexer_topk", "return_hidden_states", "cache_salt"),
        *("continue_final_message", "session_params", "reasoning", "reasoning_effort", "task", "data_parallel_rank"),
    }
)
"""What only a chat translates. Other members mean the same in both, or nothing."""


class ServerInfo(msgspec.Struct, frozen=True):
    """Of an engine's `/server_info`: how it streams, what it samples with, and what its chat parses replies with."""

    incremental_streaming_output: bool = False
    sampling_defaults: str = "model"
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    def takes(self, params: Fields) -> bool:
        """Would the chat sample with the same parameters?"""
        named = all(not is_null(params.get(name)) for name in MODEL_DEFAULTS)
        return self.incremental_streaming_output and (named or self.sampling_defaults == "openai")


def can_translate(params: Fields, tools: bytes | None) -> bool:
    """Does `/generate` generate what the chat would? A `strict` tool has a grammar, `base:adapter` an adapter."""
    set_ = {name: bytes(raw) for name, raw in params.items() if not is_null(raw)}
    if not _ONLY_CHATS.isdisjoint(set_) or set_.get("top_logprobs", b"0") != b"0":
        return False
    if b":" in set_.get("model", b"") and "lora_path" not in set_:
        return False
    return tools is None or b'"strict"' not in tools


def generate_body(params: Fields, ids: bytes, rid: str, *, offers_tools: bool) -> bytes:
    """The request; `ids` is the text of the prompt's."""
    sampling = {name: bytes(params[name]) for name in _SAMPLING if not is_null(params.get(name))}
    limits = [bytes(params[name]) for name in _LIMITS if not is_null(params.get(name))]
    sampling["max_new_tokens"] = limits[0] if limits else b"null"
    if not is_null(params.get("min_tokens")):
        sampling["min_new_tokens"] = bytes(params["min_tokens"])
    if offers_tools:
        sampling["skip_special_tokens"] = b"false"
    known = {*_SAMPLING, *_LIMITS, "min_tokens", *_OF_CHATS}
    return join_object(
        {
            **{name: bytes(raw) for name, raw in params.items() if name not in known},
            "rid": msgspec.json.encode(rid),
            "sampling_params": join_object(sampling),
            "return_logprob": b"true",
            "logprob_start_len": b"-1",
            "return_text_in_logprobs": b"true",
            "stream": b"true",
            "input_ids": b"[" + ids + b"]",
        }
    )
