"""Replies in the format of SGLang 0.5.23."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Raw, to_builtins

from ops.simulator.config import Config
from ops.simulator.generation import (
    DONE,
    EVENT_STREAM,
    Alternatives,
    Generation,
    R,
    ReplyWriter,
    deltas,
    encode,
    event,
    message_json,
)
from ops.simulator.template import Conversation
from ops.simulator.wire import BadConversion, BadRequest, ChatRequest, Reply, Request, json_reply

_NOT_STREAMED = {
    "return_meta_info": "",
    "return_prompt_token_ids": "",
    "return_token_ids": " on /v1/chat/completions",
}


SENT = 1795881708.25
"""Seconds since the epoch at which every reply is said to have been sent: a real one's digits vary."""


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
        for name, where in _NOT_STREAMED.items():
            if getattr(request, name):
                raise BadConversion(
                    f"{name} is not supported with streaming{where}. Please set stream=false when using {name}=true."
                )
    if request.return_sampling_mask and not request.return_meta_info:
        raise BadRequest("return_sampling_mask requires return_meta_info=true.")
    if request.return_sampling_mask and (request.top_k or 0) < 1:
        raise BadRequest("return_sampling_mask requires a finite top_k.")
    if request.tool_choice == "required" and not bytes(request.tools):
        raise BadRequest("Tools cannot be empty if tool choice is set to required.")


def check_sampling(request: Request) -> None:
    """Refuse what cannot be sampled with. Raises :class:`BadRequest`."""
    if request.temperature is not None and request.temperature < 0:
        raise BadRequest(f"temperature must be a non-negative finite number, got {request.temperature}.")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {request.top_p}.")


def check_history(conversation: Conversation) -> None:
    """Refuse what SGLang cannot give to a chat template. Raises :class:`BadRequest`."""
    for message in conversation.messages:
        if not message.calls_objects:
            raise BadConversion("Assistant tool call function.arguments must be valid JSON.")


def check_length(prompt_tokens: int, limit: int | None, length: int) -> None:
    """Refuse what does not fit the context. Raises :class:`BadRequest`."""
    if prompt_tokens >= length:
        raise BadRequest(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({length} tokens)."
        )
    if limit is not None and prompt_tokens + limit > length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {length} tokens. You requested a "
            f"total of {prompt_tokens + limit} tokens: {prompt_tokens} tokens from the input messages and {limit} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to "
            "fit within the limit."
        )


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
        encode(None if draft.finish == "tool_calls" else matched_stop(generation, writer)),
    ]
    if request.return_prompt_token_ids or request.return_token_ids:
        head += [b',"prompt_token_ids":[', generation.prompt.json, b"]"]
    if request.return_token_ids:
        head += [b',"response_token_ids":', encode(draft.ids)]
    parts = [b"".join(head)]
    if request.return_meta_info:
        finish: dict[str, object] | None = None
        if draft.finish == "tool_calls":
            finish = {"type": "tool_calls", "matched": None}
        triples = writer.triples(draft.ids, numbers) if request.logprobs else None
        parts += [b',"meta_info":', *meta_info(generation, writer, triples, tops, experts, finish)]
    parts.append(b'}],"usage":%s,"metadata":%s' % (encode(usage(generation, writer)), metadata(generation)))
    extension: list[bytes] = []
    if experts is not None and not request.return_meta_info:
        extension += [b'"routed_experts":', experts]
    if request.return_input_ids_in_sglext:
        extension += [b"," if extension else b"", b'"input_ids":[', generation.prompt.json, b"]"]
    if request.return_output_ids_in_sglext:
        extension += [b"," if extension else b"", b'"output_ids":[', encode(draft.ids), b"]"]
    if extension:
        parts += [b',"sglext":{', *extension, b"}"]
    return Reply(writer.padded(parts, generation.sim.body_bytes))


def matched_stop(generation: Generation[R], writer: ReplyWriter) -> int | str | None:
    """What ended the generation: a stop string, or the end token."""
    return generation.draft.stop_text or (writer.end_id if generation.ended_itself else None)


def finish_of(generation: Generation[R], writer: ReplyWriter) -> dict[str, object]:
    """The finish reason of ``/generate``, and in ``meta_info`` where no tool call was parsed."""
    finish = generation.draft.finish
    if finish == "length":
        return {"type": "length", "length": generation.completion_tokens}
    if finish == "abort":
        return {"type": "abort", **to_builtins(generation.sim.abort)}
    matched = matched_stop(generation, writer)
    return {"type": finish} if matched is None else {"type": "stop", "matched": matched}


def meta_info(
    generation: Generation[ChatRequest],
    writer: ReplyWriter,
    triples: bytes | None,
    tops: list[Alternatives],
    experts: bytes | None = None,
    finish: dict[str, object] | None = None,
    of_prompt: bytes = b"[]",
) -> list[bytes]:
    """The ``meta_info`` of a whole reply in parts. ``triples`` is None where no logprobs were asked for."""
    logprobs = logprob_lists(triples, len(generation.draft.ids), of_prompt)
    if generation.queued:
        return [queued_info(generation, logprobs)]
    masks = writer.masks(generation)
    parts = [
        begun_info(generation, generation.completion_tokens, finish or finish_of(generation, writer)),
        logprobs,
    ]
    if tops:
        # A chat's prompt has no logprobs: its `logprob_start_len` is -1.
        parts += [b',"input_top_logprobs":[],"output_top_logprobs":', writer.top_triples(tops)]
    if masks is not None:
        # Renormalised over what was kept: nearer to 0.
        numbers = b",".join(repr(float(one) / 2).encode() for one in writer.logprobs(generation.draft))
        parts += [b',"output_token_sampling_mask":', masks, b',"output_token_sampling_logprobs":[', numbers, b"]"]
        parts.append(b',"output_token_sampling_mask_length":%d' % generation.completion_tokens)
    parts.append(counted_info(generation, generation.completion_tokens))
    for name, payload in (("routed_experts", experts), ("indexer_topk", writer.indexer(generation))):
        if payload is not None:
            parts += [b',"%s":' % name.encode(), payload]
    ended = {"e2e_latency": generation.seconds, **speculative_of(generation), "response_sent_to_client_ts": SENT}
    return [*parts, b',"dp_rank":0,', encode(ended)[1:]]


def begun_info(generation: Generation[R], tokens: int, finish: dict[str, object] | None) -> bytes:
    """The beginning of ``meta_info``, open at its end, up to where its logprobs stand."""
    facts = {
        "id": generation.id,
        "finish_reason": finish,
        "prompt_tokens": generation.prompt.count,
        "weight_version": generation.version_at(tokens),
        "num_retractions": 0,
    }
    return encode(facts)[:-1]


def logprob_lists(triples: bytes | None, tokens: int, of_prompt: bytes) -> bytes:
    """Those of ``tokens`` tokens so far; nothing where they were not asked for."""
    if triples is None:
        return b""
    lists = b',"input_token_logprobs":%b,"output_token_logprobs":%b,"output_token_logprobs_length":%d'
    return lists % (of_prompt, triples, tokens)


def counted_info(generation: Generation[R], tokens: int) -> bytes:
    """What of ``meta_info`` follows the logprobs of ``tokens`` tokens so far."""
    facts = {
        "reasoning_tokens": 0,
        "completion_tokens": tokens,
        "cached_tokens": generation.cached_tokens,
        "weight_versions": generation.versions_until(tokens),
    }
    return b"," + encode(facts)[1:-1]


def queued_info(generation: Generation[R], logprobs: bytes) -> bytes:
    """The ``meta_info`` of an abort in the waiting queue: the scheduler, which counts, has no part in it."""
    facts = {
        "id": generation.id,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": generation.weight_version,
        "e2e_latency": generation.seconds,
        "weight_versions": generation.versions,
    }
    ended = {"completion_tokens": generation.completion_tokens, "response_sent_to_client_ts": SENT}
    return encode(facts)[:-1] + logprobs + b"," + encode(ended)[1:]


def speculative_of(generation: Generation[R]) -> dict[str, object]:
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


def usage(generation: Generation[R], writer: ReplyWriter) -> dict[str, object]:
    """SGLang's: cached tokens with ``--enable-cache-report`` alone."""
    counted = generation.usage
    if not writer.config.cache_report:
        counted["prompt_tokens_details"] = None
    return {**counted, "reasoning_tokens": 0, "completion_tokens_details": None}


def metadata(generation: Generation[R]) -> bytes:
    return encode({"weight_version": generation.weight_version, "weight_versions": generation.versions})


def stream(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events. A chunk has its share of the sampled tokens' logprobs, the ids come behind the
    last. No chunk names a weight version."""
    request, draft = generation.request, generation.draft
    common = {
        "id": generation.id,
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": request.model,
    }
    size = generation.sim.chunk_tokens
    begun, *found = deltas(draft)
    if size is not None and not (draft.calls or draft.reasoning):
        found = [{"content": text} for text in writer.texts_of(draft.ids, size)]
    numbers = writer.logprobs(draft) if request.logprobs else []
    # The end token is a step of its own, which shows no text.
    shown = len(draft.ids) - generation.ended_itself
    ends = [number * shown // max(len(found), 1) for number in range(len(found) + 1)]
    if size is not None:
        ends = [min(end * size, shown) for end in range(len(found) + 1)]
    silent = {"logprobs": None, "finish_reason": None, "matched_stop": None}

    def chunk(delta: dict[str, object], **more: object) -> bytes:
        told = {"reasoning_content": None, **delta}
        return event({**common, "choices": [{"index": 0, "delta": told, **silent, **more}]})

    def logprobs_of(start: int, end: int) -> Raw | None:
        if not request.logprobs or start == end:
            return None
        ids, of_ids = draft.ids[start:end], numbers[start:end]
        tops = writer.alternatives(ids, of_ids, request.alternatives) if request.alternatives else []
        return Raw(writer.content_logprobs(replace(draft, ids=ids), of_ids, tops))

    events = [chunk(begun)]
    for delta, start, end in zip(found, ends, ends[1:], strict=False):
        if "tool_calls" not in delta:
            events.append(chunk(delta, logprobs=logprobs_of(start, end)))
            continue
        # What parses calls sends these as they come, and their tokens' logprobs behind them.
        said = {"role": None, "content": None, "reasoning_content": None, "tool_calls": delta["tool_calls"]}
        events.append(event({**common, "choices": [{"index": 0, "delta": said, **silent}], "usage": None}))
        if logprobs := logprobs_of(start, end):
            events.append(chunk({}, logprobs=logprobs))
    if logprobs := logprobs_of(ends[-1], len(draft.ids)):
        events.append(chunk({}, logprobs=logprobs))
    events.append(chunk({}, finish_reason=draft.finish, matched_stop=matched_stop(generation, writer)))
    extension: dict[str, object] = {}
    if request.return_routed_experts and not generation.queued:
        extension["routed_experts"] = Raw(writer.experts(generation, True, request.routed_experts_start_len) or b"null")
    if request.return_input_ids_in_sglext:
        extension["input_ids"] = generation.prompt.ids()
    if request.return_output_ids_in_sglext:
        extension["output_ids"] = [draft.ids]
    if extension:
        events.append(event({**common, "choices": [], "usage": None, "sglext": extension}))
    if request.stream_options and request.stream_options.include_usage:
        events.append(event({**common, "choices": [], "usage": usage(generation, writer)}))
    return Reply((*events, DONE), content_type=EVENT_STREAM)
