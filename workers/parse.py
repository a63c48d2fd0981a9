"""Validates what an engine returned: bytes in, `Parsed` or `Rejected` out.

The one place that decides whether a 200 is malformed, for SGLang and vLLM. It creates Python objects only for what is
checked or stored, and the checked bytes are the stored bytes. Replay payloads are located here and validated in
`payloads`.

Chat replies are here, completions in `parse_completion`, shared parts in `parse_parts`, the prompt's ids in
`parse_prompt`, the rules for all JSON in `parse_json`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.depth import MAX_DEPTH
from workers.parse_json import (
    NULL,
    Fields,
    Rejected,
    count_is,
    flat,
    is_null,
    no_contradiction,
    no_duplicates,
    object_at,
    readable,
    typed,
    unambiguous,
    utf8,
    value_at,
)
from workers.parse_parts import (
    MISSING_LOGPROB,
    REPLAY,
    Dialect,
    DialectChoice,
    Logprob,
    Parsed,
    Top,
    VersionSpan,
    cached_tokens,
    counts,
    extension,
    finish_reason,
    float64,
    metadata,
    miscounted,
    only_choice,
    payloads_in,
    same_output,
    speculative,
    usage_of,
    was_queued,
    weight_versions,
)
from workers.parse_prompt import (
    IDS,
    MAX_TOKEN_ID,
    CutPrompt,
    KnownTokens,
    Prompt,
    PromptDiffers,
    TokenId,
    int32,
    token_text,
)
from workers.top_logprobs import LogprobWish, of_sglang_chat, of_vllm_chat, of_vllm_completion


class _CompletionRoot(Top, kw_only=True):
    """A completion's top level, split in one pass down to the fields of its choices."""

    choices: list[Fields]


_COMPLETION_ROOT = msgspec.json.Decoder(_CompletionRoot)
_LOGPROBS = msgspec.json.Decoder(list[Logprob])
_TEXT = msgspec.json.Decoder(str)


def completion(
    body: bytes,
    dialect: DialectChoice,
    known: KnownTokens | None,
    sent: bytes | None,
    cut: CutPrompt | None,
    wish: LogprobWish | None,
) -> tuple[Parsed, list[bytes]]:
    """A valid completion, and its long flat lists. Raises Rejected."""
    root: _CompletionRoot = typed(_COMPLETION_ROOT, body, "the body")
    choice = only_choice(root.choices)
    text_raw = choice.get("text")
    typed(_TEXT, text_raw, "choices[0].text", "a string")
    if dialect == "openai":
        unambiguous(body, choice, [])
        return _of_text(root, choice, bytes(text_raw or b"")), []
    output_ids = typed(IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs_raw = choice.get("logprobs")
    logprobs = object_at(logprobs_raw, "choices[0].logprobs")
    no_duplicates(bytes(logprobs_raw or b""), logprobs, "choices[0].logprobs")
    values = typed(_LOGPROBS, logprobs.get("token_logprobs"), "choices[0].logprobs.token_logprobs")
    if len(values) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.token_logprobs has {len(values)} entries for {len(output_ids)} token ids")
    usage = usage_of(root)
    count_is(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    count, finish, versions = usage.get("prompt_tokens"), finish_reason(choice, {}), metadata(root)
    queued = "matched_stop" in choice and was_queued(finish, count)
    where = "choices[0].prompt_token_ids"
    prompt = Prompt(choice.get("prompt_token_ids"), where, known, sent, count, cut, is_counted=not queued)
    copies = [
        *prompt.repeated(root.prompt_token_ids, "prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids"),
    ]
    if dialect == "auto":
        is_sglangs = "matched_stop" in choice or versions or not is_null(root.sglext)
        dialect = "sglang" if is_sglangs else "vllm"
    here = not is_null(choice.get("weight_versions"))
    parsed = Parsed(
        dialect=dialect,
        message=bytes(text_raw or b""),
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=prompt.suffix_ids,
        output_ids=int32(output_ids),
        logprobs=float64(values),
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish,
        weight_versions=weight_versions(
            choice["weight_versions"] if here else versions.get("weight_versions"),
            f"{'choices[0]' if here else 'metadata'}.weight_versions",
            versions.get("weight_version"),
            len(output_ids),
        ),
        payloads=payloads_in(dialect, choice, extension(root)),
        cached_tokens=cached_tokens(None, root.usage),
        miscounted=None if queued else miscounted(prompt.tokens, ("usage.prompt_tokens", count)),
        # SGLang's completions name the alternatives by their texts, which are no ids.
        top=None
        if wish is None or dialect == "sglang"
        else of_vllm_completion(logprobs, choice, prompt, len(output_ids), wish),
        speculative=speculative(None, root.metrics),
        was_queued=queued,
    )
    bulk = [prompt.text, *copies, bytes(choice["token_ids"]), bytes(logprobs["token_logprobs"])]
    unambiguous(body, choice, bulk)
    return parsed, bulk


NO_TOKENS = KnownTokens(0, 0, "")


def _of_text(root: Top, choice: Fields, message: bytes) -> Parsed:
    """What a reply says that need not have ids. Raises Rejected."""
    usage_of(root)
    return Parsed(
        dialect="openai",
        message=message,
        prompt_text=b"",
        base=0,
        suffix_ids=b"",
        output_ids=b"",
        logprobs=b"",
        sequence=NO_TOKENS,
        finish_reason=finish_reason(choice, {}),
        weight_versions=[],
        cached_tokens=cached_tokens(None, root.usage),
        counts=counts(root),
    )


__all__ = [
    "MAX_TOKEN_ID",
    "MISSING_LOGPROB",
    "REPLAY",
    "Dialect",
    "KnownTokens",
    "Parsed",
    "PromptDiffers",
    "Protocol",
    "Rejected",
    "VersionSpan",
    "parse_reply",
    "token_text",
]

Protocol = Literal["chat", "completions"]
"""The OpenAI route that a reply answers: `/v1/chat/completions` or `/v1/completions`."""


class _Triple(msgspec.Struct, array_like=True):
    """`[logprob, token id, text, …]`; only the first two are read."""

    logprob: Logprob
    id: TokenId


class _ContentLogprob(msgspec.Struct):
    logprob: Logprob


class _Root(Top, kw_only=True):
    """A chat reply's top level, split in one pass down to the fields of its choices."""

    choices: list[Fields]


_ROOT = msgspec.json.Decoder(_Root)
_TRIPLES = msgspec.json.Decoder(list[_Triple])
_CONTENT = msgspec.json.Decoder(list[_ContentLogprob])


def parse_reply(
    body: bytes,
    dialect: DialectChoice,
    known: KnownTokens | None = None,
    protocol: Protocol = "chat",
    sent: bytes | None = None,
    is_part: bool = False,
    cut: CutPrompt | None = None,
    wish: LogprobWish | None = None,
) -> Parsed:
    """Validate a 200 (non-streaming) of the route `protocol`, whose prompt may begin with `known`.

    `sent` is the token text of a prompt that was sent as ids: the reply need not repeat them, but if it does they must
    be equal. `is_part`: it continues a generation, and may be only its end token. `cut`: the prompt's ids, if the body
    has a mark in their place. `wish`: what else of the logprobs was asked for. With `auto` the structure tells the
    engine: in a chat reply, token ids on the choice are vLLM's, otherwise SGLang's rules hold. Raises Rejected, naming
    the first broken rule; PromptDiffers if the prompt differs from the sent one. Whether `miscounted` is a fault
    depends on the request.
    """
    utf8(body)
    try:
        if protocol == "completions":
            parsed, bulk = completion(body, dialect, known, sent, cut, wish)
        else:
            parsed, bulk = _chat(body, dialect, known, sent, is_part, cut, wish)
        readable(body, [*bulk, *(bytes(raw) for _, raw in parsed.payloads)])
    except RecursionError as error:
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels") from error
    return parsed


def _chat(
    body: bytes,
    dialect: DialectChoice,
    known: KnownTokens | None,
    sent: bytes | None,
    is_part: bool,
    cut: CutPrompt | None,
    wish: LogprobWish | None,
) -> tuple[Parsed, list[bytes]]:
    root: _Root = typed(_ROOT, body, "the body")
    choice = only_choice(root.choices)
    if dialect == "auto":
        dialect = "vllm" if _looks_like_vllm(root, choice) else "sglang"
    if dialect == "openai":
        parsed, bulk = _of_text(root, choice, _text_message(choice)), list[bytes]()
    else:
        read = _vllm if dialect == "vllm" else _sglang
        parsed, bulk = read(root, choice, known, sent, is_part, cut, wish)
    unambiguous(body, choice, bulk)
    return parsed, bulk


def _looks_like_vllm(root: _Root, choice: Fields) -> bool:
    return "meta_info" not in choice and ("token_ids" in choice or not is_null(root.prompt_token_ids))


def _sglang(
    root: _Root,
    choice: Fields,
    known: KnownTokens | None,
    sent: bytes | None,
    is_part: bool,
    cut: CutPrompt | None,
    wish: LogprobWish | None,
) -> tuple[Parsed, list[bytes]]:
    where = "choices[0].meta_info"
    meta_raw = choice.get("meta_info")
    if meta_raw is None:
        raise Rejected(f"{where} is missing")
    meta = object_at(meta_raw, where)
    no_duplicates(bytes(meta_raw), meta, where)
    triples = typed(_TRIPLES, meta.get("output_token_logprobs"), f"{where}.output_token_logprobs")
    count_is(meta.get("completion_tokens"), len(triples), f"{where}.completion_tokens", "output_token_logprobs")
    own, count = meta.get("prompt_tokens", NULL), usage_of(root).get("prompt_tokens")
    finish = finish_reason(choice, meta)
    queued = was_queued(finish, count, own)
    prompt = Prompt(
        choice.get("prompt_token_ids"),
        "choices[0].prompt_token_ids",
        known,
        sent,
        count if is_null(own) else own,
        cut,
        is_counted=not queued,
    )
    output_ids = [triple.id for triple in triples]
    sampled = _sampling_logprobs(meta, len(triples), where)
    copies = [
        *prompt.repeated(root.prompt_token_ids, "prompt_token_ids"),
        *prompt.repeated(meta.get("prompt_token_ids"), f"{where}.prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids", "token_ids"),
    ]
    message = _message(choice, may_be_empty=is_part or not triples)
    version = meta.get("weight_version")
    parsed = Parsed(
        dialect="sglang",
        message=message,
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=prompt.suffix_ids,
        output_ids=int32(output_ids),
        logprobs=float64([triple.logprob for triple in triples] if sampled is None else sampled),
        logprobs_of=None if sampled is None else "processed",
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish,
        weight_versions=weight_versions(
            meta.get("weight_versions"),
            f"{where}.weight_versions",
            metadata(root).get("weight_version") if is_null(version) else version,
            len(triples),
        ),
        payloads=payloads_in("sglang", meta, extension(root)),
        cached_tokens=cached_tokens(meta.get("cached_tokens"), root.usage),
        miscounted=None
        if queued
        else miscounted(prompt.tokens, (f"{where}.prompt_tokens", own), ("usage.prompt_tokens", count)),
        top=None if wish is None else of_sglang_chat(meta, where, prompt, len(triples), wish),
        speculative=speculative(meta_raw, NULL),
        was_queued=queued,
    )
    return parsed, [prompt.text, *copies, *flat(meta["output_token_logprobs"], len(triples))]


def _sampling_logprobs(meta: Fields, tokens: int, where: str) -> list[float] | None:
    """Of the distribution that was sampled from, which SGLang gives with the sampling masks: renormalised over what
    top-k, top-p and min-p kept. None if there are none, or in the mode `support` a list for each token."""
    raw, name = meta.get("output_token_sampling_logprobs"), f"{where}.output_token_sampling_logprobs"
    if raw is None or is_null(raw) or bytes(raw)[1:].lstrip()[:1] == b"[":
        return None
    values: list[float] = typed(_LOGPROBS, raw, name)
    if len(values) != tokens:
        raise Rejected(f"{name} has {len(values)} entries for {tokens} output token ids")
    return values


def _vllm(
    root: _Root,
    choice: Fields,
    known: KnownTokens | None,
    sent: bytes | None,
    is_part: bool,
    cut: CutPrompt | None,
    wish: LogprobWish | None,
) -> tuple[Parsed, list[bytes]]:
    output_ids = typed(IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs_raw = choice.get("logprobs")
    logprobs = object_at(logprobs_raw, "choices[0].logprobs")
    no_duplicates(bytes(logprobs_raw or b""), logprobs, "choices[0].logprobs")
    entries = typed(_CONTENT, logprobs.get("content"), "choices[0].logprobs.content")
    if len(entries) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.content has {len(entries)} entries for {len(output_ids)} output token ids")
    usage = usage_of(root)
    count_is(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    count = usage.get("prompt_tokens")
    prompt = Prompt(root.prompt_token_ids, "prompt_token_ids", known, sent, count, cut)
    copies = [
        *prompt.repeated(choice.get("prompt_token_ids"), "choices[0].prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids"),
    ]
    parsed = Parsed(
        dialect="vllm",
        message=_message(choice, may_be_empty=is_part or not output_ids),
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=prompt.suffix_ids,
        output_ids=int32(output_ids),
        logprobs=float64([entry.logprob for entry in entries]),
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish_reason(choice, {}),
        weight_versions=weight_versions(
            choice.get("weight_versions"),
            "choices[0].weight_versions",
            metadata(root).get("weight_version"),
            len(output_ids),
        ),
        payloads=payloads_in("vllm", choice),
        cached_tokens=cached_tokens(None, root.usage),
        miscounted=miscounted(prompt.tokens, ("usage.prompt_tokens", count)),
        top=None if wish is None else of_vllm_chat(logprobs["content"], root.prompt_logprobs, prompt, wish),
        speculative=speculative(None, root.metrics),
    )
    return parsed, [prompt.text, *copies]


def _text_message(choice: Fields) -> bytes:
    """A vendor's message is null where it refuses, or where its reasoning, which it keeps to itself, used up the
    limit."""
    message = object_at(choice.get("message"), "choices[0].message")
    ended_early = finish_reason(choice, {}) not in (None, "stop", "tool_calls")
    return _message(choice, may_be_empty=ended_early or not is_null(message.get("refusal")))


def _message(choice: Fields, *, may_be_empty: bool) -> bytes:
    raw = choice.get("message")
    message = object_at(raw, "choices[0].message")
    no_contradiction(raw or b"", message, "choices[0].message")
    calls = value_at(message.get("tool_calls"), "choices[0].message.tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Rejected("choices[0].message.tool_calls must be a list of objects")
    content = value_at(message.get("content"), "choices[0].message.content")
    if content is None:
        reasoning = value_at(message.get("reasoning_content"), "choices[0].message.reasoning_content")
        reasoning = reasoning or value_at(message.get("reasoning"), "choices[0].message.reasoning")
        if not calls and not reasoning and not may_be_empty:
            raise Rejected("choices[0].message has no content, no tool calls and no reasoning_content")
    elif not isinstance(content, str):
        raise Rejected("choices[0].message.content must be a string")
    role = value_at(message.get("role"), "choices[0].message.role")
    if role != "assistant":
        raise Rejected("choices[0].message.role must be assistant")
    return bytes(raw or b"")
