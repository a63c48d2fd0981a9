"""``/v1/completions``: reads the prompt, and writes replies in the formats of SGLang 0.5.23 and vLLM 0.33."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from itertools import zip_longest

import msgspec
from msgspec import Raw

from ops.simulator import sglang as wire
from ops.simulator.config import Dialect
from ops.simulator.generation import (
    DONE,
    EVENT_STREAM,
    Alternatives,
    Generation,
    ReplyWriter,
    encode,
    event,
    sampled_first,
)
from ops.simulator.template import Conversation, Toolbox
from ops.simulator.tokenizer import Encoded, Tokenizer
from ops.simulator.wire import MAX_ID, BadRequest, CompletionRequest, InvalidBody, Reply

CHUNK = 8
"""Tokens in an event of a request that does not say it."""

DEFAULT_TOKENS = 16


def check(request: CompletionRequest, dialect: Dialect) -> CompletionRequest:
    """The request with vLLM's default in place of a null. Refuses what engines refuse, and what this simulator supports
    only for chat. Raises :class:`BadRequest`."""
    if request.stream and dialect != "sglang":
        raise BadRequest("this simulator streams only SGLang's completions; set stream=false")
    if request.max_tokens is None and dialect == "sglang":
        raise InvalidBody("max_tokens: Input should be a valid integer")
    if request.max_tokens is None:
        request = msgspec.structs.replace(request, max_tokens=DEFAULT_TOKENS)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidBody("max_tokens must be positive")
    if dialect != "sglang" and request.logprobs is not None and request.logprobs < 0:
        raise BadRequest("logprobs must be a positive value")
    return request


def read_prompt(raw: msgspec.Raw, tokenizer: Tokenizer) -> Encoded:
    """The prompt's ids: given as ids, or those of a text. A list with one prompt is that prompt. Raises
    :class:`BadRequest`."""
    prompt: str | int | list[int | str | list[int]] | list[int]
    prompt = msgspec.json.decode(raw, type=str | list[int | str | list[int]])
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise BadRequest(f"this simulator answers with one choice, not one for each of {len(prompt)} prompts")
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("Prompt cannot be empty")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    ids = msgspec.convert(prompt, list[int])
    if min(ids) < 0 or max(ids) > MAX_ID:
        raise BadRequest("prompt must hold token ids")
    return Encoded(",".join(map(str, ids)).encode(), array("i", ids).tobytes(), len(ids))


def conversation(prompt: Encoded) -> Conversation:
    """The prompt as a conversation for the policy: it has no messages and no tools, and its digest is that of its
    ids."""
    digest = hashlib.blake2b(prompt.packed, digest_size=16).digest()
    return Conversation((), Toolbox((), ""), digest, digest, 0)


def sglang(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """SGLang's reply: without ``meta_info``; payloads are in ``sglext``, weight versions in ``metadata``."""
    request, draft = generation.request, generation.draft
    wants_experts = request.return_routed_experts and not generation.queued
    experts = writer.experts(generation, wants_experts, request.routed_experts_start_len)
    choice = [
        _head(generation, generation.id),
        _text(generation, writer, with_prompt=bool(request.echo)),
        b',"logprobs":',
        _logprobs(generation, writer, with_prompt=bool(request.echo and request.logprobs)),
        b',"finish_reason":"%s","matched_stop":' % draft.finish.encode(),
        encode(wire.matched_stop(generation, writer)),
    ]
    if request.return_token_ids:
        choice += [b',"token_ids":', encode(draft.ids), b',"prompt_token_ids":[', generation.prompt.json, b"]"]
    tail = b'}],"usage":%s,"metadata":%s' % (encode(wire.usage(generation, writer)), wire.metadata(generation))
    parts = [b"".join(choice), tail]
    if experts is not None:
        parts += [b',"sglext":{"routed_experts":', experts, b"}"]
    return Reply(writer.padded(parts, generation.sim.body_bytes))


def sglang_stream(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """SGLang's events, of ``chunk_tokens`` each: the first has an echoed prompt and the prompt's ids."""
    request, draft = generation.request, generation.draft
    size = generation.sim.chunk_tokens or CHUNK
    common = {"id": generation.id, "object": "text_completion", "created": generation.created, "model": request.model}
    starts, texts = range(0, max(len(draft.ids), 1), size), writer.texts_of(draft.ids, size)
    events, said = [], ""
    for start, text in zip_longest(starts, texts[: len(starts)], fillvalue=""):
        at = int(start)
        ids, is_last, is_first = draft.ids[at : at + size], at == starts[-1], at == 0
        delta = draft.text[len(said) :] if is_last else text[: len(draft.text) - len(said)]
        said += delta
        share = replace(generation, draft=replace(draft, ids=ids, text=delta, logprob_offset=draft.logprob_offset + at))
        with_logprobs = is_first and bool(request.echo and request.logprobs)
        choice: dict[str, object] = {
            "index": 0,
            "text": Raw(_text(share, writer, with_prompt=is_first and bool(request.echo))),
            "logprobs": Raw(_logprobs(share, writer, with_prompt=with_logprobs)),
            "finish_reason": draft.finish if is_last else None,
            "matched_stop": wire.matched_stop(generation, writer) if is_last else None,
        }
        if request.return_token_ids:
            choice["token_ids"] = ids
            if is_first:
                choice["prompt_token_ids"] = generation.prompt.ids()
        events.append(event({**common, "choices": [choice], "usage": None}))
    if request.return_routed_experts and not generation.queued:
        rows = Raw(writer.experts(generation, True, request.routed_experts_start_len) or b"null")
        events.append(event({**common, "choices": [], "usage": None, "sglext": {"routed_experts": rows}}))
    if request.stream_options and request.stream_options.include_usage:
        counted = {name: count for name, count in wire.usage(generation, writer).items() if count is not None}
        events.append(event({**common, "choices": [], "usage": counted}))
    return Reply((*events, DONE), content_type=EVENT_STREAM)


def vllm(generation: Generation[CompletionRequest], writer: ReplyWriter) -> Reply:
    """vLLM's reply: all data about the tokens is in the choice."""
    request, draft = generation.request, generation.draft
    experts = writer.experts(generation, request.return_routed_experts, request.routed_experts_prompt_start, npy=True)
    ids = (encode(draft.ids), b"[" + generation.prompt.json + b"]") if request.return_token_ids else (b"null", b"null")
    choice = [
        _head(generation, f"cmpl-{generation.id}"),
        # With return_token_ids, only the ids contain an echoed prompt.
        _text(generation, writer, with_prompt=bool(request.echo and not request.return_token_ids)),
        b',"logprobs":',
        _logprobs(generation, writer, with_prompt=bool(request.echo), counted=True),
        b',"finish_reason":"%s","stop_reason":%s,"token_ids":%s'
        % (draft.finish.encode(), encode(draft.stop_text), ids[0]),
        b',"prompt_logprobs":%s,"prompt_token_ids":%s,"weight_versions":'
        % (writer.prompt_logprobs(generation.prompt, request.prompt_logprobs), ids[1]),
        encode(generation.versions) if request.return_weight_versions else b"null",
        b',"routed_experts":',
    ]
    tail = b'}],"service_tier":null,"system_fingerprint":null,"usage":%s,"kv_transfer_params":null' % (
        encode(generation.usage)
    )
    return Reply(writer.padded([b"".join(choice), experts or b"null", tail], generation.sim.body_bytes))


def _head(generation: Generation[CompletionRequest], name: str) -> bytes:
    return b'{"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":[{"index":0,"text":' % (
        encode(name),
        generation.created,
        encode(generation.request.model),
    )


def _text(generation: Generation[CompletionRequest], writer: ReplyWriter, with_prompt: bool) -> bytes:
    text = generation.draft.text
    return encode(writer.text_of(generation.prompt.ids()) + text if with_prompt else text)


def _logprobs(
    generation: Generation[CompletionRequest], writer: ReplyWriter, with_prompt: bool, counted: bool = False
) -> bytes:
    """Logprobs of the sampled tokens, after those of an echoed prompt. The first token has none, since nothing predicts
    it."""
    draft, prompt = generation.draft, generation.prompt
    if generation.request.logprobs is None:
        return b"null"
    numbers = writer.logprobs(draft)
    count, as_ids = max(generation.request.logprobs, 0), bool(counted and generation.request.return_tokens_as_token_ids)
    ids = draft.ids
    if with_prompt:
        ids, numbers = [*prompt.ids(), *ids], [b"null", *[b"-1.5"] * (prompt.count - 1), *numbers]
    # vLLM returns the sampled token too, also with 0 alternatives.
    tops: list[Alternatives | None] = []
    if counted or count:
        known = [place for place, number in enumerate(numbers) if number != b"null"]
        of_known = [ids[place] for place in known], [numbers[place] for place in known]
        found = writer.alternatives(*of_known, count) if count else [[] for _ in known]
        found = sampled_first(found, *of_known) if counted else found
        tops = [None] * len(ids)
        for place, top in zip(known, found, strict=True):
            tops[place] = top
    return writer.token_logprobs(ids, numbers, counted, tops, as_ids)
