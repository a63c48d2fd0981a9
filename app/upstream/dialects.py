"""What each engine must be asked for so that a reply holds every token's id and logprob.

SGLang returns them in `meta_info` with `return_meta_info` and `logprobs`, the prompt's ids with
`return_prompt_token_ids`; in a stream, all ids in `sglext`. vLLM returns both with `return_token_ids`, and needs a
number for `top_logprobs`: an explicit null empties its logprobs. Each engine ignores the other's parameters, so `auto`
sends all, and the reply's structure tells which engine it is.

Replay payloads: SGLang returns `routed_experts` for `return_routed_experts` and, in newer builds, `indexer_topk` for
`return_indexer_topk`; vLLM returns `routed_experts` if it was started so. Each can leave out the first rows, with a
parameter of its own. SGLang returns sampling masks for `return_sampling_mask` with a finite `top_k`, and refuses a
request without one; vLLM if it was started so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from app.domain.events import EngineShape
from app.domain.request import FIRST_ROW_NAMES, RETURN
from workers.top_logprobs import LogprobWish

DialectChoice = Literal["auto", "sglang", "vllm"]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_SGLANG: Mapping[str, bytes] = {
    "logprobs": b"true",
    "return_meta_info": b"true",
    "return_prompt_token_ids": b"true",
}
_VLLM: Mapping[str, bytes] = {"logprobs": b"true", "return_token_ids": b"true", "return_weight_versions": b"true"}

_NEEDED: Mapping[DialectChoice, Mapping[str, bytes]] = {
    "sglang": _SGLANG,
    "vllm": _VLLM,
    "auto": {**_SGLANG, **_VLLM},
}


_COMPLETION: Mapping[str, bytes] = {"return_token_ids": b"true", "return_weight_versions": b"true"}
"""For completions on either engine, with a number for `logprobs`; 0 returns only the sampled token's."""

_FIRST_ROW: Mapping[DialectChoice, tuple[str, ...]] = {
    "sglang": FIRST_ROW_NAMES[:1],
    "vllm": FIRST_ROW_NAMES[1:],
    "auto": FIRST_ROW_NAMES,
}


def complete(
    params: Mapping[str, msgspec.Raw],
    dialect: DialectChoice,
    replay: Collection[str] = (),
    shape: EngineShape = "chat",
) -> dict[str, bytes]:
    """The client's parameters as raw JSON, with those that Turnlog needs.

    `replay` are the payload kinds that Turnlog needs; it then also decides which rows.
    """
    fields = {name: bytes(raw) for name, raw in params.items()}
    fields.update(_COMPLETION if shape == "completions" else _NEEDED[dialect])
    if (wish := logprob_wish(params, shape)) is not None:
        fields.update(top_needed(wish, dialect))
    if shape == "completions":
        logprobs = fields.get("logprobs", b"null")
        fields["logprobs"] = logprobs if logprobs.isdigit() else b"0"
    elif dialect != "sglang" and fields.get("top_logprobs", b"null") == b"null":
        fields["top_logprobs"] = b"0"
    for kind in replay:
        if returns(kind, dialect, shape):
            fields[RETURN[kind]] = b"true"
    if "routed_experts" in replay:
        for name in FIRST_ROW_NAMES:
            fields.pop(name, None)
    return fields


_NOT_STREAMED = ("return_meta_info", "return_prompt_token_ids", "return_token_ids")
"""What SGLang refuses to give in a stream."""


def streamed(params: bytes) -> bytes:
    """A chat's parameters as SGLang takes them with a stream."""
    fields: dict[str, msgspec.Raw] = _FIELDS.decode(params)
    return msgspec.json.encode({name: raw for name, raw in fields.items() if name not in _NOT_STREAMED})


def logprob_wish(params: Mapping[str, msgspec.Raw], shape: EngineShape = "chat") -> LogprobWish | None:
    """What the request asks for besides the sampled tokens' logprobs; its numbers were checked when it was read."""
    name = "logprobs" if shape == "completions" else "top_logprobs"
    top = _count(params.get(name))
    prompt = _count(params.get("prompt_logprobs"))
    if prompt is None and _count(params.get("logprob_start_len")) is not None:
        prompt = 0
    return LogprobWish(top or 0, prompt) if top or prompt is not None else None


def _count(raw: msgspec.Raw | None) -> int | None:
    text = b"" if raw is None else bytes(raw)
    return int(text) if text.isdigit() else None


def asks_for_prompt(wish: LogprobWish | None) -> bool:
    return wish is not None and wish.prompt is not None


PROMPT_WISHES = ("prompt_logprobs", "logprob_start_len")
"""vLLM's and SGLang's parameter for logprobs of the prompt's tokens."""


def top_needed(wish: LogprobWish, dialect: DialectChoice) -> dict[str, bytes]:
    """vLLM names alternatives by their ids only where it is asked to, and knows no `logprob_start_len`; SGLang's flat
    lists are not read."""
    asked = {} if wish.prompt is None or dialect == "sglang" else {"prompt_logprobs": b"%d" % wish.prompt}
    if not wish.top:
        return asked
    own = asked if dialect == "sglang" else {**asked, "return_tokens_as_token_ids": b"true"}
    return own if dialect == "vllm" else {**own, "return_flat_raw_output_top_logprobs": b"false"}


def for_adapter(fields: Mapping[str, bytes], adapter: str, dialect: DialectChoice) -> dict[str, bytes]:
    """A request's fields for a generation with this adapter.

    SGLang reads it from `lora_path`, but prefers a name after the colon of `model`, so that is removed; vLLM reads it
    from `model`. Each ignores the other's field, so an unknown engine (`auto`) gets both.
    """
    request, name = dict(fields), msgspec.json.encode(adapter)
    if dialect != "sglang":
        request["model"] = name
    elif "model" in request:
        request["model"] = _base_model(request["model"])
    if dialect == "vllm":
        request.pop("lora_path", None)
    else:
        request["lora_path"] = name
    return request


def _base_model(raw: bytes) -> bytes:
    """`model` without the part that SGLang would take for an adapter."""
    model = msgspec.json.decode(raw)
    return msgspec.json.encode(model.partition(":")[0]) if isinstance(model, str) and ":" in model else raw


def returns(kind: str, dialect: DialectChoice, shape: EngineShape) -> bool:
    """Can this kind of payload be asked for? Completions have only `routed_experts`, vLLM has no `indexer_topk`."""
    return kind == "routed_experts" or (shape == "chat" and (dialect != "vllm" or kind == "sampling_mask"))


def asked_for(params: Mapping[str, msgspec.Raw]) -> frozenset[str]:
    """The kinds of replay payload that the client asked for."""
    return frozenset(kind for kind, name in RETURN.items() if bytes(params.get(name, b"")) == b"true")


def clients_first_row(params: Mapping[str, msgspec.Raw]) -> int:
    """The first row of `routed_experts` that the client asked for; 0 for an invalid value, which the engine rejects."""
    for name in FIRST_ROW_NAMES:
        text = bytes(params.get(name, b""))
        if text.isdigit() and len(text) < 10:
            return int(text)
    return 0


def from_row(row: int, dialect: DialectChoice) -> bytes:
    """Raw members of the request's object that ask for `routed_experts` from a row on."""
    return b"".join(f',"{name}":{row}'.encode() for name in _FIRST_ROW[dialect])


def takes_rid(dialect: DialectChoice) -> bool:
    """Does the engine identify a generation by the request's `rid`? vLLM has no such field."""
    return dialect != "vllm"
