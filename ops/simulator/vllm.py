"""Replies in the format of vLLM's OpenAI server."""

from __future__ import annotations

from ops.simulator.config import Config
from ops.simulator.generation import (
    Generation,
    ReplyWriter,
    deltas,
    encode,
    event,
    message_json,
)
from ops.simulator.wire import ChatRequest, Reply, Request, UnknownModel, json_reply


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


def _logprobs(generation: Generation[ChatRequest], writer: ReplyWriter) -> bytes:
    """``choices[].logprobs``; empty if ``top_logprobs`` is an explicit null."""
    request = generation.request
    if not request.logprobs:
        return b"null"
    if request.top_logprobs is None:
        return b'{"content":[]}'
    return writer.content_logprobs(generation.draft, writer.logprobs(generation.draft))


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
    prompt_ids = b"[" + generation.prompt.json + b"]" if request.return_token_ids else b"null"
    parts.append(
        b'}],"service_tier":null,"system_fingerprint":null,"usage":%s,"prompt_logprobs":null,'
        b'"prompt_token_ids":%s,"kv_transfer_params":null' % (encode(generation.usage), prompt_ids)
    )
    return Reply(writer.padded(parts, generation.sim.body_bytes))


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events, token ids as deltas where asked for."""
    request, draft = generation.request, generation.draft
    common = {
        "id": f"chatcmpl-{generation.id}",
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": request.model,
    }
    pieces = deltas(draft)
    share = -(-len(draft.ids) // max(len(pieces) - 1, 1))
    events = []
    for index, delta in enumerate(pieces):
        choice: dict[str, object] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        first: dict[str, object] = {} if index else {"prompt_token_ids": None}
        if request.return_token_ids:
            choice["token_ids"] = draft.ids[(index - 1) * share : index * share] if index else None
            first = {} if index else {"prompt_token_ids": generation.prompt.ids()}
        events.append(event({**common, "choices": [choice], **first}))
    last: dict[str, object] = {"index": 0, "delta": {}, "finish_reason": draft.finish, "stop_reason": None}
    if request.return_token_ids and len(pieces) == 1:
        last["token_ids"] = draft.ids
    events.append(event({**common, "choices": [last]}))
    if request.stream_options and request.stream_options.include_usage:
        events.append(event({**common, "choices": [], "usage": generation.usage}))
    return Reply((*events, b"data: [DONE]\n\n"), content_type=b"text/event-stream")
