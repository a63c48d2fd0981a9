"""Replies in the format of vLLM's OpenAI server."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ops.simulator.config import Config
from ops.simulator.generate import Draft
from ops.simulator.generation import (
    DONE,
    EVENT_STREAM,
    Generation,
    R,
    ReplyWriter,
    deltas,
    encode,
    event,
    message_json,
    sampled_first,
)
from ops.simulator.wire import BadRequest, ChatRequest, Reply, Request, UnknownModel, json_reply


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
    """vLLM's error object."""
    return json_reply({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def adapter(request: Request, config: Config) -> str | None:
    """The adapter of a request, which only ``model`` can name. Raises :class:`UnknownModel`."""
    if request.model in config.adapters:
        return request.model
    if config.adapters and request.model != config.model:
        raise UnknownModel(f"The model `{request.model}` does not exist.")
    return None


def check(request: ChatRequest) -> None:
    """Refuse what vLLM refuses. Raises :class:`BadRequest`."""
    if request.stream and request.prompt_logprobs:
        raise BadRequest("`prompt_logprobs` are not available when `stream=True`.")


def _logprobs(generation: Generation[ChatRequest], writer: ReplyWriter) -> bytes:
    """``choices[].logprobs``; empty if ``top_logprobs`` is an explicit null."""
    request = generation.request
    if not request.logprobs:
        return b"null"
    if request.top_logprobs is None:
        return b'{"content":[]}'
    return content_of(request, writer, generation.draft, writer.logprobs(generation.draft))


def content_of(request: ChatRequest, writer: ReplyWriter, draft: Draft, numbers: list[bytes]) -> bytes:
    count, as_ids = request.alternatives, bool(request.return_tokens_as_token_ids)
    tops = writer.alternatives(draft.ids, numbers, count) if count else []
    shown = [top[:count] for top in sampled_first(tops, draft.ids, numbers)] if count else []
    return writer.content_logprobs(draft, numbers, shown, as_ids)


def metrics_of(generation: Generation[R]) -> bytes:
    """What a reply has behind the rest where it was speculated."""
    if generation.sim.speculative is None:
        return b""
    steps, drafts, accepted = generation.sim.speculative
    counted = {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafts,
        "acceptance_histogram": [],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts,
        "num_spec_tokens": drafts // steps,
    }
    return b',"metrics":' + encode({"speculative_decoding": counted})


def render(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The whole reply, with large payloads as separate parts."""
    request, draft = generation.request, generation.draft
    experts = writer.experts(generation, request.return_routed_experts, request.routed_experts_prompt_start, npy=True)
    head = [
        b'{"id":%s,"object":"chat.completion","created":%d,"model":%s,"choices":[{"index":0,"message":'
        % (encode(f"chatcmpl-{generation.id}"), generation.created, encode(request.model)),
        message_json(draft, b"null"),
        b',"logprobs":',
        _logprobs(generation, writer),
        b',"finish_reason":"%s","stop_reason":%s,"token_ids":' % (draft.finish.encode(), encode(draft.stop_text)),
        encode(draft.ids) if request.return_token_ids else b"null",
    ]
    if request.return_weight_versions:
        head += [b',"weight_versions":', encode(generation.versions)]
    parts = [b"".join(head)]
    if experts is not None:
        parts += [b',"routed_experts":', experts]
    masks = writer.masks(generation)
    if masks is not None:
        parts += [b',"sampling_mask":', masks]
    prompt_ids = b"[" + generation.prompt.json + b"]" if request.return_token_ids else b"null"
    of_prompt = writer.prompt_logprobs(generation.prompt, request.prompt_logprobs)
    parts.append(
        b'}],"service_tier":null,"system_fingerprint":null,"usage":%s,"prompt_logprobs":%s,'
        b'"prompt_token_ids":%s,"kv_transfer_params":null%s'
        % (encode(generation.usage), of_prompt, prompt_ids, metrics_of(generation))
    )
    return Reply(writer.padded(parts, generation.sim.body_bytes))


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events: the prompt's ids come first; each later chunk has its share of the sampled ids
    and logprobs, and the last of them what a whole choice has besides."""
    request, draft = generation.request, generation.draft
    common = {
        "id": f"chatcmpl-{generation.id}",
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": request.model,
    }
    size = generation.sim.chunk_tokens
    begun, *found = deltas(draft)
    if size is not None and not (draft.calls or draft.reasoning):
        found = [{"content": text} for text in writer.texts_of(draft.ids, size)]
    pieces: list[dict[str, object]] = [*found, {}]
    prompt_ids = generation.prompt.ids() if request.return_token_ids else None
    first: dict[str, object] = {"index": 0, "delta": begun, "logprobs": None, "finish_reason": None}
    events = [event({**common, "choices": [first], "prompt_token_ids": prompt_ids})]
    ends = [number * len(draft.ids) // len(pieces) for number in range(len(pieces) + 1)]
    if size is not None:
        ends = [min(end * size, len(draft.ids)) for end in range(len(pieces))] + [len(draft.ids)]
    numbers = writer.logprobs(draft)
    for delta, start, end in zip(pieces, ends, ends[1:], strict=False):
        ids = draft.ids[start:end]
        logprobs = None
        if request.logprobs:
            logprobs = msgspec.Raw(content_of(request, writer, replace(draft, ids=ids), numbers[start:end]))
        choice: dict[str, object] = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        choice["token_ids"] = ids if request.return_token_ids else None
        if not delta:
            choice |= {"finish_reason": draft.finish, "stop_reason": draft.stop_text}
            if request.return_weight_versions:
                choice["weight_versions"] = generation.versions
        events.append(event({**common, "choices": [choice]}))
    if request.stream_options and request.stream_options.include_usage:
        events.append(event({**common, "choices": [], "usage": generation.usage}))
    return Reply((*events, DONE), content_type=EVENT_STREAM)
