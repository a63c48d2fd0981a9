"""Replies in the format of SGLang 0.5.23."""

from __future__ import annotations

from msgspec import Raw

from ops.simulator.config import Config
from ops.simulator.generation import (
    Alternatives,
    Generation,
    ReplyWriter,
    deltas,
    encode,
    event,
    message_json,
)
from ops.simulator.template import Conversation
from ops.simulator.wire import BadRequest, ChatRequest, Reply, Request, json_reply

_NOT_STREAMED = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
    """SGLang's flat error object."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json_reply(body, status)


def adapter(request: Request, config: Config) -> str | None:
    """The adapter of a request. A name in ``model``, as ``base:adapter``, takes precedence over ``lora_path``.

    Raises :class:`BadRequest`.
    """
    path = request.lora_path
    asked = request.model.partition(":")[2].strip() or (path if isinstance(path, str) else None) or None
    if asked is not None and config.adapters and asked not in config.adapters:
        raise BadRequest(f"The following requested LoRA adapters are not loaded: {{{asked!r}}}")
    return asked


def check(request: ChatRequest) -> None:
    """Refuse what SGLang refuses. Raises :class:`BadRequest`."""
    if request.stream:
        for name in _NOT_STREAMED:
            if getattr(request, name):
                raise BadRequest(f"{name} is not supported with streaming; set stream=false.")
    if request.return_sampling_mask and (request.top_k or 0) < 1:
        raise BadRequest("return_sampling_mask requires a finite top_k.")


def check_history(conversation: Conversation) -> None:
    """Refuse what SGLang cannot give to a chat template. Raises :class:`BadRequest`."""
    for number, message in enumerate(conversation.messages):
        if not message.calls_objects:
            raise BadRequest(f"messages[{number}]: the arguments of a tool call must be a JSON object.")


def check_start(request: Request, prompt_tokens: int) -> None:
    """Refuse a first row outside the prompt. Raises :class:`BadRequest`."""
    if not 0 <= request.routed_experts_start_len <= prompt_tokens:
        raise BadRequest(f"routed_experts_start_len must be in [0, {prompt_tokens}].")


def render(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The whole reply, with large payloads as separate parts."""
    request, draft = generation.request, generation.draft
    numbers = writer.logprobs(draft) if request.logprobs else []
    wants_experts = request.return_routed_experts and not generation.queued
    experts = writer.experts(generation, wants_experts, request.routed_experts_start_len)
    asked = request.alternatives if request.logprobs else 0
    tops = writer.alternatives(draft.ids, numbers, asked) if asked else []
    head = [
        b'{"id":%s,"object":"chat.completion","created":%d,"model":%s,"choices":[{"index":0,"message":'
        % (encode(generation.id), generation.created, encode(request.model)),
        message_json(draft, b'""'),
        b',"logprobs":',
        writer.content_logprobs(draft, numbers, tops) if request.logprobs else b"null",
        b',"finish_reason":"%s","matched_stop":' % draft.finish.encode(),
        encode(draft.stop_text or (writer.end_id if generation.ended_itself else None)),
    ]
    if request.return_prompt_token_ids or request.return_token_ids:
        head += [b',"prompt_token_ids":[', generation.prompt.json, b"]"]
    if request.return_token_ids:
        head += [b',"response_token_ids":', encode(draft.ids)]
    parts = [b"".join(head)]
    if request.return_meta_info and generation.queued:
        triples = writer.triples(draft, numbers) if request.logprobs else b"[]"
        parts.append(b',"meta_info":' + encode(queued_info(generation, Raw(triples))))
    elif request.return_meta_info:
        parts += _meta_info(generation, writer, numbers, tops, experts)
    parts.append(b"}]" + _tail(generation))
    if experts is not None and not request.return_meta_info:
        parts += [b',"sglext":{"routed_experts":', experts, b"}"]
    return Reply(writer.padded(parts, generation.sim.body_bytes))


def finish_of(generation: Generation[ChatRequest], writer: ReplyWriter) -> dict[str, object]:
    """The finish reason in ``meta_info``."""
    finish = generation.draft.finish
    if finish == "length":
        return {"type": "length", "length": generation.completion_tokens}
    if finish == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if generation.ended_itself:
        return {"type": "stop", "matched": writer.end_id}
    if generation.draft.stop_text is not None:
        return {"type": "stop", "matched": generation.draft.stop_text}
    return {"type": finish}


def queued_info(generation: Generation[ChatRequest], triples: Raw) -> dict[str, object]:
    """The ``meta_info`` of an abort in the waiting queue: the scheduler, which counts, has no part in it."""
    return {
        "id": generation.id,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": generation.weight_version,
        "output_token_logprobs": triples,
        "completion_tokens": generation.completion_tokens,
    }


def speculative_of(generation: Generation[ChatRequest]) -> dict[str, object]:
    """What `meta_info` says of speculative decoding: nothing where there is none."""
    if generation.sim.speculative is None:
        return {}
    steps, drafts, accepted = generation.sim.speculative
    return {
        "spec_accept_rate": accepted / drafts,
        "spec_accept_length": generation.completion_tokens / steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": drafts,
        "spec_verify_ct": steps,
    }


def _meta_info(
    generation: Generation[ChatRequest],
    writer: ReplyWriter,
    numbers: list[bytes],
    tops: list[Alternatives],
    experts: bytes | None,
) -> list[bytes]:
    facts = {
        "id": generation.id,
        "finish_reason": finish_of(generation, writer),
        "prompt_tokens": generation.prompt.count,
        "completion_tokens": generation.completion_tokens,
        "cached_tokens": generation.cached_tokens,
        "weight_version": generation.weight_version,
        **speculative_of(generation),
    }
    head = [b',"meta_info":', encode(facts).removesuffix(b"}")]
    if writer.config.weight_versions or len(generation.versions) > 1:
        head += [b',"weight_versions":', encode(generation.versions)]
    if generation.request.logprobs:
        head += [b',"output_token_logprobs":', writer.triples(generation.draft, numbers)]
    if tops:
        # A chat's prompt has no logprobs: its `logprob_start_len` is -1.
        head += [b',"input_top_logprobs":[],"output_top_logprobs":', writer.top_triples(tops)]
    parts = [b"".join(head)]
    for name, payload in (("routed_experts", experts), ("indexer_topk", writer.indexer(generation))):
        if payload is not None:
            parts += [b',"%s":' % name.encode(), payload]
    masks = writer.masks(generation)
    if masks is not None:
        # Renormalised over what was kept: nearer to 0.
        logprobs = b",".join(repr(float(one) / 2).encode() for one in numbers or writer.logprobs(generation.draft))
        parts += [b',"output_token_sampling_mask":', masks, b',"output_token_sampling_logprobs":[', logprobs, b"]"]
        parts.append(b',"output_token_sampling_mask_length":%d' % generation.completion_tokens)
    return [*parts, b"}"]


def _tail(generation: Generation[ChatRequest]) -> bytes:
    metadata = {"weight_version": generation.weight_version}
    return b',"usage":%s,"metadata":%s' % (encode({**generation.usage, "reasoning_tokens": 0}), encode(metadata))


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events."""
    request, draft = generation.request, generation.draft
    common = {
        "id": generation.id,
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": request.model,
    }
    silent = {"logprobs": None, "finish_reason": None, "matched_stop": None}
    events = [event({**common, "choices": [{"index": 0, "delta": delta, **silent}]}) for delta in deltas(draft)]
    last = {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": draft.finish,
        "matched_stop": draft.stop_text or (writer.end_id if generation.ended_itself else None),
    }
    events.append(event({**common, "choices": [last]}))
    if request.stream_options and request.stream_options.include_usage:
        events.append(event({**common, "choices": [], "usage": {**generation.usage, "reasoning_tokens": 0}}))
    return Reply((*events, b"data: [DONE]\n\n"), content_type=b"text/event-stream")
