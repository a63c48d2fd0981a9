"""What each engine must be asked for so that a reply holds every token's id and logprob.

SGLang returns them in `meta_info` with `return_meta_info` and `logprobs`, the prompt's ids with
`return_prompt_token_ids`. vLLM returns both with `return_token_ids`, and needs `top_logprobs` to be a
number: an explicit null empties its logprobs. Asked for all of it, each engine answers its own; so
`auto` asks for all and the reply's shape tells which engine it was.

Replay payloads: SGLang returns `routed_experts` for `return_routed_experts` and, in newer builds,
`indexer_topk` for `return_indexer_topk`; vLLM returns `routed_experts` where it was started to. Each can
leave out the first rows, under a name of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from app.domain.events import Protocol

DialectChoice = Literal["auto", "sglang", "vllm"]

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
"""Of either engine; with a number for `logprobs`, 0 for the sampled token's alone."""

_RETURN = {"routed_experts": "return_routed_experts", "indexer_topk": "return_indexer_topk"}
_FIRST_ROW: Mapping[DialectChoice, tuple[str, ...]] = {
    "sglang": ("routed_experts_start_len",),
    "vllm": ("routed_experts_prompt_start",),
    "auto": ("routed_experts_start_len", "routed_experts_prompt_start"),
}

FIRST_ROW_NAMES = _FIRST_ROW["auto"]
"""The parameters that leave out the first rows of `routed_experts`, of either engine."""


def complete(
    params: Mapping[str, msgspec.Raw],
    dialect: DialectChoice,
    replay: Collection[str] = (),
    protocol: Protocol = "chat",
) -> dict[str, bytes]:
    """The client's parameters as raw JSON, with what Turnlog needs in place of the client's own wish.

    `replay` are the kinds of payload that Turnlog itself wants; which rows of them is then its own to say.
    """
    fields = {name: bytes(raw) for name, raw in params.items()}
    fields.update(_COMPLETION if protocol == "completions" else _NEEDED[dialect])
    if protocol == "completions":
        asked = fields.get("logprobs", b"null")
        fields["logprobs"] = asked if asked.isdigit() else b"0"
    elif dialect != "sglang" and fields.get("top_logprobs", b"null") == b"null":
        fields["top_logprobs"] = b"0"
    for kind in replay:
        if returns(kind, dialect, protocol):
            fields[_RETURN[kind]] = b"true"
    if "routed_experts" in replay:
        for name in FIRST_ROW_NAMES:
            fields.pop(name, None)
    return fields


def for_adapter(fields: Mapping[str, bytes], adapter: str, dialect: DialectChoice) -> dict[str, bytes]:
    """A request's fields as an engine must get them to generate with this adapter.

    SGLang takes it from `lora_path`, but from behind the colon of `model` first, so nothing may stand there; vLLM takes
    it from `model`. Each ignores the other's, so one of which it is not known which it is (`auto`) gets both.
    """
    asked, name = dict(fields), msgspec.json.encode(adapter)
    if dialect != "sglang":
        asked["model"] = name
    elif "model" in asked:
        asked["model"] = _base_model(asked["model"])
    if dialect == "vllm":
        asked.pop("lora_path", None)
    else:
        asked["lora_path"] = name
    return asked


def _base_model(raw: bytes) -> bytes:
    """`model` without what SGLang would take for an adapter."""
    model = msgspec.json.decode(raw)
    return msgspec.json.encode(model.partition(":")[0]) if isinstance(model, str) and ":" in model else raw


def returns(kind: str, dialect: DialectChoice, protocol: Protocol) -> bool:
    """Can a kind of payload be asked for? vLLM knows no `indexer_topk`, nor do SGLang's completions."""
    return kind == "routed_experts" or (dialect != "vllm" and protocol == "chat")


def asked_for(params: Mapping[str, msgspec.Raw]) -> frozenset[str]:
    """The kinds of replay payload that the client itself asked for."""
    return frozenset(kind for kind, name in _RETURN.items() if bytes(params.get(name, b"")) == b"true")


def clients_first_row(params: Mapping[str, msgspec.Raw]) -> int:
    """From which row on the client asked for `routed_experts`; 0 for what is no row, which the engine will refuse."""
    for name in FIRST_ROW_NAMES:
        text = bytes(params.get(name, b""))
        if text.isdigit() and len(text) < 10:
            return int(text)
    return 0


def from_row(row: int, dialect: DialectChoice) -> bytes:
    """What asks an engine for `routed_experts` from a row on: raw members of the request's object."""
    return b"".join(f',"{name}":{row}'.encode() for name in _FIRST_ROW[dialect])


def takes_rid(dialect: DialectChoice) -> bool:
    """Does the engine know a generation by the request's `rid`? vLLM has no such field."""
    return dialect != "vllm"
