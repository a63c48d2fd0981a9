"""``/v1/completions``: what its dialects share."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ops.simulator.engine import Asked, Engine
from ops.simulator.generation import Alternatives, Generation, ReplyWriter, sampled_first
from ops.simulator.template import bare_conversation
from ops.simulator.tokenizer import Encoded, Tokenizer
from ops.simulator.wire import MAX_ID, BadRequest, CompletionRequest

DEFAULT_TOKENS = 16

_decode = msgspec.json.Decoder(CompletionRequest).decode


def read_completion(engine: Engine, body: bytes, session: str | None) -> Asked:
    """The request, with vLLM's default in place of a null. Refuses what engines refuse, and what this simulator
    supports only for chat. Raises :class:`BadRequest`."""
    request, is_sglang = _decode(body), engine.config.dialect == "sglang"
    engine.check(request)
    if request.stream and not is_sglang:
        raise BadRequest("this simulator streams only SGLang's completions; set stream=false")
    if request.max_tokens is None and is_sglang:
        raise BadRequest("max_tokens: Input should be a valid integer", kind="Bad Request")
    if request.max_tokens is None:
        request = msgspec.structs.replace(request, max_tokens=DEFAULT_TOKENS)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise BadRequest("max_tokens must be positive", kind="Bad Request")
    if not is_sglang and request.logprobs is not None and request.logprobs < 0:
        raise BadRequest("logprobs must be a positive value")
    prompt = read_prompt(request.prompt, engine.tokenizer)
    engine.wire.check_prompt(request, prompt, engine.config, None)
    return Asked(request, prompt, bare_conversation(prompt))


def read_prompt(raw: Raw, tokenizer: Tokenizer) -> Encoded:
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
    return Encoded.of(ids)


def logprobs_of(
    generation: Generation[CompletionRequest], writer: ReplyWriter, places: range, with_prompt: bool
) -> dict[str, object] | None:
    """Logprobs of the sampled tokens at these places, after those of an echoed prompt. Its first token has none, since
    nothing predicts it."""
    request, draft, prompt = generation.request, generation.draft, generation.prompt
    if request.logprobs is None:
        return None
    is_vllm = writer.config.dialect == "vllm"
    ids, numbers = draft.ids[places.start : places.stop], writer.logprobs(draft)[places.start : places.stop]
    if with_prompt:
        ids, numbers = [*prompt.ids(), *ids], [b"null", *[b"-1.5"] * (prompt.count - 1), *numbers]
    count, tops = max(request.logprobs, 0), list[Alternatives | None]()
    if is_vllm or count:
        known = [place for place, number in enumerate(numbers) if number != b"null"]
        of_known = [ids[place] for place in known], [numbers[place] for place in known]
        found = writer.alternatives(*of_known, count) if count else [[] for _ in known]
        # vLLM returns the sampled token too, also with 0 alternatives.
        found = sampled_first(found, *of_known) if is_vllm else found
        tops = [None] * len(ids)
        for place, top in zip(known, found, strict=True):
            tops[place] = top
    as_ids = is_vllm and bool(request.return_tokens_as_token_ids)
    return writer.token_logprobs(ids, numbers, is_vllm, tops, as_ids)
