"""Clients that send token ids and take token ids: vLLM's `/inference/v1/generate` and SGLang's `/generate`.

Both are spellings of a completion whose prompt is ids, and so is what an engine is asked. `request_id` and `rid` are a
retry's key. A stream is the whole reply as one event, after the commit.

    vLLM      token_ids, sampling_params {max_tokens: the model's rest where absent, ...}
    SGLang    input_ids, sampling_params {max_new_tokens: 128 where absent, ...}; at the same path
              `prompt: {prompt_token_ids}` is vLLM's demo server
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from app.domain.known_body import ContinuedBody
from app.domain.request import (
    CompletionRequest,
    TokenIds,
    engine_params,
    fields_of,
    flag,
    require_one,
    require_top,
    token_ids,
    value_of,
)
from app.errors import InvalidRequest, Unsupported
from app.protocols.base import COMMON, IDS, ONE, TEXT, CommittedReply, Schema, WireProtocol, nullable
from app.protocols.chat import DONE
from app.protocols.completions import COMPLETIONS
from app.protocols.engine_reply import object_of
from app.protocols.sse import event

Fields = dict[str, msgspec.Raw]

_NULL = msgspec.Raw(b"null")
_FIELDS = msgspec.json.Decoder(Fields)

VLLM, SGLANG = "vllm_generate", "sglang_generate"
"""The protocols' names."""

MAX_KEY = 256
"""Characters of a `request_id` or `rid`."""

SGLANGS_LIMIT = msgspec.Raw(b"128")
"""Tokens of a `/generate` without `max_new_tokens`."""

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's sampling parameters that a completion calls otherwise."""

_NOT_VLLMS = frozenset({"features", "content_parts", "kv_transfer_params", "ec_transfer_params"})
_NOT_SGLANGS = frozenset(
    {
        *("text", "input_embeds", "image_data", "video_data", "audio_data", "session_params", "token_ids_logprob"),
        *("return_hidden_states", "bootstrap_room"),
    }
)
"""Fields of a prompt that is not one list of ids, and of values that a completion does not give."""

_NOT_COMPLETIONS = frozenset({"extra_args", "bad_words", "logprob_token_ids", "structural_tag"})
"""Sampling parameters that an engine's completion would drop in silence."""

_OF_ENGINES = ("stream_options", "detokenize", "output_kind", "flat_logprobs", "output_text_buffer_length")
"""What says how an engine hands its tokens over."""

_SAMPLING: Schema = {"type": "object", "description": "As the engine's own route takes them; `n` is 1."}

VLLM_REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "InferenceGenerateRequest",
    "type": "object",
    "description": "vLLM's request with a prompt of token ids.",
    "properties": {
        "token_ids": IDS,
        "sampling_params": nullable(_SAMPLING),
        "model": COMMON["model"],
        "stream": nullable({"type": "boolean"}),
        "request_id": {**nullable(TEXT), "description": "The key of a retry, as `Idempotency-Key`."},
        "return_token_ids": {**nullable({"type": "boolean"}), "description": "Repeat the prompt's ids."},
        "output_mode": nullable({"const": "tokens"}),
    },
    "required": ["token_ids"],
    "additionalProperties": True,
}

VLLM_EXAMPLE: Schema = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}}

SGLANG_REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "GenerateRequest",
    "type": "object",
    "description": "SGLang's request with one prompt of token ids.",
    "properties": {
        "input_ids": IDS,
        "prompt": {"description": "As vLLM's demo server takes it, `{prompt_token_ids}`, in place of `input_ids`."},
        "sampling_params": nullable(_SAMPLING),
        "return_logprob": nullable({"type": "boolean"}),
        "rid": {**nullable(TEXT), "description": "The key of a retry, as `Idempotency-Key`."},
        "stream": nullable({"type": "boolean"}),
        "n": nullable(ONE),
    },
    "additionalProperties": True,
}

SGLANG_EXAMPLE: Schema = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}


class Wanted(msgspec.Struct, frozen=True):
    """What of the request its reply needs. `prompt` are the ids to repeat; `has_tops`: it asks for other tokens beside
    the sampled ones; `has_text`: vLLM's `output_mode` text; `is_legacy`: as vLLM's demo server."""

    request_id: str | None = None
    prompt: msgspec.Raw = _NULL
    logprobs: bool = True
    has_tops: bool = False
    has_text: bool = False
    is_legacy: bool = False


_WANTED = msgspec.json.Decoder(Wanted)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[msgspec.Raw]
    tokens: msgspec.Raw = _NULL
    top_logprobs: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    text: msgspec.Raw
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: Any = None
    matched_stop: msgspec.Raw = _NULL
    stop_reason: msgspec.Raw = _NULL
    routed_experts: msgspec.Raw = _NULL
    sampling_mask: msgspec.Raw = _NULL
    prompt_logprobs: msgspec.Raw = _NULL
    weight_versions: msgspec.Raw = _NULL


class _Reply(msgspec.Struct):
    """An engine's completion, SGLang's or vLLM's. It was validated before its commit."""

    choices: list[_Choice]
    id: msgspec.Raw = _NULL
    created: msgspec.Raw = _NULL
    model: msgspec.Raw = _NULL
    usage: Any = None
    metadata: Any = None
    sglext: Any = None


_REPLY = msgspec.json.Decoder(_Reply)


def _sampling(fields: Fields) -> Fields:
    """The members of `sampling_params`, as a completion calls them. Raises InvalidRequest, Unsupported."""
    raw = fields.pop("sampling_params", _NULL)
    if bytes(raw) == b"null":
        return {}
    if bytes(raw)[:1] != b"{":
        raise InvalidRequest("sampling_params must be an object")
    value_of(raw, "sampling_params")
    sampling = {_RENAMED.get(name, name): value for name, value in _FIELDS.decode(raw).items()}
    _refuse(sampling, _NOT_COMPLETIONS)
    return _set(sampling)


def _set(fields: Fields) -> Fields:
    """Those that are set, and a limit that is null: the model's rest."""
    return {name: raw for name, raw in fields.items() if name == "max_tokens" or bytes(raw) != b"null"}


def _refuse(fields: Fields, names: frozenset[str]) -> None:
    """Remove the fields; raises Unsupported for one that asks for something."""
    if names.isdisjoint(fields):
        return
    for name in names & fields.keys():
        if value_of(fields.pop(name), name) not in (None, False, "", [], {}):
            raise Unsupported(f"{name} cannot be sent to an engine with a completion of one list of token ids")


def _key(fields: Fields, name: str) -> str | None:
    value = value_of(fields.pop(name, None), name)
    if value is None or (isinstance(value, str) and 0 < len(value) <= MAX_KEY):
        return value
    raise InvalidRequest(f"{name} must be text of 1 to {MAX_KEY} characters")


def _request(
    ids: TokenIds, params: Fields, many_values: bool, protocol: str, stream: bool, key: str | None, wanted: Wanted
) -> CompletionRequest:
    """Raises InvalidRequest, Unsupported."""
    require_one(params.pop("n", None))
    require_one(params.pop("best_of", None), "best_of")
    require_top(params.get("logprobs"), "logprobs")
    return CompletionRequest(
        None,
        ids,
        engine_params(params, many_values),
        stream,
        protocol=protocol,
        echo=msgspec.json.encode(wanted),
        key=None if key is None else f"{protocol}:{key}",
    )


def _ids(fields: Fields, name: str) -> TokenIds:
    ids = token_ids(fields.pop(name, None), name)
    if ids is None:
        raise InvalidRequest(f"{name} is missing")
    return ids


def parse_vllm(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> CompletionRequest:
    """Raises InvalidRequest, which names the field, and Unsupported. No request is `continued`."""
    fields, many_values = fields_of(body, has_few_values)
    ids = _ids(fields, "token_ids")
    params = {"max_tokens": _NULL, **_sampling(fields)}
    _refuse(fields, _NOT_VLLMS)
    mode = value_of(fields.pop("output_mode", None), "output_mode")
    if mode not in (None, "tokens", "text"):
        raise InvalidRequest("output_mode must be tokens or text")
    stream = flag(fields.pop("stream", None), "stream")
    key = _key(fields, "request_id")
    repeats = flag(fields.pop("return_token_ids", None), "return_token_ids")
    for name in _OF_ENGINES:
        fields.pop(name, None)
        params.pop(name, None)
    prompt = msgspec.Raw(b"[" + ids.text + b"]") if repeats else _NULL
    has_tops = bytes(params.get("logprobs", b"0")) != b"0"
    wanted = Wanted(key, prompt, has_tops=has_tops, has_text=mode == "text")
    return _request(ids, {**fields, **params}, many_values, VLLM, stream, key, wanted)


def parse_sglang(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
) -> CompletionRequest:
    """As `parse_vllm`."""
    fields, many_values = fields_of(body, has_few_values)
    if bytes(fields.get("prompt", b"")).startswith(b"{"):
        return _parse_legacy(fields, many_values)
    _refuse(fields, _NOT_SGLANGS)
    ids = _ids(fields, "input_ids")
    sampling = _sampling(fields)
    stream = flag(fields.pop("stream", None), "stream")
    key = _key(fields, "rid")
    wants_logprobs = flag(fields.pop("return_logprob", None), "return_logprob")
    top = fields.pop("top_logprobs_num", _NULL)
    if bytes(top) not in (b"null", b"0"):
        sampling["logprobs"] = top
    for name in ("return_text_in_logprobs", "logprob_start_len"):
        fields.pop(name, None)
    params = {**fields, "max_tokens": SGLANGS_LIMIT, **sampling}
    return _request(ids, params, many_values, SGLANG, stream, key, Wanted(key, logprobs=wants_logprobs))


def _parse_legacy(fields: Fields, many_values: bool) -> CompletionRequest:
    prompt = _FIELDS.decode(fields.pop("prompt"))
    ids = _ids(prompt, "prompt_token_ids")
    if prompt:
        raise Unsupported(f"prompt.{next(iter(prompt))}: a session's prompt is one list of token ids")
    stream = flag(fields.pop("stream", None), "stream")
    return _request(ids, _set(fields), many_values, SGLANG, stream, None, Wanted(is_legacy=True))


def vllm_reply(reply: CommittedReply) -> dict[str, Any]:
    """vLLM's reply."""
    completion, wanted = _REPLY.decode(reply.body), _WANTED.decode(reply.echo or b"{}")
    [choice] = completion.choices
    text = {"text": choice.text} if wanted.has_text else {}
    return {
        "request_id": wanted.request_id or completion.id,
        "model": completion.model,
        "created": completion.created,
        "output_mode": "text" if wanted.has_text else "tokens",
        "choices": [
            {
                "index": 0,
                **text,
                "token_ids": choice.token_ids,
                "logprobs": {"content": _content(choice, wanted)},
                "finish_reason": choice.finish_reason,
                "stop_reason": _stop(choice),
                "routed_experts": _experts(completion, choice),
                "sampling_mask": choice.sampling_mask,
                "weight_versions": _own_versions(completion, choice),
            }
        ],
        "prompt_logprobs": choice.prompt_logprobs,
        "usage": completion.usage,
        "prompt_token_ids": wanted.prompt,
        "kv_transfer_params": None,
    }


def _content(choice: _Choice, wanted: Wanted) -> msgspec.Raw:
    """The sampled tokens, with `token` and `token_id`: clients of one or another version read either."""
    logprobs = choice.logprobs
    pairs = zip(choice.token_ids, logprobs.token_logprobs, strict=True)
    if wanted.has_text or wanted.has_tops:
        count = len(choice.token_ids)
        names = _of_each(logprobs.tokens, count) if wanted.has_text else [None] * count
        tops = _of_each(logprobs.top_logprobs, count) if wanted.has_tops else [None] * count
        return msgspec.Raw(
            msgspec.json.encode(
                [
                    {**_named(token, logprob, name), "top_logprobs": [_top(*one) for one in object_of(top).items()]}
                    for (token, logprob), name, top in zip(pairs, names, tops, strict=True)
                ]
            )
        )
    # A reply may have tens of thousands.
    return msgspec.Raw(b"[" + b",".join([_PLAIN % (token, token, logprob) for token, logprob in pairs]) + b"]")


_PLAIN = b'{"token":"token_id:%d","token_id":%d,"logprob":%b,"bytes":null,"rank":null,"top_logprobs":[]}'


def _of_each(raw: msgspec.Raw, count: int) -> list[Any]:
    """A value of each token; None where the engine's list is none of all tokens."""
    values = msgspec.json.decode(raw)
    return values if isinstance(values, list) and len(values) == count else [None] * count


def _named(token: int | None, logprob: Any, name: Any) -> dict[str, Any]:
    text = name if isinstance(name, str) else f"token_id:{token}"
    spelled = list(name.encode()) if isinstance(name, str) else None
    return {"token": text, "token_id": token, "logprob": logprob, "bytes": spelled, "rank": None}


def _top(name: str, logprob: Any) -> dict[str, Any]:
    digits = name.removeprefix("token_id:")
    return _named(int(digits) if digits != name and digits.isdigit() else None, logprob, name)


def _stop(choice: _Choice) -> msgspec.Raw:
    return choice.stop_reason if bytes(choice.stop_reason) != b"null" else choice.matched_stop


def _experts(completion: _Reply, choice: _Choice) -> Any:
    return object_of(completion.sglext).get("routed_experts", choice.routed_experts)


def _own_versions(completion: _Reply, choice: _Choice) -> Any:
    return object_of(completion.metadata).get("weight_versions", choice.weight_versions)


def sglang_reply(reply: CommittedReply) -> dict[str, Any]:
    """SGLang's reply, or that of vLLM's demo server."""
    completion, wanted = _REPLY.decode(reply.body), _WANTED.decode(reply.echo or b"{}")
    [choice] = completion.choices
    logprobs = choice.logprobs.token_logprobs
    pairs = zip(choice.token_ids, logprobs, strict=True)
    if wanted.is_legacy:
        return {
            "text": [choice.text],
            "prompt": None,
            "logprobs": [[[{str(token): logprob}] for token, logprob in pairs]],
            "finish_reasons": [choice.finish_reason],
        }
    usage = object_of(completion.usage)
    cached = object_of(usage.get("prompt_tokens_details")).get("cached_tokens")
    optional = {
        "weight_version": object_of(completion.metadata).get("weight_version"),
        "weight_versions": _own_versions(completion, choice),
        "routed_experts": _experts(completion, choice),
        "indexer_topk": object_of(completion.sglext).get("indexer_topk"),
    }
    meta = {
        "id": wanted.request_id or completion.id,
        "finish_reason": _finish(choice),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": cached or 0,
        **({"output_token_logprobs": [[lp, token, None] for token, lp in pairs]} if wanted.logprobs else {}),
        **{name: value for name, value in optional.items() if value not in (None, _NULL)},
    }
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _finish(choice: _Choice) -> dict[str, Any]:
    """The finish reason as `/generate` tells it."""
    match choice.finish_reason:
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case reason:
            return {"type": reason, "matched": _stop(choice)}


def _generate(name: str, render: Callable[[CommittedReply], dict[str, Any]], **more: Any) -> WireProtocol:
    """A protocol that engines do not speak, whose stream is its reply as one event."""
    return msgspec.structs.replace(
        COMPLETIONS,
        name=name,
        reply=lambda reply: msgspec.json.encode(render(reply)),
        events=lambda reply: event(render(reply)) + DONE,
        is_native=False,
        **more,
    )


VLLM_GENERATE = _generate(
    VLLM,
    vllm_reply,
    route="/inference/v1/generate",
    parse=parse_vllm,
    schema=VLLM_REQUEST,
    example=VLLM_EXAMPLE,
    gives_payloads=True,
)

SGLANG_GENERATE = _generate(
    SGLANG,
    sglang_reply,
    route="/generate",
    methods=("POST", "PUT"),
    parse=parse_sglang,
    schema=SGLANG_REQUEST,
    example=SGLANG_EXAMPLE,
)
