"""Validates what an engine returned: bytes in, `Parsed` or `Rejected` out.

The one place that decides whether a 200 is malformed, for SGLang and vLLM. It creates Python objects only for what is
checked or stored, and the checked bytes are the stored bytes. Replay payloads are located here and validated in
`payloads`. Shared parts are in `parse_parts`, the prompt's ids in `parse_prompt`, the rules for all JSON in
`parse_json`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from workers.depth import MAX_DEPTH
from workers.parse_json import (
    NULL,
    Fields,
    Keys,
    Rejected,
    count_is,
    flat,
    is_null,
    is_object,
    object_at,
    typed,
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
    was_queued,
    weight_versions,
)
from workers.parse_prompt import (
    IDS,
    MAX_TOKEN_ID,
    KnownTokens,
    Prompt,
    PromptDiffers,
    TokenId,
    int32,
    token_text,
)
from workers.top_logprobs import LogprobWish, of_sglang_chat, of_vllm_chat, of_vllm_completion

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

NO_TOKENS = KnownTokens(0, 0, "")


class _Root(Top, kw_only=True):
    """A reply's top level, split in one pass down to the fields of its choices."""

    choices: list[Fields]


class _Triple(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, token id, text, …]`; only the first two are read."""

    logprob: Logprob
    id: TokenId


class _Alternative(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An entry of `logprobs.content` as engines write it: all of it is checked as it is decoded."""

    logprob: Logprob
    token: str = ""
    bytes: list[int] | None = None
    top_logprobs: list[_Alternative] | None = None


class _AnyEntry(msgspec.Struct, gc=False):
    logprob: Logprob


_ROOT = msgspec.json.Decoder(_Root)
_TEXT = msgspec.json.Decoder(str)
_LOGPROBS = msgspec.json.Decoder(list[Logprob])
_TRIPLES = msgspec.json.Decoder(list[_Triple])
_ENTRIES = msgspec.json.Decoder(list[_Entry])
_ANY_ENTRIES = msgspec.json.Decoder(list[_AnyEntry])


class _Asked(NamedTuple):
    """What `parse_reply` is told of a reply, and how its keys are checked."""

    dialect: DialectChoice
    known: KnownTokens | None
    sent: bytes | None
    is_part: bool
    cut: Prompt | None
    wish: LogprobWish | None
    keys: Keys


_Read = tuple[Parsed, list[bytes]]
"""What a reply says, and the long lists in it that are fully checked."""


def parse_reply(
    body: bytes,
    dialect: DialectChoice,
    known: KnownTokens | None = None,
    protocol: Protocol = "chat",
    sent: bytes | None = None,
    is_part: bool = False,
    cut: Prompt | None = None,
    wish: LogprobWish | None = None,
    *,
    is_cut: bool = False,
) -> Parsed:
    """Validate a 200 (non-streaming) of the route `protocol`, whose prompt may begin with `known`.

    `sent` is the token text of a prompt that was sent as ids: the reply need not repeat them, but if it does they must
    be equal. `is_part`: it continues a generation, and may be only its end token. `cut`: the prompt's ids, if the body
    has a mark in their place. `wish`: what else of the logprobs was asked for. `is_cut`: the error need not name the
    first broken rule. With `auto` the structure tells the engine: in a chat reply, token ids on the choice are vLLM's,
    otherwise SGLang's rules hold. Raises Rejected, naming the first broken rule; PromptDiffers if the prompt differs
    from the sent one. Whether `miscounted` is a fault depends on the request.
    """
    utf8(body)
    asked = _Asked(dialect, known, sent, is_part, cut, wish, Keys(is_late=is_cut))
    try:
        root: _Root = typed(_ROOT, body, "the body")
        choice = only_choice(root.choices)
        if protocol == "completions":
            parsed, bulk = _completion(root, choice, asked)
        elif dialect == "openai":
            parsed, bulk = _of_text(root, choice, _text_message(choice, asked.keys), asked.keys)
        elif dialect == "vllm" or (dialect == "auto" and _looks_like_vllm(root, choice)):
            parsed, bulk = _vllm(root, choice, asked)
        else:
            parsed, bulk = _sglang(root, choice, asked)
        asked.keys.finish(body, bulk, [bytes(raw) for _, raw in parsed.payloads])
    except RecursionError as error:
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels") from error
    return parsed


def _looks_like_vllm(root: _Root, choice: Fields) -> bool:
    return "meta_info" not in choice and ("token_ids" in choice or not is_null(root.prompt_token_ids))


def _sglang(root: _Root, choice: Fields, asked: _Asked) -> _Read:
    where = "choices[0].meta_info"
    meta_raw = choice.get("meta_info")
    if meta_raw is None:
        raise Rejected(f"{where} is missing")
    meta = object_at(meta_raw, where)
    asked.keys.stand_once(meta_raw, meta, where)
    triples: list[_Triple] = typed(_TRIPLES, meta.get("output_token_logprobs"), f"{where}.output_token_logprobs")
    count_is(meta.get("completion_tokens"), len(triples), f"{where}.completion_tokens", "output_token_logprobs")
    usage = _usage(root, asked.keys)
    own, count = meta.get("prompt_tokens", NULL), usage.get("prompt_tokens")
    finish = finish_reason(choice, meta)
    queued = was_queued(finish, count, own)
    at = "choices[0].prompt_token_ids"
    own_count = count if is_null(own) else own
    prompt = Prompt.at(choice.get("prompt_token_ids"), at, asked.known, asked.sent, own_count, asked.cut, not queued)
    output_ids = [triple.id for triple in triples]
    sampled = _sampling_logprobs(meta, len(triples), where)
    copies = [
        *prompt.repeated(root.prompt_token_ids, "prompt_token_ids"),
        *prompt.repeated(meta.get("prompt_token_ids"), f"{where}.prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids", "token_ids"),
    ]
    message = _message(choice, asked.keys, may_be_empty=asked.is_part or not triples)
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
        cached_tokens=cached_tokens(meta.get("cached_tokens"), usage),
        miscounted=None
        if queued
        else miscounted(prompt.tokens, (f"{where}.prompt_tokens", own), ("usage.prompt_tokens", count)),
        top=None if asked.wish is None else of_sglang_chat(meta, where, prompt, len(triples), asked.wish),
        speculative=None if is_null(meta.get("spec_verify_ct")) else speculative(meta_raw, NULL),
        was_queued=queued,
    )
    bulk = [prompt.text, *copies, *flat(meta["output_token_logprobs"], len(triples))]
    logprobs = choice.get("logprobs")
    content = object_at(logprobs, "choices[0].logprobs").get("content") if is_object(logprobs) else None
    if _checked_entries(content) is not None:
        bulk.append(bytes(content or b""))
    return parsed, bulk


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


def _vllm(root: _Root, choice: Fields, asked: _Asked) -> _Read:
    output_ids = typed(IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs = _logprobs(choice, asked.keys)
    content, bulk = logprobs.get("content"), list[bytes]()
    entries: list[_Entry] | list[_AnyEntry] | None = _checked_entries(content)
    if entries is None:
        entries = typed(_ANY_ENTRIES, content, "choices[0].logprobs.content")
    else:
        bulk.append(bytes(content or b""))
    if len(entries) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.content has {len(entries)} entries for {len(output_ids)} output token ids")
    usage = _usage(root, asked.keys)
    count_is(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    count = usage.get("prompt_tokens")
    prompt = Prompt.at(root.prompt_token_ids, "prompt_token_ids", asked.known, asked.sent, count, asked.cut)
    copies = [
        *prompt.repeated(choice.get("prompt_token_ids"), "choices[0].prompt_token_ids"),
        *same_output(choice, output_ids, "response_token_ids"),
    ]
    parsed = Parsed(
        dialect="vllm",
        message=_message(choice, asked.keys, may_be_empty=asked.is_part or not output_ids),
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
        cached_tokens=cached_tokens(None, usage),
        miscounted=miscounted(prompt.tokens, ("usage.prompt_tokens", count)),
        top=None if asked.wish is None else of_vllm_chat(logprobs["content"], root.prompt_logprobs, prompt, asked.wish),
        speculative=speculative(None, root.metrics),
    )
    return parsed, [prompt.text, *copies, *bulk]


def _completion(root: _Root, choice: Fields, asked: _Asked) -> _Read:
    """A valid completion."""
    text_raw, dialect = choice.get("text"), asked.dialect
    typed(_TEXT, text_raw, "choices[0].text", "a string")
    if dialect == "openai":
        return _of_text(root, choice, bytes(text_raw or b""), asked.keys)
    output_ids = typed(IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs = _logprobs(choice, asked.keys)
    values = typed(_LOGPROBS, logprobs.get("token_logprobs"), "choices[0].logprobs.token_logprobs")
    if len(values) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.token_logprobs has {len(values)} entries for {len(output_ids)} token ids")
    usage = _usage(root, asked.keys)
    count_is(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    count, finish, versions = usage.get("prompt_tokens"), finish_reason(choice, {}), metadata(root)
    queued = "matched_stop" in choice and was_queued(finish, count)
    at = "choices[0].prompt_token_ids"
    prompt = Prompt.at(choice.get("prompt_token_ids"), at, asked.known, asked.sent, count, asked.cut, not queued)
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
        cached_tokens=cached_tokens(None, usage),
        miscounted=None if queued else miscounted(prompt.tokens, ("usage.prompt_tokens", count)),
        # SGLang's completions name the alternatives by their texts, which are no ids.
        top=None
        if asked.wish is None or dialect == "sglang"
        else of_vllm_completion(logprobs, choice, prompt, len(output_ids), asked.wish),
        speculative=speculative(None, root.metrics),
        was_queued=queued,
    )
    return parsed, [prompt.text, *copies, bytes(choice["token_ids"]), bytes(logprobs["token_logprobs"])]


def _of_text(root: _Root, choice: Fields, message: bytes, keys: Keys) -> _Read:
    """What a reply says that need not have ids. Raises Rejected."""
    usage = _usage(root, keys)
    parsed = Parsed(
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
        cached_tokens=cached_tokens(None, usage),
        counts=counts(root),
    )
    return parsed, []


def _usage(root: _Root, keys: Keys) -> Fields:
    """The engine's counts in `usage`, if any. Raises Rejected if they contradict each other."""
    usage = object_at(root.usage, "usage") if is_object(root.usage) else {}
    if usage:
        keys.do_not_differ(root.usage, usage, "usage")
    return usage


def _logprobs(choice: Fields, keys: Keys) -> Fields:
    raw = choice.get("logprobs")
    logprobs = object_at(raw, "choices[0].logprobs")
    keys.stand_once(raw or b"", logprobs, "choices[0].logprobs")
    return logprobs


def _checked_entries(content: msgspec.Raw | None) -> list[_Entry] | None:
    """None if they have what no engine writes, which is then checked with the rest of the reply."""
    try:
        return None if content is None else _ENTRIES.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _text_message(choice: Fields, keys: Keys) -> bytes:
    """A vendor's message is null where it refuses, or where its reasoning, which it keeps to itself, used up the
    limit."""
    message = object_at(choice.get("message"), "choices[0].message")
    ended_early = finish_reason(choice, {}) not in (None, "stop", "tool_calls")
    return _message(choice, keys, may_be_empty=ended_early or not is_null(message.get("refusal")))


def _message(choice: Fields, keys: Keys, *, may_be_empty: bool) -> bytes:
    raw = choice.get("message")
    message = object_at(raw, "choices[0].message")
    keys.do_not_differ(raw or b"", message, "choices[0].message")
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
