"""Pinned parameters: what a session's creator fixed stands in the requests of all its turns, whatever a client sends;
or, as defaults, where a client sends nothing.

They have the names of the engine's chat request. A pinned null leaves the parameter out. Of a session in miles' newer
wire (`evaluation` was given) some parameters are the server's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from app.domain.events import SessionConfig
from app.domain.patterns import is_in_row
from app.domain.request import (
    FIRST_ROW_NAMES,
    KV_FIELD,
    KV_MEMBER,
    RETURN,
    ChatRequest,
    CompletionRequest,
    as_raw,
    value_of,
)
from app.errors import InvalidRequest
from workers.top_logprobs import MAX_TOP

LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one parameter; a pinned one replaces both."""

_NUMBERS = frozenset({"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})
_INTEGERS = frozenset({"top_k", "min_tokens", "seed", *LIMITS})
_TOP = frozenset({"top_logprobs", "prompt_logprobs"})

_ELSEWHERE = {
    "model": "give it as the field model",
    "lora_path": "give it as the field adapter",
    "stream_mode": "give it as the field stream_mode",
}

_PER_TURN = frozenset(
    {
        *("messages", "prompt", "tools", "input_ids", "stream", "stream_options", "n", "rid", "nvext"),
        *("session_id", "session_params", "kv_transfer_params"),
        *("logprobs", "return_tokens_as_token_ids", "return_meta_info", "return_prompt_token_ids", "return_token_ids"),
        *("return_weight_versions", *RETURN.values(), *FIRST_ROW_NAMES),
    }
)
"""Each turn's own, or set by Turnlog."""


def require_pinnable(params: Mapping[str, Any]) -> None:
    """Raises InvalidRequest, which names the parameter."""
    for name, value in params.items():
        _require_in_row(value, f"params.{name}")
        if name in _ELSEWHERE:
            raise InvalidRequest(f"params.{name}: {_ELSEWHERE[name]}")
        if name in _PER_TURN:
            raise InvalidRequest(f"params.{name} cannot be pinned: it belongs to each turn")
        if name in _NUMBERS and not (value is None or (isinstance(value, int | float) and type(value) is not bool)):
            raise InvalidRequest(f"params.{name} must be a number or null")
        if name in _INTEGERS and not (value is None or type(value) is int):
            raise InvalidRequest(f"params.{name} must be an integer or null")
        if name in _TOP and not (value is None or (type(value) is int and 0 <= value <= MAX_TOP)):
            raise InvalidRequest(f"params.{name} must be an integer from 0 to {MAX_TOP}, or null")
    if all(params.get(name) is not None for name in LIMITS):
        raise InvalidRequest("params: max_tokens and max_completion_tokens are one limit; give one of them")


def _require_in_row(value: Any, where: str) -> None:
    if not is_in_row(value):
        raise InvalidRequest(f"{where:.200} is a number that 64 bits cannot hold")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in inner:
        _require_in_row(each, f"{where}.{part}")


def with_pinned(request: ChatRequest | CompletionRequest, config: SessionConfig) -> ChatRequest | CompletionRequest:
    """The request with the session's parameters and model.

    Raises InvalidRequest where the session refuses other values (`params_mode: "refuse"`) and the client sent one, and
    for another temperature than a training session's default: its trainer divides by that one.
    """
    mode = config.params_mode
    params = dict(request.params)
    if config.model is not None:
        _pin(params, "model", ("model",), config.model, refuses=mode == "refuse")
    for name, value in (config.params or {}).items():
        spelled = _spelled(name, request)
        aliases = LIMITS if name in LIMITS else (spelled,)
        if mode == "default" and any(value_of(params.get(alias), alias) is not None for alias in aliases):
            if name == "temperature" and config.evaluation is False and value is not None:
                _require_same(name, value_of(params[name], name), value, "the default of this training session")
            continue
        _pin(params, spelled, aliases, value, refuses=mode == "refuse")
    return msgspec.structs.replace(request, params=params)


def _pin(params: dict[str, msgspec.Raw], name: str, aliases: Iterable[str], value: Any, *, refuses: bool) -> None:
    for alias in aliases:
        raw = params.pop(alias, None)
        if raw is not None and refuses:
            _require_same(alias, value_of(raw, alias), value, "the value that the session's creator pinned")
    if value is not None:
        params[name] = as_raw(value)


def in_new_wire(request: ChatRequest | CompletionRequest, *, evaluation: bool) -> ChatRequest | CompletionRequest:
    """The request as a session of miles' newer wire takes it: an evaluation asks for no replay payloads.

    Raises InvalidRequest for what the server alone decides of a chat.
    """
    params = request.params
    if isinstance(request, ChatRequest):
        transfer = value_of(params.get(KV_FIELD), KV_FIELD)
        sent = {
            "input_ids": request.ids is not None,
            f"{KV_FIELD}.{KV_MEMBER}": isinstance(transfer, dict) and transfer.get(KV_MEMBER) is not None,
            **{name: value_of(params.get(name), name) is not None for name in FIRST_ROW_NAMES},
        }
        for name, is_sent in sent.items():
            if is_sent:
                raise InvalidRequest(
                    f"the server sets {name} in a session that was created with evaluation: leave it out"
                )
    unwanted = (*FIRST_ROW_NAMES, *RETURN.values()) if evaluation else ()
    if not any(name in params for name in unwanted):
        return request
    kept = {name: raw for name, raw in params.items() if name not in unwanted}
    return msgspec.structs.replace(request, params=kept)


def _spelled(name: str, request: ChatRequest | CompletionRequest) -> str:
    """Text completions know only the older name of the limit, and another one of the alternatives."""
    if request.shape == "chat":
        return name
    return "max_tokens" if name in LIMITS else "logprobs" if name == "top_logprobs" else name


def _require_same(name: str, sent: Any, pinned: Any, what: str) -> None:
    if msgspec.json.encode(_comparable(sent), order="sorted") != msgspec.json.encode(
        _comparable(pinned), order="sorted"
    ):
        raise InvalidRequest(f"{name} differs from {what}")


def _comparable(value: Any) -> Any:
    """1 and 1.0 are the same number."""
    return float(value) if type(value) is int and abs(value) <= 2**53 else value
