"""vLLM on the wire: its OpenAI server, what ``--enable-scale-out`` adds to 0.33, and its control routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Raw, Struct, structs

from ops.simulator.completions import logprobs_of, read_completion
from ops.simulator.engine import Asked, Control, Engine, Query, Route, always
from ops.simulator.generation import Generation, ReplyWriter, message_of, sampled_first
from ops.simulator.template import Conversation, bare_conversation
from ops.simulator.tokenizer import Encoded
from ops.simulator.wire import (
    EMPTY,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Config,
    KvTransfer,
    Reply,
    Request,
    event,
    json_reply,
    stream_reply,
)

GENERATE, RENDER, ABORT = "/inference/v1/generate", "/v1/chat/completions/render", "/inference/v1/abort_requests"

MODEL_DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "stop_token_ids": [7]}
"""What the model's ``generation_config.json`` says, with ``--sampling-defaults model``."""

_decode_chat = msgspec.json.Decoder(ChatRequest).decode


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
    """vLLM's error object."""
    return json_reply({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def adapter(request: Request, config: Config) -> str | None:
    """The adapter of a request, which only ``model`` can name. Raises :class:`BadRequest`."""
    if request.model in config.adapters:
        return request.model
    if config.adapters and request.model != config.model:
        raise BadRequest(f"The model `{request.model}` does not exist.", 404)
    return None


def check(request: Request) -> None:
    if isinstance(request, ChatRequest) and request.stream and request.prompt_logprobs:
        raise BadRequest("`prompt_logprobs` are not available when `stream=True`.")


def check_prompt(request: Request, prompt: Encoded, config: Config, history: Conversation | None) -> None:
    """Any prompt fits, and arguments that are no object are rendered as `{}`."""


# /v1/chat/completions


def read_chat(engine: Engine, body: bytes, session: str | None) -> Asked:
    request = _decode_chat(body)
    return engine.read_chat(request, session, (request.kv_transfer_params or KvTransfer()).prompt_token_ids)


def content_of(request: ChatRequest, writer: ReplyWriter, ids: list[int], numbers: list[bytes]) -> Raw:
    """``logprobs`` with the alternatives that were asked for, the sampled token first."""
    count, as_ids = request.alternatives, bool(request.return_tokens_as_token_ids)
    tops = sampled_first(writer.alternatives(ids, numbers, count), ids, numbers) if count else []
    return writer.content_logprobs(ids, numbers, [top[:count] for top in tops], as_ids)


def metrics_of(generation: Generation[Request]) -> dict[str, object] | None:
    """What a reply says where it was speculated."""
    if generation.sim.speculative is None:
        return None
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
    return {"speculative_decoding": counted}


def render_chat(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    request, draft = generation.request, generation.draft
    logprobs: object = None
    if request.logprobs and request.top_logprobs is None:
        logprobs = {"content": []}
    elif request.logprobs:
        logprobs = content_of(request, writer, draft.ids, writer.logprobs(draft))
    choice: dict[str, object] = {
        "index": 0,
        "message": message_of(draft, None),
        "logprobs": logprobs,
        "finish_reason": draft.finish,
        "stop_reason": draft.stop_text,
        "token_ids": draft.ids if request.return_token_ids else None,
    }
    if request.return_weight_versions:
        choice["weight_versions"] = generation.versions
    payloads = {"routed_experts": writer.experts(generation), "sampling_mask": writer.masks(generation)}
    choice |= {name: payload for name, payload in payloads.items() if payload is not None}
    metrics = metrics_of(generation)
    return writer.reply(
        generation,
        {
            **generation.head("chat.completion", "chatcmpl-"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": generation.usage,
            "prompt_logprobs": writer.prompt_logprobs(generation.prompt, request.prompt_logprobs),
            "prompt_token_ids": generation.prompt.raw if request.return_token_ids else None,
            "kv_transfer_params": None,
            **({"metrics": metrics} if metrics else {}),
        },
    )


def stream_chat(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events: the prompt's ids come first; each later chunk has its share of the sampled ids
    and logprobs, and the last of them what a whole choice has besides."""
    request, draft = generation.request, generation.draft
    common = generation.head("chat.completion.chunk", "chatcmpl-")
    size, pieces = generation.sim.chunk_tokens, [*writer.deltas(generation), {}]
    prompt_ids = generation.prompt.ids() if request.return_token_ids else None
    begun = {"role": "assistant", "content": ""}
    first: dict[str, object] = {"index": 0, "delta": begun, "logprobs": None, "finish_reason": None}
    events = [event({**common, "choices": [first], "prompt_token_ids": prompt_ids})]
    ends = [number * len(draft.ids) // len(pieces) for number in range(len(pieces) + 1)]
    if size is not None:
        ends = [min(end * size, len(draft.ids)) for end in range(len(pieces))] + [len(draft.ids)]
    numbers = writer.logprobs(draft)
    for delta, start, end in zip(pieces, ends, ends[1:], strict=False):
        ids = draft.ids[start:end]
        logprobs = content_of(request, writer, ids, numbers[start:end]) if request.logprobs else None
        choice: dict[str, object] = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        choice["token_ids"] = ids if request.return_token_ids else None
        if not delta:
            choice |= {"finish_reason": draft.finish, "stop_reason": draft.stop_text}
            if request.return_weight_versions:
                choice["weight_versions"] = generation.versions
        events.append(event({**common, "choices": [choice]}))
    if request.wants_usage:
        events.append(event({**common, "choices": [], "usage": generation.usage}))
    return stream_reply(events)


# /v1/completions


def render_completion(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """All data about the tokens is in the choice."""
    request, draft = generation.request, generation.draft
    # With return_token_ids, only the ids contain an echoed prompt.
    is_echoed = request.echo and not request.return_token_ids
    choice = {
        "index": 0,
        "text": (writer.tokenizer.decode(generation.prompt.ids()) if is_echoed else "") + draft.text,
        "logprobs": logprobs_of(generation, writer, range(len(draft.ids)), with_prompt=bool(request.echo)),
        "finish_reason": draft.finish,
        "stop_reason": draft.stop_text,
        "token_ids": draft.ids if request.return_token_ids else None,
        "prompt_logprobs": writer.prompt_logprobs(generation.prompt, request.prompt_logprobs),
        "prompt_token_ids": generation.prompt.raw if request.return_token_ids else None,
        "weight_versions": generation.versions if request.return_weight_versions else None,
        "routed_experts": writer.experts(generation),
    }
    return writer.reply(
        generation,
        {
            **generation.head("text_completion", "cmpl-"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": generation.usage,
            "kv_transfer_params": None,
        },
    )


# /inference/v1/generate and /v1/chat/completions/render, which `--enable-scale-out` adds. Fields and their order are
# those of vLLM's models.

OutputMode = Literal["tokens", "text", "derender"]


class Sampling(Struct):
    """Of ``sampling_params``, what the simulator reads. Without ``max_tokens`` the rest of the model's context."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    routed_experts_prompt_start: int = 0


class ParseContext(Struct, forbid_unknown_fields=True):
    """What parses the message of ``output_mode`` ``derender``."""

    tools: Raw = Raw(b"")
    tool_choice: str | dict[str, object] | None = "none"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, object] = {}
    history_tool_call_cnt: int = 0


class TokensRequest(ChatRequest, kw_only=True):
    """A chat whose prompt is ids, answered as ``output_mode`` says. ``return_routed_experts`` and
    ``return_sampling_mask`` are the engine's arguments in vLLM."""

    messages: list[Raw] = []  # noqa: RUF012 - msgspec copies it
    model: str = ""
    token_ids: Raw
    sampling_params: Sampling
    output_mode: OutputMode = "tokens"
    parse_context: ParseContext | None = None


def read_generate(engine: Engine, body: bytes, session: str | None) -> Asked:
    """A prompt of ids gets the answer that its chat would with ``output_mode`` ``derender``, else a completion's."""
    asked = msgspec.json.decode(body, type=TokensRequest)
    sampling, context, is_parsed = asked.sampling_params, asked.parse_context, asked.output_mode == "derender"
    if is_parsed and engine.config.silent_versions:
        raise BadRequest("output_mode: Input should be 'tokens' or 'text'")
    if is_parsed and context is None:
        raise BadRequest("output_mode='derender' requires parse_context on a server with a tool or reasoning parser.")
    if asked.stream:
        raise BadRequest("this simulator's /inference/v1/generate does not stream")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {sampling.max_tokens}.")
    context = context or ParseContext()
    chosen = {
        "tools": context.tools,
        "tool_choice": context.tool_choice,
        "model": asked.model or engine.config.model,
        "logprobs": sampling.logprobs is not None,
        "top_logprobs": sampling.logprobs or 0,
        "return_weight_versions": True,
    }
    request: ChatRequest = structs.replace(asked, **structs.asdict(sampling) | chosen)
    engine.check(request)
    prompt = engine.ids_of(bytes(asked.token_ids))
    conversation = bare_conversation(prompt)
    if is_parsed:
        conversation = engine.template.reread(engine.tokenizer.decode(prompt.ids()))
        request = engine.planned(request, conversation, session)
    return Asked(request, prompt, conversation)


def render_generate(generation: Generation[TokensRequest], writer: ReplyWriter) -> Reply:
    request, draft, mode = generation.request, generation.draft, generation.request.output_mode
    numbers = writer.logprobs(draft)
    said: dict[str, object] = {}
    if mode != "tokens":
        said = {"message": message_of(draft, None)} if mode == "derender" else {"text": draft.text}
        said["logprobs"] = content_of(request, writer, draft.ids, numbers) if request.logprobs else None
    else:
        entry = b'{"token_id":%d,"logprob":%b,"rank":null,"top_logprobs":[]}'
        entries = [Raw(entry % pair) for pair in zip(draft.ids, numbers, strict=True)]
        said = {"logprobs": {"content": entries} if request.logprobs else None}
    choice = {
        "index": 0,
        "finish_reason": draft.finish if mode == "derender" or draft.finish != "tool_calls" else "stop",
        "stop_reason": draft.stop_text,
        "token_ids": draft.ids,
        "routed_experts": writer.experts(generation),
        "sampling_mask": writer.masks(generation),
        "weight_versions": generation.versions if request.return_weight_versions else None,
        **said,
    }
    return writer.reply(
        generation,
        {
            "request_id": f"generate-tokens-{generation.id}",
            "model": request.model,
            "created": generation.created,
            "usage": generation.usage,
            "prompt_logprobs": writer.prompt_logprobs(generation.prompt, request.prompt_logprobs),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": generation.prompt.raw if request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": metrics_of(generation),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": mode,
            "choices": [choice],
        },
    )


def render_prompt(engine: Engine, request: ChatRequest, query: Query) -> Reply:
    """The ids of a chat, and the parameters that differ from vLLM's own."""
    config = engine.config
    filled: dict[str, object] = dict(MODEL_DEFAULTS) if config.sampling_defaults == "model" else {}
    if bytes(request.tools):
        filled["skip_special_tokens"] = False
    reply: dict[str, object] = {
        "request_id": "chatcmpl-rendered",
        "token_ids": engine.template.prompt(engine.template.read(request.messages, request.tools)).ids(),
        "features": None,
        "sampling_params": {**filled, "max_tokens": 1_048_000, "output_kind": 2, "skip_clone": True},
        "model": request.model,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
    }
    if not config.silent_versions:
        reply["parse_context"] = {"tools": None, "tool_choice": "none", "chat_template_kwargs": {}}
    return json_reply(reply)


def abort_scaled_out(engine: Engine, request: AbortRequests, query: Query) -> Reply:
    if request.request_ids is None:
        return json_reply({"detail": "Missing 'request_ids' in request body"}, 400)
    engine.runs.abort_external(request.request_ids)
    return EMPTY


# Control, in its development mode


class AbortRequests(Struct):
    """Of both routes. None or no ids at all: the development mode aborts everything."""

    request_ids: list[str] | None = None


class UpdateWeightVersion(Struct):
    """It aborts nothing."""

    new_version: str


async def pause(engine: Engine, body: bytes, query: Query) -> Reply:
    mode = query.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        return error(f"unknown mode {mode[:40]!r}")
    if failed := engine.failed(engine.behaviour.pause):
        return failed
    if mode == "wait":
        await engine.runs.drained()
    engine.runs.pause()
    if mode == "abort":
        engine.runs.abort("", everything=True)
    return json_reply({"status": "paused"})


def resume(engine: Engine, body: bytes, query: Query) -> Reply:
    engine.runs.resume()
    return json_reply({"status": "resumed"})


def abort_requests(engine: Engine, request: AbortRequests, query: Query) -> Reply:
    if not request.request_ids:
        return json_reply({"status": "aborted", "aborted": engine.runs.abort("", everything=True)})
    engine.runs.abort_external(request.request_ids)
    return json_reply({"status": "aborted", "aborted": len(request.request_ids)})


def update_weight_version(engine: Engine, request: UpdateWeightVersion, query: Query) -> Reply:
    engine.runs.new_version(request.new_version)
    engine.weight_version = request.new_version
    return json_reply({"success": True, "new_version": request.new_version})


def server_info(engine: Engine, body: bytes, query: Query) -> Reply:
    model_config = {"model": engine.config.model, "logprobs_mode": engine.config.logprobs_mode}
    return json_reply({"vllm_config": {"model_config": model_config}, "vllm_env": {}, "system_env": {}})


_ROUTES = {
    ("POST", "/v1/chat/completions"): Route(read_chat, render_chat, stream_chat),
    ("POST", "/v1/completions"): Route(read_completion, render_completion, render_completion, "cmpl-%s-0"),
}
_DISABLED = always(
    error(
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        403,
        "PermissionDeniedError",
    )
)
_SCALED_OUT_ROUTES = _ROUTES | {
    ("POST", GENERATE): Route(read_generate, render_generate, render_generate, "generate-tokens-%s")
}
_SCALED_OUT_CONTROL = {
    ("POST", ABORT): Control(abort_scaled_out, AbortRequests, "abort"),
    ("POST", RENDER): Control(render_prompt, ChatRequest),
}
_DEVELOPMENT = {
    ("POST", "/pause"): Control(pause),
    ("POST", "/resume"): Control(resume, outcome="resume"),
    ("GET", "/is_paused"): Control(lambda engine, *_: json_reply({"is_paused": engine.runs.paused})),
    ("POST", "/abort_requests"): Control(abort_requests, AbortRequests, "abort"),
    ("GET", "/weight_info"): Control(lambda engine, *_: json_reply({"weight_version": engine.weight_version})),
    ("POST", "/reset_prefix_cache"): always(EMPTY),
    ("POST", "/update_weight_version"): Control(update_weight_version, UpdateWeightVersion),
}


def routes(engine: Engine) -> Mapping[tuple[str, str], Route]:
    return _SCALED_OUT_ROUTES if engine.behaviour.scale_out else _ROUTES


def control(engine: Engine, path: str) -> Mapping[tuple[str, str], Control]:
    if path in (GENERATE, RENDER, ABORT) and not engine.behaviour.scale_out:
        return {(method, path): _DISABLED for method in ("GET", "POST", "PUT")}
    found = {("GET", "/health"): always(EMPTY)._replace(outcome="health")}
    if engine.behaviour.dev_mode:
        found |= _DEVELOPMENT
        if engine.config.logprobs_mode is not None:
            found["GET", "/server_info"] = Control(server_info)
    return found | _SCALED_OUT_CONTROL if engine.behaviour.scale_out else found
