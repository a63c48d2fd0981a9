"""``/v1/completions``: reads the prompt, and writes replies in the formats of SGLang 0.5.23 and vLLM 0.33."""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from ops.simulator.config import Dialect
from ops.simulator.generation import Alternatives, Generation, ReplyWriter, encode, sampled_first
from ops.simulator.template import Conversation, Toolbox
from ops.simulator.tokenizer import Encoded, Tokenizer
from ops.simulator.wire import MAX_ID, BadRequest, CompletionRequest, Reply

DEFAULT_TOKENS = 16


def check(request: CompletionRequest, dialect: Dialect) -> CompletionRequest:
    """The request with vLLM's default in place of a null. Refuses what engines refuse, and what this simulator supports
    only for chat. Raises :class:`BadRequest`."""
    if request.stream:
        raise BadRequest("this simulator does not stream completions; set stream=false")
    if request.max_tokens is None and dialect == "sglang":
        raise BadRequest("max_tokens: Input should be a valid integer")
    if request.max_tokens is None:
        request = msgspec.structs.replace(request, max_tokens=DEFAULT_TOKENS)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise BadRequest("max_tokens must be positive")
    if request.logprobs is not None and request.logprobs < 0:
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
        encode(draft.stop_text or (writer.end_id if generation.ended_itself else None)),
    ]
    if request.return_token_ids:
        choice += [b',"token_ids":', encode(draft.ids), b',"prompt_token_ids":[', generation.prompt.json, b"]"]
    versions = encode(generation.weight_version)
    metadata = b'{"weight_version":%s' % versions
    if writer.config.weight_versions or len(generation.versions) > 1:
        metadata += b',"weight_versions":' + encode(generation.versions)
    tail = b'}],"usage":%s,"metadata":%s}' % (encode({**generation.usage, "reasoning_tokens": 0}), metadata)
    parts = [b"".join(choice), tail]
    if experts is not None:
        parts += [b',"sglext":{"routed_experts":', experts, b"}"]
    return Reply(writer.padded(parts, generation.sim.body_bytes))


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
    count, as_ids = generation.request.logprobs, bool(counted and generation.request.return_tokens_as_token_ids)
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
