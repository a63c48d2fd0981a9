"""Validates what an engine returned: bytes in, `Parsed` or `Rejected` out.

The one place that decides whether a 200 is malformed, for SGLang and vLLM. It creates Python objects only for what is
checked or stored, and the checked bytes are the stored bytes. Replay payloads are located here and validated in
`payloads`. The prompt's ids are in `parse_prompt`, the rules for all JSON in `parse_json`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from workers import scan
from workers.codec import StoredTokens
from workers.parse_json import (
    LONG,
    MAX_DEPTH,
    MISSING,
    NULL,
    Rejected,
    count_is,
    is_null,
    is_object,
    no_contradiction,
    no_duplicates,
    object_at,
    plain_object,
    too_deep,
    typed,
    value_at,
)
from workers.parse_prompt import (
    IDS,
    MAX_TOKEN_ID,
    KnownTokens,
    Prompt,
    PromptDiffers,
    TokenId,
    token_text,
)
from workers.reply import (
    MARK,
    MAX_VERSION,
    NAMES,
    REPLAY,
    UNKNOWN_VERSION,
    Dialect,
    Job,
    Protocol,
    Speculative,
    ValidatedReply,
    VersionSpan,
)
from workers.top_logprobs import (
    MISSING_LOGPROB,
    Logprob,
    of_sglang_chat,
    of_vllm_chat,
    of_vllm_completion,
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

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]

NO_TOKENS = KnownTokens(0, 0, "")


class Parsed(msgspec.Struct, gc=False):
    """A valid reply: what it says, its tokens, its prompt (None: text alone, which has no ids), and the kinds and raw
    values of its replay payloads, unchecked; a kind may occur twice. `was_queued`: SGLang aborted the request in its
    waiting queue, and the reply has no payloads. `plain` is the object that the text encodes, with marks in place of
    its long lists; None if another text than this would be encoded."""

    reply: ValidatedReply
    tokens: StoredTokens
    prompt: Prompt | None
    payloads: list[tuple[str, msgspec.Raw]]
    was_queued: bool = False
    plain: Any = None


# What is read of a reply. Values that only some replies have, or that are checked apart, stay raw.


class _Payloads(msgspec.Struct, gc=False):
    """What may hold replay payloads, under either engine's names: also SGLang's `sglext`, the place for them without
    `meta_info`; some builds put them there as well."""

    routed_experts: msgspec.Raw = NULL
    indexer_topk: msgspec.Raw = NULL
    sampling_mask: msgspec.Raw = NULL
    output_token_sampling_mask: msgspec.Raw = NULL


class _Choice(_Payloads, kw_only=True, gc=False):
    message: msgspec.Raw = MISSING
    text: msgspec.Raw = MISSING
    meta_info: msgspec.Raw = MISSING
    logprobs: msgspec.Raw = MISSING
    finish_reason: Any = None
    matched_stop: msgspec.Raw = MISSING
    prompt_token_ids: msgspec.Raw = MISSING
    token_ids: msgspec.Raw = MISSING
    response_token_ids: msgspec.Raw = NULL
    weight_versions: msgspec.Raw = NULL
    prompt_logprobs: msgspec.Raw = NULL


class _Root(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL
    sglext: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    metrics: msgspec.Raw = NULL
    prompt_logprobs: msgspec.Raw = NULL


class _Meta(_Payloads, kw_only=True, gc=False):
    """SGLang's `meta_info`."""

    output_token_logprobs: msgspec.Raw = MISSING
    completion_tokens: msgspec.Raw = NULL
    prompt_tokens: msgspec.Raw = NULL
    finish_reason: Any = None
    weight_version: Any = None
    weight_versions: msgspec.Raw = NULL
    cached_tokens: Any = None
    spec_verify_ct: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL
    output_token_sampling_logprobs: msgspec.Raw = NULL


class _Logprobs(msgspec.Struct, gc=False):
    content: msgspec.Raw = MISSING
    token_logprobs: msgspec.Raw = MISSING


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: msgspec.Raw = NULL
    completion_tokens: msgspec.Raw = NULL
    prompt_tokens_details: Any = None


class _Metadata(msgspec.Struct, gc=False):
    """SGLang's place for weight versions outside of `meta_info`."""

    weight_version: Any = None
    weight_versions: msgspec.Raw = NULL


class _Message(msgspec.Struct, gc=False):
    role: Any = None
    content: Any = None
    tool_calls: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None


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


class _Span(msgspec.Struct):
    """A span as an engine tells it, perhaps with other fields."""

    version: str
    start: int
    end: int


class _Counts(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _SglangSpeculative(msgspec.Struct, gc=False):
    """The counters in SGLang's `meta_info`; earlier builds have the later names."""

    spec_verify_ct: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_num_correct_drafts: Count | None = None
    spec_draft_token_num: Count | None = None
    spec_accept_token_num: Count | None = None


class _VllmSpeculative(msgspec.Struct):
    num_spec_steps: Count
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count


class _Metrics(msgspec.Struct):
    speculative_decoding: _VllmSpeculative | None = None


_ROOT = msgspec.json.Decoder(_Root)
_META = msgspec.json.Decoder(_Meta)
_LOGPROBS = msgspec.json.Decoder(_Logprobs)
_USAGE = msgspec.json.Decoder(_Usage)
_METADATA = msgspec.json.Decoder(_Metadata)
_MESSAGE = msgspec.json.Decoder(_Message)
_TEXT = msgspec.json.Decoder(str)
_NUMBERS = msgspec.json.Decoder(list[Logprob])
_TRIPLES = msgspec.json.Decoder(list[_Triple])
_ENTRIES = msgspec.json.Decoder(list[_Entry])
_ANY_ENTRIES = msgspec.json.Decoder(list[_AnyEntry])
_SPANS = msgspec.json.Decoder(list[_Span])
_COUNTS = msgspec.json.Decoder(_Counts | None)
_PAYLOADS = msgspec.json.Decoder(_Payloads)
_SGLANG_SPECULATIVE = msgspec.json.Decoder(_SglangSpeculative)
_METRICS = msgspec.json.Decoder(_Metrics)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_NO_USAGE, _NO_METADATA = _Usage(), _Metadata()

_Bulk = list[tuple[bytes, msgspec.Raw]]
"""Long lists that are fully checked, each with its key and first bracket in a compact text."""

_PROMPT_KEY, _TRIPLES_KEY = b'"prompt_token_ids":[', b'"output_token_logprobs":['
_CONTENT_KEY, _IDS_KEY, _NUMBERS_KEY = b'"content":[', b'"token_ids":[', b'"token_logprobs":['
_ONLY_CONTENT = b"{" + _CONTENT_KEY
_LIST_MARK = MARK + b'list@"'


def parse_reply(body: bytes, asked: Job, cut: Prompt | None = None) -> Parsed:
    """Validate a 200 (non-streaming). `cut`: the prompt's ids, if the body has a mark in their place.

    Raises Rejected, naming a rule that it breaks; PromptDiffers if the prompt differs from the sent one. Whether
    `miscounted` is a fault depends on the request.
    """
    if not body.isascii():
        try:
            body.decode()  # The decoder does not check the bytes that it skips.
        except UnicodeDecodeError as error:
            raise Rejected(f"not UTF-8 at byte {error.start}") from error
    try:
        root: _Root = typed(_ROOT, body, "the body")
        if len(root.choices) != 1:
            raise Rejected(f"choices must hold one choice, not {len(root.choices)}")
        [choice] = root.choices
        bulk: _Bulk = []
        try:
            if asked.protocol == "completions":
                parsed = _completion(root, choice, asked, cut, bulk)
            elif asked.dialect == "openai":
                parsed = _of_text(root, choice, _text_message(choice))
            elif asked.dialect == "sglang" or (asked.dialect == "auto" and _looks_like_sglang(root, choice)):
                parsed = _sglang(root, choice, asked, cut, bulk)
            else:
                parsed = _vllm(root, choice, asked, cut, bulk)
        except Rejected:
            _require_keys_once(root, choice)  # This is named first: another reader may read another value.
            raise
        parsed.plain = _require_readable(body, root, choice, bulk, parsed.payloads)
    except RecursionError as error:
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels") from error
    return parsed


def _looks_like_sglang(root: _Root, choice: _Choice) -> bool:
    """In a chat reply, token ids on the choice are vLLM's; otherwise SGLang's rules hold."""
    return choice.meta_info != MISSING or (choice.token_ids == MISSING and root.prompt_token_ids == NULL)


def _sglang(root: _Root, choice: _Choice, asked: Job, cut: Prompt | None, bulk: _Bulk) -> Parsed:
    where = "choices[0].meta_info"
    meta: _Meta = typed(_META, choice.meta_info, where, "an object")
    triples: list[_Triple] = typed(_TRIPLES, meta.output_token_logprobs, f"{where}.output_token_logprobs")
    count = len(triples)
    if bytes(meta.completion_tokens) != b"%d" % count:
        count_is(meta.completion_tokens, count, f"{where}.completion_tokens", "output_token_logprobs")
    usage = _usage(root)
    finish = _finish_reason(choice, meta)
    # An abort in the waiting queue, where nothing has counted the prompt; also of a request that was taken back there.
    was_queued = finish == "abort" and meta.prompt_tokens == NULL and bytes(usage.prompt_tokens) == b"0"
    own_count = usage.prompt_tokens if meta.prompt_tokens == NULL else meta.prompt_tokens
    at = "choices[0].prompt_token_ids"
    prompt = _prompt(choice.prompt_token_ids, at, asked, own_count, cut, bulk, is_counted=not was_queued)
    if root.prompt_token_ids != NULL and prompt.repeated(root.prompt_token_ids, "prompt_token_ids"):
        bulk.append((_PROMPT_KEY, root.prompt_token_ids))
    if meta.prompt_token_ids != NULL and prompt.repeated(meta.prompt_token_ids, f"{where}.prompt_token_ids"):
        bulk.append((_PROMPT_KEY, meta.prompt_token_ids))
    output_ids = [triple.id for triple in triples]
    logprobs = [triple.logprob for triple in triples]
    is_processed = False
    if meta.output_token_sampling_logprobs != NULL:
        sampled = _sampling_logprobs(meta.output_token_sampling_logprobs, count, where)
        logprobs, is_processed = (logprobs, False) if sampled is None else (sampled, True)
    if choice.response_token_ids != NULL or choice.token_ids != MISSING:
        _require_same_output(choice, output_ids, "response_token_ids", "token_ids")
    output = array("i", output_ids).tobytes()
    counts = (f"{where}.prompt_tokens", meta.prompt_tokens), ("usage.prompt_tokens", usage.prompt_tokens)
    reply = ValidatedReply(
        dialect="sglang",
        message=_message(choice, may_be_empty=asked.is_part or not triples),
        base=prompt.base,
        suffix_tokens=prompt.tokens - prompt.base,
        output_tokens=count,
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish,
        weight_versions=_weight_versions(
            meta.weight_versions,
            f"{where}.weight_versions",
            _metadata(root).weight_version if meta.weight_version is None else meta.weight_version,
            count,
        ),
        output_ids=output,
        cached_tokens=_cached_tokens(meta, usage),
        miscounted=None if was_queued else _miscounted(prompt.tokens, counts),
        speculative=None if meta.spec_verify_ct == NULL else _sglang_speculative(choice.meta_info),
        logprobs_of="processed" if is_processed else None,
    )
    top = None
    if asked.wish is not None:
        top = of_sglang_chat(object_at(choice.meta_info, where), where, prompt, count, asked.wish)
    if choice.logprobs != MISSING and is_object(choice.logprobs):
        content, entries = _content(choice)
        if entries is not None:
            bulk.append((_CONTENT_KEY, content))
    text = bytes(meta.output_token_logprobs)
    # Triples that hold lists or objects are checked with the rest of the reply.
    if text.count(b"[") == count + 1 and b"{" not in text:
        bulk.append((_TRIPLES_KEY, meta.output_token_logprobs))
    tokens = StoredTokens(prompt.suffix_ids, output, array("d", logprobs).tobytes(), top)
    return Parsed(reply, tokens, prompt, _payloads("sglang", root, meta), was_queued)


def _sampling_logprobs(raw: msgspec.Raw, tokens: int, where: str) -> list[float] | None:
    """Of the distribution that was sampled from, which SGLang gives with the sampling masks: renormalised over what
    top-k, top-p and min-p kept. None in the mode `support`, where there is a list for each token."""
    name = f"{where}.output_token_sampling_logprobs"
    if bytes(raw)[1:].lstrip()[:1] == b"[":
        return None
    values: list[float] = typed(_NUMBERS, raw, name)
    if len(values) != tokens:
        raise Rejected(f"{name} has {len(values)} entries for {tokens} output token ids")
    return values


def _vllm(root: _Root, choice: _Choice, asked: Job, cut: Prompt | None, bulk: _Bulk) -> Parsed:
    output_ids: list[int] = typed(IDS, choice.token_ids, "choices[0].token_ids")
    content, checked = _content(choice)
    entries: list[_Entry] | list[_AnyEntry] | None = checked
    count = len(output_ids)
    if entries is None:
        entries = typed(_ANY_ENTRIES, content, "choices[0].logprobs.content")
    else:
        bulk.append((_CONTENT_KEY, content))
    if len(entries) != count:
        raise Rejected(f"choices[0].logprobs.content has {len(entries)} entries for {count} output token ids")
    usage = _usage(root)
    if bytes(usage.completion_tokens) != b"%d" % count:
        count_is(usage.completion_tokens, count, "usage.completion_tokens", "token_ids")
    prompt = _prompt(root.prompt_token_ids, "prompt_token_ids", asked, usage.prompt_tokens, cut, bulk)
    if choice.prompt_token_ids != MISSING and prompt.repeated(choice.prompt_token_ids, "choices[0].prompt_token_ids"):
        bulk.append((_PROMPT_KEY, choice.prompt_token_ids))
    if choice.response_token_ids != NULL:
        _require_same_output(choice, output_ids, "response_token_ids")
    output = array("i", output_ids).tobytes()
    reply = ValidatedReply(
        dialect="vllm",
        message=_message(choice, may_be_empty=asked.is_part or not output_ids),
        base=prompt.base,
        suffix_tokens=prompt.tokens - prompt.base,
        output_tokens=count,
        sequence=prompt.followed_by(output_ids),
        finish_reason=_finish_reason(choice),
        weight_versions=_weight_versions(
            choice.weight_versions, "choices[0].weight_versions", _metadata(root).weight_version, count
        ),
        output_ids=output,
        cached_tokens=_cached_tokens(None, usage),
        miscounted=_miscounted(prompt.tokens, [("usage.prompt_tokens", usage.prompt_tokens)]),
        speculative=None if root.metrics == NULL else _vllm_speculative(root.metrics),
    )
    top = None if asked.wish is None else of_vllm_chat(content, root.prompt_logprobs, prompt, asked.wish)
    logprobs = array("d", [entry.logprob for entry in entries]).tobytes()
    return Parsed(
        reply, StoredTokens(prompt.suffix_ids, output, logprobs, top), prompt, _payloads("vllm", None, choice)
    )


def _completion(root: _Root, choice: _Choice, asked: Job, cut: Prompt | None, bulk: _Bulk) -> Parsed:
    """A valid completion."""
    typed(_TEXT, choice.text, "choices[0].text", "a string")
    if asked.dialect == "openai":
        return _of_text(root, choice, bytes(choice.text))
    output_ids: list[int] = typed(IDS, choice.token_ids, "choices[0].token_ids")
    numbers, count = _logprobs(choice).token_logprobs, len(output_ids)
    logprobs: list[float] = typed(_NUMBERS, numbers, "choices[0].logprobs.token_logprobs")
    if len(logprobs) != count:
        raise Rejected(f"choices[0].logprobs.token_logprobs has {len(logprobs)} entries for {count} token ids")
    usage = _usage(root)
    if bytes(usage.completion_tokens) != b"%d" % count:
        count_is(usage.completion_tokens, count, "usage.completion_tokens", "token_ids")
    finish, metadata = _finish_reason(choice), _metadata(root)
    is_sglangs = choice.matched_stop != MISSING
    was_queued = is_sglangs and finish == "abort" and bytes(usage.prompt_tokens) == b"0"  # as in a chat
    at = "choices[0].prompt_token_ids"
    prompt = _prompt(choice.prompt_token_ids, at, asked, usage.prompt_tokens, cut, bulk, is_counted=not was_queued)
    if root.prompt_token_ids != NULL and prompt.repeated(root.prompt_token_ids, "prompt_token_ids"):
        bulk.append((_PROMPT_KEY, root.prompt_token_ids))
    if choice.response_token_ids != NULL:
        _require_same_output(choice, output_ids, "response_token_ids")
    bulk += [(_IDS_KEY, choice.token_ids), (_NUMBERS_KEY, numbers)]
    dialect = asked.dialect
    if dialect == "auto":
        has_metadata = is_object(root.metadata) and object_at(root.metadata, "metadata")
        dialect = "sglang" if is_sglangs or has_metadata or root.sglext != NULL else "vllm"
    here = choice.weight_versions != NULL
    output = array("i", output_ids).tobytes()
    reply = ValidatedReply(
        dialect=dialect,
        message=bytes(choice.text),
        base=prompt.base,
        suffix_tokens=prompt.tokens - prompt.base,
        output_tokens=count,
        sequence=prompt.followed_by(output_ids),
        finish_reason=finish,
        weight_versions=_weight_versions(
            choice.weight_versions if here else metadata.weight_versions,
            f"{'choices[0]' if here else 'metadata'}.weight_versions",
            metadata.weight_version,
            count,
        ),
        output_ids=output,
        cached_tokens=_cached_tokens(None, usage),
        miscounted=None if was_queued else _miscounted(prompt.tokens, [("usage.prompt_tokens", usage.prompt_tokens)]),
        speculative=None if root.metrics == NULL else _vllm_speculative(root.metrics),
    )
    top = None
    if asked.wish is not None and dialect == "vllm":  # SGLang's name the alternatives by their texts, which are no ids.
        fields = object_at(choice.logprobs, "choices[0].logprobs")
        top = of_vllm_completion(fields, choice.prompt_logprobs, prompt, count, asked.wish)
    tokens = StoredTokens(prompt.suffix_ids, output, array("d", logprobs).tobytes(), top)
    return Parsed(reply, tokens, prompt, _payloads(dialect, root, choice), was_queued)


def _of_text(root: _Root, choice: _Choice, message: bytes) -> Parsed:
    """What a reply says that need not have ids: `usage` has the tokens of prompt and output, or they count as 0. Raises
    Rejected."""
    usage = _usage(root)
    finish, cached = _finish_reason(choice), _cached_tokens(None, usage)
    counts: _Counts = typed(_COUNTS, root.usage, "usage") or _Counts()
    reply = ValidatedReply(
        dialect="openai",
        message=message,
        base=0,
        suffix_tokens=counts.prompt_tokens or 0,
        output_tokens=counts.completion_tokens or 0,
        sequence=NO_TOKENS,
        finish_reason=finish,
        weight_versions=(),
        cached_tokens=cached,
    )
    return Parsed(reply, StoredTokens(b"", b"", b""), None, [])


# parts of a reply


def _prompt(
    raw: msgspec.Raw,
    where: str,
    asked: Job,
    count: msgspec.Raw,
    cut: Prompt | None,
    bulk: _Bulk,
    *,
    is_counted: bool = True,
) -> Prompt:
    """The prompt whose ids are at `where`. Raises as `Prompt.at`."""
    if cut is not None and bytes(raw) == cut.text:
        return cut
    prompt = Prompt.at(raw, where, asked.known, asked.sent, count, is_counted)
    if prompt.text:
        bulk.append((_PROMPT_KEY, raw))
    return prompt


def _payloads(dialect: Dialect, root: _Root | None, home: _Payloads) -> list[tuple[str, msgspec.Raw]]:
    """The replay payloads in this object and in the root's `sglext`: kind and raw value."""
    homes = [home]
    if root is not None and root.sglext != NULL and is_object(root.sglext):
        homes.append(typed(_PAYLOADS, root.sglext, "sglext"))
    found: list[tuple[str, msgspec.Raw]] = []
    for one in homes:
        for kind, name in NAMES[dialect].items():
            value = getattr(one, name)
            if value != NULL:
                found.append((kind, value))
    return found


def _metadata(root: _Root) -> _Metadata:
    if not is_object(root.metadata):
        return _NO_METADATA
    metadata: _Metadata = typed(_METADATA, root.metadata, "metadata")
    return metadata


def _usage(root: _Root) -> _Usage:
    """The engine's counts, if any."""
    if not is_object(root.usage):
        return _NO_USAGE
    usage: _Usage = typed(_USAGE, root.usage, "usage")
    return usage


def _logprobs(choice: _Choice) -> _Logprobs:
    logprobs: _Logprobs = typed(_LOGPROBS, choice.logprobs, "choices[0].logprobs", "an object")
    return logprobs


def _content(choice: _Choice) -> tuple[msgspec.Raw, list[_Entry] | None]:
    """The text of `logprobs.content`, and its entries: None if there are none, or with what no engine writes, which is
    then checked with the rest of the reply. Raises Rejected if `logprobs` is no object."""
    text = memoryview(choice.logprobs)
    if text[: len(_ONLY_CONTENT)] == _ONLY_CONTENT:
        # The usual object has nothing else. So it is not read once more to find the list's end: a whole list between
        # its key and the last brace is all that there is.
        only = msgspec.Raw(text[len(_ONLY_CONTENT) - 1 : -1])
        if (entries := _checked_entries(only)) is not None:
            return only, entries
    content = _logprobs(choice).content
    return content, _checked_entries(content)


def _checked_entries(content: msgspec.Raw) -> list[_Entry] | None:
    try:
        return _ENTRIES.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _finish_reason(choice: _Choice, meta: _Meta | None = None) -> str | None:
    """The finish reason of the choice, else of SGLang's `meta_info`. Raises Rejected, also for a generation that
    failed."""
    reason = choice.finish_reason
    if reason is None and meta is not None:
        reason = meta.finish_reason
        reason = reason.get("type") if isinstance(reason, dict) else reason
    if reason is not None and not isinstance(reason, str):
        raise Rejected("choices[0].finish_reason must be a string")
    if reason == "error":
        raise Rejected("choices[0].finish_reason is error: the generation failed")
    return reason


def _weight_versions(spans: msgspec.Raw, where: str, version: Any, tokens: int) -> tuple[VersionSpan, ...]:
    """Spans that cover the output; the engine's own list overrides its single version. Raises Rejected."""
    if spans == NULL:
        if isinstance(version, bool) or not isinstance(version, str | int | None):
            raise Rejected("weight_version must be a string")
        return (VersionSpan(_version(version), 0, tokens),) if tokens else ()
    told: list[_Span] = typed(_SPANS, spans, where)
    ends = [0, *(span.end for span in told)]
    if [span.start for span in told] != ends[:-1] or ends[-1] != tokens or ends != sorted(ends):
        raise Rejected(f"{where} must cover the {tokens} output tokens in order")
    # SGLang names one without tokens for a generation that was aborted, or got other weights, before its first.
    return tuple([VersionSpan(_version(span.version), span.start, span.end) for span in told if span.start < span.end])


def _version(version: str | int | None) -> str:
    """The version as text. Python refuses to write integers of thousands of digits. Raises Rejected."""
    if isinstance(version, int) and abs(version) >= 10**MAX_VERSION:
        raise Rejected("weight_version is too long")
    text = UNKNOWN_VERSION if version is None else str(version)
    if len(text) > MAX_VERSION:
        raise Rejected("weight_version is too long")
    return text


def _cached_tokens(meta: _Meta | None, usage: _Usage) -> int | None:
    """The count in SGLang's `meta_info`, else in `usage`. It is a statistic: None if invalid."""
    count = None if meta is None else meta.cached_tokens
    if count is None and isinstance(usage.prompt_tokens_details, dict):
        count = usage.prompt_tokens_details.get("cached_tokens")
    return count if type(count) is int and 0 <= count <= MAX_TOKEN_ID else None


def _sglang_speculative(raw: msgspec.Raw) -> Speculative | None:
    """The counters in SGLang's `meta_info`. They are statistics: None if invalid, or if the engine does not
    speculate."""
    try:
        meta = _SGLANG_SPECULATIVE.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    drafts, accepted = meta.spec_num_proposed_drafts, meta.spec_num_correct_drafts
    drafts = meta.spec_draft_token_num if drafts is None else drafts
    accepted = meta.spec_accept_token_num if accepted is None else accepted
    if meta.spec_verify_ct is None or drafts is None or accepted is None:
        return None
    return Speculative(meta.spec_verify_ct, drafts, accepted)


def _vllm_speculative(raw: msgspec.Raw) -> Speculative | None:
    """As `_sglang_speculative`, of vLLM's `metrics`."""
    try:
        counted = _METRICS.decode(raw).speculative_decoding
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if counted is None else Speculative(*msgspec.structs.astuple(counted))


def _miscounted(tokens: int, counts: Iterable[tuple[str, msgspec.Raw]]) -> str | None:
    """Which of the engine's counts of the prompt is present but not `tokens`, as text. Raises Rejected."""
    for where, raw in counts:
        if raw != NULL and bytes(raw) != b"%d" % tokens:
            value_at(raw, where)
            return f"{where} is not {tokens}, the number of the prompt's ids"
    return None


def _require_same_output(choice: _Choice, output_ids: list[int], *names: str) -> None:
    """Further copies of the output's ids must be equal. Raises Rejected."""
    for name in names:
        raw = getattr(choice, name)
        if not is_null(raw) and typed(IDS, raw, f"choices[0].{name}") != output_ids:
            raise Rejected(f"choices[0].{name} is not the {len(output_ids)} ids of the output")


def _text_message(choice: _Choice) -> bytes:
    """A vendor's message is null where it refuses, or where its reasoning, which it keeps to itself, used up the
    limit."""
    message: _Message = typed(_MESSAGE, choice.message, "choices[0].message", "an object")
    ended_early = _finish_reason(choice) not in (None, "stop", "tool_calls")
    return _message(choice, may_be_empty=ended_early or message.refusal is not None)


def _message(choice: _Choice, *, may_be_empty: bool) -> bytes:
    message: _Message = typed(_MESSAGE, choice.message, "choices[0].message", "an object")
    calls = message.tool_calls
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Rejected("choices[0].message.tool_calls must be a list of objects")
    if message.content is None:
        if not calls and not message.reasoning_content and not message.reasoning and not may_be_empty:
            raise Rejected("choices[0].message has no content, no tool calls and no reasoning_content")
    elif not isinstance(message.content, str):
        raise Rejected("choices[0].message.content must be a string")
    if message.role != "assistant":
        raise Rejected("choices[0].message.role must be assistant")
    return bytes(choice.message)


# what holds for all of a reply


def _require_readable(
    body: bytes, root: _Root, choice: _Choice, bulk: _Bulk, payloads: list[tuple[str, msgspec.Raw]]
) -> Any:
    """Require that all can be decoded, nests not too deep, and has no contradicting keys. What is checked already is
    left out, and so are payloads, which have rules of their own. Returns `Parsed.plain`. Raises Rejected."""
    rest, plain = body, None
    keys = [key for key, _ in bulk]
    for key, value in bulk:
        # A quote in a text has a backslash, so that nothing but a value stands behind such a key. Where it stands more
        # often, as in a call's arguments, it may not be this list's.
        at, text = rest.find(key) + len(key) - 1, bytes(value)
        if at >= len(key) and rest.startswith(text, at) and body.count(key) == keys.count(key):
            rest = b"%b%b%b" % (rest[:at], _LIST_MARK, rest[at + len(text) :])
    # A payload of long JSON lists is never decoded: it would take thirty times its bytes.
    if not payloads or sum(len(memoryview(raw)) for _, raw in payloads) <= LONG:
        plain = plain_object(rest)
    if plain is None:
        _require_keys_once(root, choice)
        [choice_raw] = _RAWS.decode(no_contradiction(body, "the reply")["choices"])
        no_contradiction(choice_raw, "choices[0]")
        parts, done = list[bytes](), 0
        for start, end in sorted(scan.places_in(body, [raw for _, raw in (*bulk, *payloads)])):
            parts += [body[done:start], b"0"]
            done = end
        rest = b"".join((*parts, body[done:]))
        value_at(rest, "the body")
    if rest.count(b"[") + rest.count(b"{") > MAX_DEPTH and too_deep(rest):
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels")
    return plain


def _require_keys_once(root: _Root, choice: _Choice) -> None:
    """Raises Rejected where another reader may read another value.

    No engine writes a key twice: what holds the sampled tokens is refused for it, whichever engine's rules hold, even
    where both values are equal. Counts and message may repeat one with an equal value.
    """
    for raw, where in ((choice.meta_info, "meta_info"), (choice.logprobs, "logprobs")):
        if is_object(raw):
            no_duplicates(raw, f"choices[0].{where}")
    for raw, where in ((root.usage, "usage"), (choice.message, "choices[0].message")):
        if is_object(raw):
            no_contradiction(raw, where)
