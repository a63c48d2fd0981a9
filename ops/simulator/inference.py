"""vLLM 0.33's ``/inference/v1/generate`` and ``/v1/chat/completions/render``, which ``--enable-scale-out`` adds.

Fields and their order are those of its models. A prompt of ids gets the answer that its chat would; with
``output_mode`` ``text`` it is a completion's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct

from ops.simulator.config import Config
from ops.simulator.generate import Draft
from ops.simulator.generation import Generation, ReplyWriter, encode, message_json
from ops.simulator.template import Template
from ops.simulator.vllm import content_of, metrics_of
from ops.simulator.wire import BadRequest, ChatRequest, KvTransfer, Reply, Sim, json_reply

DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"
ROUTES = (GENERATE, RENDER, "/inference/v1/abort_requests")

MODEL_DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "stop_token_ids": [7]}
"""What the model's ``generation_config.json`` says, with ``--sampling-defaults model``."""

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


class GenerateRequest(Struct):
    """The body of ``/inference/v1/generate``. ``return_routed_experts`` and ``return_sampling_mask`` are the engine's
    arguments in vLLM."""

    token_ids: Raw
    sampling_params: Sampling
    model: str | None = None
    output_mode: OutputMode = "tokens"
    parse_context: ParseContext | None = None
    return_token_ids: bool | None = None
    stream: bool | None = False
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    sim: Sim | None = None


class TokensRequest(ChatRequest, kw_only=True):
    """A chat whose prompt is ids, answered as ``output_mode`` says."""

    output_mode: OutputMode


def read(body: bytes, config: Config) -> TokensRequest:
    """Raises BadRequest for what vLLM refuses, and for what this simulator does not do."""
    asked = msgspec.json.decode(body, type=GenerateRequest)
    sampling, context = asked.sampling_params, asked.parse_context or ParseContext()
    if asked.output_mode == "derender" and config.silent_versions:
        raise BadRequest("output_mode: Input should be 'tokens' or 'text'")
    if asked.output_mode == "derender" and asked.parse_context is None:
        raise BadRequest("output_mode='derender' requires parse_context on a server with a tool or reasoning parser.")
    if asked.stream:
        raise BadRequest("this simulator's /inference/v1/generate does not stream")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {sampling.max_tokens}.")
    return TokensRequest(
        messages=[],
        tools=context.tools,
        tool_choice=context.tool_choice,
        kv_transfer_params=KvTransfer(asked.token_ids),
        model=asked.model or config.model,
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        stop=sampling.stop,
        logprobs=sampling.logprobs is not None,
        top_logprobs=sampling.logprobs or 0,
        prompt_logprobs=sampling.prompt_logprobs,
        routed_experts_prompt_start=sampling.routed_experts_prompt_start,
        return_routed_experts=asked.return_routed_experts,
        return_sampling_mask=asked.return_sampling_mask,
        return_token_ids=asked.return_token_ids,
        return_weight_versions=True,
        sim=asked.sim,
        output_mode=asked.output_mode,
    )


def is_parsed(request: ChatRequest) -> bool:
    """Is the answer a chat's?"""
    return isinstance(request, TokensRequest) and request.output_mode == "derender"


def render(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The whole reply to a `TokensRequest`, with large payloads as separate parts."""
    request, draft = generation.request, generation.draft
    assert isinstance(request, TokensRequest)
    experts = writer.experts(generation, request.return_routed_experts, request.routed_experts_prompt_start, npy=True)
    finish = draft.finish if request.output_mode == "derender" or draft.finish != "tool_calls" else "stop"
    prompt_ids = b"[" + generation.prompt.json + b"]" if request.return_token_ids else b"null"
    head = [
        b'{"request_id":%s,"model":%s,"created":%d,"usage":%s,"prompt_logprobs":%s,"prompt_token_id_logprobs":null,'
        b'"prompt_token_ids":%s,"mm_placeholders":null'
        % (
            encode(f"generate-tokens-{generation.id}"),
            encode(request.model),
            generation.created,
            encode(generation.usage),
            writer.prompt_logprobs(generation.prompt, request.prompt_logprobs),
            prompt_ids,
        ),
        metrics_of(generation) or b',"metrics":null',
        b',"kv_transfer_params":null,"ec_transfer_params":null,"output_mode":"%s","choices":[{"index":0,'
        b'"finish_reason":"%s","stop_reason":%s,"token_ids":%s,"routed_experts":'
        % (request.output_mode.encode(), finish.encode(), encode(draft.stop_text), encode(draft.ids)),
    ]
    tail = [
        b',"sampling_mask":',
        writer.masks(generation) or b"null",
        b',"weight_versions":',
        encode(generation.versions) if request.return_weight_versions else b"null",
        _content(request.output_mode, draft),
        b',"logprobs":',
        _logprobs(request, draft, writer),
        b"}]",
    ]
    return Reply(writer.padded([b"".join(head), experts or b"null", b"".join(tail)], generation.sim.body_bytes))


def _content(mode: OutputMode, draft: Draft) -> bytes:
    match mode:
        case "derender":
            return b',"message":' + message_json(draft, b"null")
        case "text":
            return b',"text":' + encode(draft.text)
        case "tokens":
            return b""


def _logprobs(request: TokensRequest, draft: Draft, writer: ReplyWriter) -> bytes:
    if not request.logprobs:
        return b"null"
    numbers = writer.logprobs(draft)
    if request.output_mode != "tokens":
        return content_of(request, writer, draft, numbers)
    entries = [
        b'{"token_id":%d,"logprob":%b,"rank":null,"top_logprobs":[]}' % (token, number)
        for token, number in zip(draft.ids, numbers, strict=True)
    ]
    return b'{"content":[' + b",".join(entries) + b"]}"


def rendered(body: bytes, template: Template, config: Config) -> Reply:
    """What ``/v1/chat/completions/render`` makes of a chat: the parameters that differ from vLLM's own."""
    request = msgspec.json.decode(body, type=ChatRequest)
    filled: dict[str, object] = dict(MODEL_DEFAULTS) if config.sampling_defaults == "model" else {}
    if bytes(request.tools):
        filled["skip_special_tokens"] = False
    reply: dict[str, object] = {
        "request_id": "chatcmpl-rendered",
        "token_ids": template.prompt(template.read(request.messages, request.tools)).ids(),
        "features": None,
        "sampling_params": {**filled, "max_tokens": 1_048_000, "output_kind": 2, "skip_clone": True},
        "model": request.model,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
    }
    if not config.silent_versions:
        reply["parse_context"] = {"tools": None, "tool_choice": "none", "chat_template_kwargs": {}}
    return json_reply(reply)
