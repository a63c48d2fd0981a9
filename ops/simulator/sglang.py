"""SGLang 0.5.23 on the wire: chats, completions, its native ``/generate``, its parsers and its control routes."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Raw, Struct, structs, to_builtins

from ops.simulator.completions import logprobs_of, read_completion
from ops.simulator.control import Detokenize, Tokenize, detokenize, tokenize
from ops.simulator.engine import Asked, Control, Engine, Query, Refused, Route, always
from ops.simulator.generation import Alternatives, Generation, ReplyWriter, message_of
from ops.simulator.policy import parse
from ops.simulator.template import Conversation, bare_conversation
from ops.simulator.tokenizer import IM_START, Encoded
from ops.simulator.wire import (
    EMPTY,
    Abort,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Config,
    Reply,
    Request,
    event,
    json_reply,
    stream_reply,
)

_NOT_STREAMED = {"return_meta_info": "", "return_prompt_token_ids": "", "return_token_ids": " on /v1/chat/completions"}

SENT = 1795881708.25
"""Seconds since the epoch at which every reply is said to have been sent: a real one's digits vary."""

HEALTH_PATIENCE_S = 20.0
"""Seconds that ``/health`` waits for the token that it generates."""

_decode_chat = msgspec.json.Decoder(ChatRequest).decode

# Errors


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> Reply:
    """A flat error object."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json_reply(body, status)


def native_error(message: str, is_streamed: bool = False) -> Reply:
    """What ``/generate`` answers where it refuses a request that it could read; a stream's status is 200."""
    if not is_streamed:
        return json_reply({"error": {"message": message}}, 400)
    fields = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    return stream_reply([event({"error": fields})])


def adapter(request: Request, config: Config) -> str | None:
    """The adapter of a request. A name in ``model``, as ``base:adapter``, takes precedence over ``lora_path``.

    Raises :class:`BadRequest`.
    """
    path = request.lora_path
    asked = request.model.partition(":")[2].strip() or (path if isinstance(path, str) else None) or None
    if asked is not None and config.adapters and asked not in config.adapters:
        raise BadRequest(f"The following requested LoRA adapters are not loaded: {{{asked!r}}}")
    return asked


def check(request: Request) -> None:
    """Refuse what cannot be sampled with, and what does not go together. Raises :class:`BadRequest`."""
    if request.temperature is not None and request.temperature < 0:
        raise BadRequest(f"temperature must be a non-negative finite number, got {request.temperature}.")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {request.top_p}.")
    if not isinstance(request, ChatRequest):
        return
    for name, where in _NOT_STREAMED.items():
        if request.stream and getattr(request, name):
            raise BadRequest(
                f"{name} is not supported with streaming{where}. Please set stream=false when using {name}=true.",
                kind="BadRequest",
            )
    if request.return_sampling_mask and not request.return_meta_info:
        raise BadRequest("return_sampling_mask requires return_meta_info=true.")
    if request.return_sampling_mask and (request.top_k or 0) < 1:
        raise BadRequest("return_sampling_mask requires a finite top_k.")
    if request.tool_choice == "required" and not bytes(request.tools):
        raise BadRequest("Tools cannot be empty if tool choice is set to required.")


def check_prompt(request: Request, prompt: Encoded, config: Config, history: Conversation | None) -> None:
    """Refuse what the chat template cannot render, what does not fit the context, and a first row outside the prompt.
    Raises :class:`BadRequest`."""
    if history and not all(message.calls_objects for message in history.messages):
        raise BadRequest("Assistant tool call function.arguments must be valid JSON.", kind="BadRequest")
    tokens, limit, length = prompt.count, request.limit or 0, config.context_length
    if tokens >= length:
        raise BadRequest(f"The input ({tokens} tokens) is longer than the model's context length ({length} tokens).")
    if tokens + limit > length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {length} tokens. You requested a "
            f"total of {tokens + limit} tokens: {tokens} tokens from the input messages and {limit} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to "
            "fit within the limit."
        )
    if not 0 <= request.routed_experts_start_len <= tokens:
        raise BadRequest(f"routed_experts_start_len must be in [0, {tokens}].")


def aborted(generation: Generation[Request]) -> Abort | None:
    """The abort that is answered with an error in place of a reply."""
    abort = generation.sim.abort
    return abort if generation.draft.finish == "abort" and abort.status_code is not None else None


def abort_error(abort: Abort) -> Reply:
    status = abort.status_code or 500
    return error(abort.message, status, "BadRequestError" if status == 400 else str(status))


# What replies share


def matched_stop(generation: Generation[Request], writer: ReplyWriter) -> int | str | None:
    """What ended the generation: a stop string, or the end token."""
    return generation.draft.stop_text or (writer.end_id if generation.ended_itself else None)


def usage(generation: Generation[Request], writer: ReplyWriter) -> dict[str, object]:
    """Cached tokens are counted with ``--enable-cache-report`` alone."""
    counted = generation.usage
    if not writer.config.cache_report:
        counted["prompt_tokens_details"] = None
    return {**counted, "reasoning_tokens": 0, "completion_tokens_details": None}


def metadata(generation: Generation[Request]) -> dict[str, object]:
    return {"weight_version": generation.weight_version, "weight_versions": generation.versions}


def finish_of(generation: Generation[Request], writer: ReplyWriter) -> dict[str, object]:
    """The finish reason of ``/generate``, and in ``meta_info`` where no tool call was parsed."""
    finish = generation.draft.finish
    if finish == "length":
        return {"type": "length", "length": generation.completion_tokens}
    if finish == "abort":
        return {"type": "abort", **to_builtins(generation.sim.abort)}
    matched = matched_stop(generation, writer)
    return {"type": finish} if matched is None else {"type": "stop", "matched": matched}


def logprob_lists(triples: Raw | None, tokens: int, of_prompt: Raw | None = None) -> dict[str, object]:
    """Those of ``tokens`` tokens so far; nothing where they were not asked for."""
    if triples is None:
        return {}
    counted = {"output_token_logprobs": triples, "output_token_logprobs_length": tokens}
    return {"input_token_logprobs": of_prompt or [], **counted}


def meta_info(
    generation: Generation[ChatRequest],
    writer: ReplyWriter,
    finish: dict[str, object] | None,
    logprobs: dict[str, object],
    tokens: int,
    tops: Sequence[Alternatives] = (),
    is_first: bool = True,
) -> dict[str, object]:
    """The ``meta_info`` of a whole reply, and of an event after so many tokens, of which the last has a ``finish``."""
    info: dict[str, object] = {
        "id": generation.id,
        "finish_reason": finish,
        "prompt_tokens": generation.prompt.count,
        "weight_version": generation.versions_until(tokens)[-1].version,
        "num_retractions": 0,
        **logprobs,
    }
    if tops:
        # A chat's prompt has no logprobs: its `logprob_start_len` is -1.
        info |= {"input_top_logprobs": [], "output_top_logprobs": writer.top_triples(tops)}
    if (masks := writer.masks(generation)) is not None:
        # Renormalised over what was kept: nearer to 0.
        renormalised = [float(number) / 2 for number in writer.logprobs(generation.draft)]
        info |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": renormalised}
        info["output_token_sampling_mask_length"] = tokens
    info |= {"reasoning_tokens": 0, "completion_tokens": tokens, "cached_tokens": generation.cached_tokens}
    info["weight_versions"] = generation.versions_until(tokens)
    if finish:
        payloads = {"routed_experts": writer.experts(generation), "indexer_topk": writer.indexer(generation)}
        info |= {name: payload for name, payload in payloads.items() if payload is not None}
    info |= {"dp_rank": 0, "e2e_latency": generation.seconds} if finish else {"dp_rank": 0}
    if finish and generation.sim.speculative is not None:
        steps, drafts, accepted = generation.sim.speculative
        info |= {
            "spec_accept_rate": accepted / drafts,
            "spec_accept_length": generation.completion_tokens / steps,
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": drafts,
            "spec_verify_ct": steps,
        }
    return {**info, "response_sent_to_client_ts": SENT} if is_first else info


def queued_info(generation: Generation[Request], logprobs: dict[str, object]) -> dict[str, object]:
    """The ``meta_info`` of an abort in the waiting queue: the scheduler, which counts, has no part in it."""
    return {
        "id": generation.id,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": generation.weight_version,
        "e2e_latency": generation.seconds,
        "weight_versions": generation.versions,
        **logprobs,
        "completion_tokens": generation.completion_tokens,
        "response_sent_to_client_ts": SENT,
    }


# /v1/chat/completions


def read_chat(engine: Engine, body: bytes, session: str | None) -> Asked:
    request = _decode_chat(body)
    return engine.read_chat(request, session, request.input_ids)


def render_chat(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    if abort := aborted(generation):
        return abort_error(abort)
    request, draft = generation.request, generation.draft
    numbers = writer.logprobs(draft) if request.logprobs else []
    asked = request.alternatives if request.logprobs else 0
    tops = writer.alternatives(draft.ids, numbers, asked) if asked else []
    choice: dict[str, object] = {
        "index": 0,
        "message": message_of(draft, ""),
        "logprobs": writer.content_logprobs(draft.ids, numbers, tops) if request.logprobs else None,
        "finish_reason": draft.finish,
        "matched_stop": None if draft.finish == "tool_calls" else matched_stop(generation, writer),
    }
    if request.return_prompt_token_ids or request.return_token_ids:
        choice["prompt_token_ids"] = generation.prompt.raw
    if request.return_token_ids:
        choice["response_token_ids"] = draft.ids
    extension: dict[str, object] = {}
    if request.return_meta_info:
        tokens = len(draft.ids)
        finish = finish_of(generation, writer)
        if draft.finish == "tool_calls":
            finish = {"type": "tool_calls", "matched": None}
        logprobs = logprob_lists(writer.triples(draft.ids, numbers) if request.logprobs else None, tokens)
        choice["meta_info"] = (
            queued_info(generation, logprobs)
            if generation.queued
            else meta_info(generation, writer, finish, logprobs, tokens, tops)
        )
    elif (experts := writer.experts(generation)) is not None:
        extension["routed_experts"] = experts
    if request.return_input_ids_in_sglext:
        extension["input_ids"] = generation.prompt.raw
    if request.return_output_ids_in_sglext:
        extension["output_ids"] = [draft.ids]
    return writer.reply(
        generation,
        {
            **generation.head("chat.completion"),
            "choices": [choice],
            "usage": usage(generation, writer),
            "metadata": metadata(generation),
            **({"sglext": extension} if extension else {}),
        },
    )


def stream_chat(generation: Generation[ChatRequest], writer: ReplyWriter) -> Reply:
    """The reply as server-sent events. A chunk has its share of the sampled tokens' logprobs, the ids come behind the
    last. No chunk names a weight version."""
    request, draft = generation.request, generation.draft
    common = generation.head("chat.completion.chunk")
    size, found = generation.sim.chunk_tokens, writer.deltas(generation)
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

    def logprobs_of_share(start: int, end: int) -> Raw | None:
        if not request.logprobs or start == end:
            return None
        ids, of_ids = draft.ids[start:end], numbers[start:end]
        tops = writer.alternatives(ids, of_ids, request.alternatives) if request.alternatives else []
        return writer.content_logprobs(ids, of_ids, tops)

    events = [chunk({"role": "assistant", "content": ""})]
    for delta, start, end in zip(found, ends, ends[1:], strict=False):
        logprobs = logprobs_of_share(start, end)
        if "tool_calls" not in delta:
            events.append(chunk(delta, logprobs=logprobs))
            continue
        # What parses calls sends these as they come, and their tokens' logprobs behind them.
        said = {"role": None, "content": None, "reasoning_content": None, "tool_calls": delta["tool_calls"]}
        events.append(event({**common, "choices": [{"index": 0, "delta": said, **silent}], "usage": None}))
        if logprobs:
            events.append(chunk({}, logprobs=logprobs))
    if logprobs := logprobs_of_share(ends[-1], len(draft.ids)):
        events.append(chunk({}, logprobs=logprobs))
    events.append(chunk({}, finish_reason=draft.finish, matched_stop=matched_stop(generation, writer)))
    extension: dict[str, object] = {}
    if (experts := writer.experts(generation)) is not None:
        extension["routed_experts"] = experts
    if request.return_input_ids_in_sglext:
        extension["input_ids"] = generation.prompt.ids()
    if request.return_output_ids_in_sglext:
        extension["output_ids"] = [draft.ids]
    if extension:
        events.append(event({**common, "choices": [], "usage": None, "sglext": extension}))
    if request.wants_usage:
        events.append(event({**common, "choices": [], "usage": usage(generation, writer)}))
    return stream_reply(events)


# /v1/completions


def _completion_text(
    generation: Generation[CompletionRequest], writer: ReplyWriter, places: range, text: str
) -> dict[str, object]:
    """The text of these places and its logprobs, at the first after those of an echoed prompt."""
    request, is_echoed = generation.request, bool(generation.request.echo and places.start == 0)
    before = writer.tokenizer.decode(generation.prompt.ids()) if is_echoed else ""
    logprobs = logprobs_of(generation, writer, places, with_prompt=is_echoed and bool(request.logprobs))
    return {"index": 0, "text": before + text, "logprobs": logprobs}


def render_completion(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """Without ``meta_info``: payloads are in ``sglext``, weight versions in ``metadata``."""
    if abort := aborted(generation):
        return abort_error(abort)
    draft = generation.draft
    choice = _completion_text(generation, writer, range(len(draft.ids)), draft.text)
    choice |= {"finish_reason": draft.finish, "matched_stop": matched_stop(generation, writer)}
    if generation.request.return_token_ids:
        choice |= {"token_ids": draft.ids, "prompt_token_ids": generation.prompt.raw}
    experts = writer.experts(generation)
    return writer.reply(
        generation,
        {
            **generation.head("text_completion"),
            "choices": [choice],
            "usage": usage(generation, writer),
            "metadata": metadata(generation),
            **({} if experts is None else {"sglext": {"routed_experts": experts}}),
        },
    )


def stream_completion(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """Events of ``chunk_tokens`` each: the first has an echoed prompt and the prompt's ids."""
    request, draft = generation.request, generation.draft
    common = generation.head("text_completion")
    events: list[bytes] = []
    for places, delta, is_last in writer.chunks(generation):
        choice = _completion_text(generation, writer, places, delta)
        choice["finish_reason"] = draft.finish if is_last else None
        choice["matched_stop"] = matched_stop(generation, writer) if is_last else None
        if request.return_token_ids:
            choice["token_ids"] = draft.ids[places.start : places.stop]
        if request.return_token_ids and not events:
            choice["prompt_token_ids"] = generation.prompt.ids()
        events.append(event({**common, "choices": [choice], "usage": None}))
    if (experts := writer.experts(generation)) is not None:
        events.append(event({**common, "choices": [], "usage": None, "sglext": {"routed_experts": experts}}))
    if request.wants_usage:
        counted = {name: count for name, count in usage(generation, writer).items() if count is not None}
        events.append(event({**common, "choices": [], "usage": counted}))
    return stream_reply(events)


# /generate


class Sampling(Struct, frozen=True, rename={"max_tokens": "max_new_tokens"}):
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = 128
    stop: str | list[str] | None = None


class GenerateRequest(ChatRequest, kw_only=True):
    """A chat whose prompt is text or ids. ``logprob_start_len`` is the first token of the prompt that has a logprob."""

    messages: list[Raw] = []  # noqa: RUF012 - msgspec copies it
    logprobs: bool | None = msgspec.field(name="return_logprob", default=None)
    top_logprobs: int | msgspec.UnsetType | None = msgspec.field(name="top_logprobs_num", default=0)
    text: str | None = None
    sampling_params: Sampling = Sampling()
    return_text_in_logprobs: bool = False
    logprob_start_len: int = -1


def read_generate(engine: Engine, body: bytes, session: str | None) -> Asked:
    """A prompt that was rendered from a chat gets that chat's answer."""
    request = msgspec.json.decode(body, type=GenerateRequest)
    request = structs.replace(request, **structs.asdict(request.sampling_params))
    raw = bytes(request.input_ids)
    try:
        if request.text is None and not raw:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        engine.check(request)
        prompt = engine.ids_of(raw) if raw else engine.tokenizer.encode(request.text or "")
        check_prompt(request, prompt, engine.config, None)
        text = engine.tokenizer.decode(prompt.ids())
        conversation = engine.template.reread(text) if IM_START in text else bare_conversation(prompt)
    except BadRequest as refusal:
        raise Refused(native_error(str(refusal), is_streamed=bool(request.stream))) from refusal
    # A generation that a test aborts at a token is held, and delivered at once.
    is_paced = bool(request.stream) and not (request.sim and request.sim.abort_at)
    return Asked(request, prompt, conversation, is_paced=is_paced)


def _logprobs(generation: Generation[GenerateRequest], writer: ReplyWriter, start: int, end: int) -> dict[str, object]:
    """Those of the sampled tokens from `start` up to `end`, and of the prompt's from the first asked for."""
    request, first = generation.request, generation.request.logprob_start_len
    if not request.logprobs:
        return {}
    of_prompt, with_texts = None, request.return_text_in_logprobs
    if first >= 0:
        prompt = generation.prompt.ids()
        numbers = [b"null", *writer.prompt_numbers(prompt[first + 1 :])]
        of_prompt = writer.triples(prompt[first:], numbers, with_texts)
    numbers = writer.logprobs(generation.draft)[start:end]
    return logprob_lists(writer.triples(generation.draft.ids[start:end], numbers, with_texts), end, of_prompt)


def render_generate(generation: Generation[GenerateRequest], writer: ReplyWriter) -> Reply:
    if abort := aborted(generation):
        return native_error(abort.message) if abort.status_code == 400 else abort_error(abort)
    request, draft, tokens = generation.request, generation.draft, len(generation.draft.ids)
    asked = request.alternatives if request.logprobs else 0
    tops = writer.alternatives(draft.ids, writer.logprobs(draft), asked) if asked else []
    logprobs = _logprobs(generation, writer, 0, tokens)
    if generation.queued:
        info = queued_info(generation, logprobs)
    else:
        info = meta_info(generation, writer, finish_of(generation, writer), logprobs, tokens, tops)
    return writer.reply(generation, {"text": draft.text, "output_ids": draft.ids, "meta_info": info})


def stream_generate(generation: Generation[GenerateRequest], writer: ReplyWriter) -> Reply:
    """Each event has what is new or, without ``--incremental-streaming-output``, all so far, and counts so far."""
    draft, is_incremental = generation.draft, writer.config.incremental
    events: list[bytes] = []
    said = ""
    for places, delta, is_last in writer.chunks(generation):
        if generation.queued and not draft.ids:
            break
        said += delta
        end, (first, shown) = places.stop, (places.start, delta) if is_incremental else (0, said)
        finish = finish_of(generation, writer) if is_last and not generation.queued else None
        logprobs = _logprobs(generation, writer, first, end)
        info = meta_info(generation, writer, finish, logprobs, end, is_first=not events)
        events.append(event({"text": shown, "output_ids": draft.ids[first:end], "meta_info": info}))
    if generation.queued:  # what came is repeated: all text and logprobs, and with increments the last id alone
        ids = draft.ids[-1:] if is_incremental else draft.ids
        info = queued_info(generation, _logprobs(generation, writer, 0, len(draft.ids)))
        events.append(event({"text": draft.text, "output_ids": ids, "meta_info": info}))
    return stream_reply(events)


# The parsers' routes

# The arguments are taken as the model wrote them, whether they are JSON or not.
_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\}', re.DOTALL)


class Parsed(Struct):
    text: str


def separate_reasoning(engine: Engine, asked: Parsed, query: Query) -> Reply:
    text = asked.text
    reasoning, content, _ = parse(text, ())
    if not text.startswith("<think>"):
        return json_reply({"reasoning_text": "", "text": text})
    rest = text.partition("</think>")[2].removeprefix("\n\n").removeprefix("\n")
    return json_reply({"reasoning_text": reasoning or "", "text": rest or content})


def parse_function_call(engine: Engine, asked: Parsed, query: Query) -> Reply:
    text = asked.text
    content, *rest = text.split("<tool_call>")
    calls = []
    for number, one in enumerate(rest):
        called, end, _ = one.partition("</tool_call>")
        written = _CALL.fullmatch(called.strip()) if end else None
        if written is None:
            return json_reply({"normal_text": text, "calls": []})
        name, arguments = written.groups()
        calls.append({"tool_index": number, "name": msgspec.json.decode(name, type=str), "parameters": arguments})
    return json_reply({"normal_text": content.removesuffix("\n"), "calls": calls})


# Control


class OpenSession(Struct):
    capacity_of_str_len: int
    session_id: str | None = None


class CloseSession(Struct):
    session_id: str


class AbortRequest(Struct):
    rid: str | None = None
    abort_all: bool = False


class PauseGeneration(Struct):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class UpdateWeightVersion(Struct):
    new_version: str
    abort_all_requests: bool = True


class UpdateWeights(Struct):
    """From a folder, which is not read."""

    model_path: str
    weight_version: str | None = None


class LoadAdapter(Struct):
    lora_name: str
    lora_path: str


class UnloadAdapter(Struct):
    lora_name: str


async def health(engine: Engine, body: bytes, query: Query) -> Reply:
    """It generates a token, for which it waits while generation is paused."""
    if engine.behaviour.health_hangs_when_paused:
        try:
            await asyncio.wait_for(engine.runs.resumed(), HEALTH_PATIENCE_S)
        except TimeoutError:
            return Reply(status=503)
    return EMPTY


def open_session(engine: Engine, request: OpenSession, query: Query) -> Reply:
    name = request.session_id or uuid.uuid4().hex
    if name in engine.sessions:
        message = "Failed to open the session. Check if a session with the same id is still open."
        return json_reply({"error": {"message": message}}, 400)
    engine.sessions.append(name)
    return json_reply(name)


def close_session(engine: Engine, request: CloseSession, query: Query) -> Reply:
    engine.closed.append(request.session_id)
    if request.session_id in engine.sessions:
        engine.sessions.remove(request.session_id)
    return EMPTY


def abort_request(engine: Engine, request: AbortRequest, query: Query) -> Reply:
    engine.runs.abort(request.rid or "", request.abort_all)
    return EMPTY


def pause_generation(engine: Engine, body: bytes, query: Query) -> Reply:
    mode = msgspec.json.decode(body or b"{}", type=PauseGeneration).mode
    if failed := engine.failed(engine.behaviour.pause):
        return failed
    engine.runs.pause(retract=mode == "retract")
    if mode == "abort":
        engine.runs.abort("", everything=True)
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


def continue_generation(engine: Engine, body: bytes, query: Query) -> Reply:
    engine.runs.resume()
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


def update_weight_version(engine: Engine, request: UpdateWeightVersion, query: Query) -> Reply:
    if request.abort_all_requests:
        engine.runs.abort("", everything=True)
    else:
        engine.runs.new_version(request.new_version)
    engine.weight_version = request.new_version
    message = f"Weight version updated to {request.new_version}"
    return json_reply({"success": True, "message": message, "new_version": request.new_version})


def update_weights(engine: Engine, request: UpdateWeights, query: Query) -> Reply:
    message = "Succeeded to update model weights."
    if request.weight_version is not None:
        engine.runs.new_version(request.weight_version)
        engine.weight_version = request.weight_version
        message += f" Weight version updated to {request.weight_version}."
    return json_reply({"success": True, "message": message, "num_paused_requests": 0})


def load_adapter(engine: Engine, request: LoadAdapter, query: Query) -> Reply:
    engine.adapters[request.lora_name] = request.lora_path
    return json_reply({"success": True, "error_message": None, "loaded_adapters": engine.adapters})


def unload_adapter(engine: Engine, request: UnloadAdapter, query: Query) -> Reply:
    if engine.adapters.pop(request.lora_name, None) is None:
        message = f"LoRA with name {request.lora_name} does not exist."
        return json_reply({"success": False, "error_message": message, "loaded_adapters": None}, 400)
    return json_reply({"success": True, "error_message": None, "loaded_adapters": engine.adapters})


def model_info(engine: Engine, body: bytes, query: Query) -> Reply:
    return json_reply(
        {
            "model_path": engine.config.model,
            "served_model_name": engine.config.model,
            "tokenizer_path": engine.config.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "reasoning_parser": "simulator",
            "tool_call_parser": "simulator",
        }
    )


def server_info(engine: Engine, body: bytes, query: Query) -> Reply:
    """Of SGLang's arguments those that say how it samples, streams and parses."""
    return json_reply(
        {
            "sampling_defaults": engine.config.sampling_defaults,
            "incremental_streaming_output": engine.config.incremental,
            "reasoning_parser": "simulator",
            "tool_call_parser": "simulator",
            "enable_cache_report": engine.config.cache_report,
            "return_input_ids": False,
            "return_output_ids": False,
            "weight_version": engine.weight_version,
            "version": "0.5.23",
        }
    )


_flush_cache = always(
    Reply(
        (
            b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            b"the operation will not be performed.)\n",
        ),
        content_type=b"",
    )
)
_occupy = always(json_reply(None))
"""Memory is released and resumed in silence."""

_GENERATE = Route(read_generate, render_generate, stream_generate)
_ROUTES = {
    ("POST", "/v1/chat/completions"): Route(read_chat, render_chat, stream_chat),
    ("POST", "/v1/completions"): Route(read_completion, render_completion, stream_completion),
    ("POST", "/generate"): _GENERATE,
    ("PUT", "/generate"): _GENERATE,
}
_CONTROL = {
    ("GET", "/"): always(json_reply("SGLang is running")),
    ("GET", "/ping"): always(EMPTY),
    ("GET", "/health"): Control(health, outcome="health"),
    ("GET", "/health_generate"): Control(health, outcome="health"),
    ("POST", "/v1/tokenize"): Control(tokenize, Tokenize),
    ("POST", "/v1/detokenize"): Control(detokenize, Detokenize),
    ("POST", "/open_session"): Control(open_session, OpenSession, "sessions"),
    ("POST", "/close_session"): Control(close_session, CloseSession, "sessions"),
    ("POST", "/abort_request"): Control(abort_request, AbortRequest, "abort"),
    ("POST", "/pause_generation"): Control(pause_generation),
    ("POST", "/continue_generation"): Control(continue_generation, outcome="resume"),
    ("POST", "/update_weight_version"): Control(update_weight_version, UpdateWeightVersion),
    ("POST", "/update_weights_from_disk"): Control(update_weights, UpdateWeights),
    ("POST", "/flush_cache"): _flush_cache,
    ("GET", "/flush_cache"): _flush_cache,
    ("POST", "/load_lora_adapter"): Control(load_adapter, LoadAdapter),
    ("POST", "/unload_lora_adapter"): Control(unload_adapter, UnloadAdapter),
    ("POST", "/release_memory_occupation"): _occupy,
    ("POST", "/resume_memory_occupation"): _occupy,
    ("GET", "/model_info"): Control(model_info),
    ("GET", "/get_model_info"): Control(model_info),
    ("GET", "/server_info"): Control(server_info, outcome="server_info"),
    ("GET", "/get_server_info"): Control(server_info, outcome="server_info"),
    ("POST", "/separate_reasoning"): Control(separate_reasoning, Parsed),
    ("POST", "/parse_function_call"): Control(parse_function_call, Parsed),
}


def routes(engine: Engine) -> Mapping[tuple[str, str], Route]:
    return _ROUTES


def control(engine: Engine, path: str) -> Mapping[tuple[str, str], Control]:
    return _CONTROL
