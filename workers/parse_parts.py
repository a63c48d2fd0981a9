"""The content of a valid reply, and the parts that chat and completions share.

Parsed.suffix_ids, .output_ids   little-endian int32, one per token
Parsed.logprobs                  little-endian float64, one per output token, natural log"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from workers.codec import TopLogprobs
from workers.parse_json import NULL, Fields, Rejected, is_null, is_object, object_at, typed, value_at
from workers.parse_prompt import IDS, MAX_TOKEN_ID, KnownTokens

Dialect = Literal["sglang", "vllm", "openai"]
DialectChoice = Literal["auto", "sglang", "vllm", "openai"]
"""`openai` has neither ids nor logprobs: it is never guessed, and its replies are text alone."""

LogprobsOf = Literal["raw", "scaled", "processed", "logits"]
"""Which distribution an engine's logprobs are of: the model's at temperature 1; that at the turn's temperature; the one
that was sampled from, also less what top-k, top-p and min-p left out. `logits`: the numbers are no logprobs."""

MAX_LOGPROB = 1e-4
"""Rounding in an engine may make a logprob slightly positive. It is stored as sent."""

MISSING_LOGPROB = -9999.0
"""vLLM's placeholder for a missing logprob."""

ReplayKind = Literal["routed_experts", "indexer_topk", "sampling_mask"]
"""What an engine can return for a trainer to replay its choices, a row for each token but the last: the experts that a
token was routed to, the positions that sparse attention selected for it, the ids that the next one was drawn from."""

REPLAY: tuple[ReplayKind, ...] = get_args(ReplayKind)
"""The replay payloads: in SGLang's `meta_info` or `sglext`, or on vLLM's choice."""

NAMES: Mapping[Dialect, Mapping[ReplayKind, str]] = {
    "sglang": {**{kind: kind for kind in REPLAY}, "sampling_mask": "output_token_sampling_mask"},
    "vllm": {kind: kind for kind in REPLAY},
}
"""What an engine calls the field of a kind."""

MAX_VERSION = 256
"""Maximum length of a weight version: it is repeated in every event and row."""

UNKNOWN_VERSION = "unknown"
"""The weight version of an engine that names none."""

Logprob = Annotated[float, msgspec.Meta(gt=MISSING_LOGPROB, le=MAX_LOGPROB)]
"""The decoder takes neither NaN nor infinity, which are no JSON, nor what is infinite as a double (`1e999`)."""
CachedTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


FAILED = b'"error"'
"""The finish reason, as JSON, of a generation that failed although the engine, or a proxy before it, answered 200."""


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Output tokens [start, end) of one turn were sampled under the weight version `version`."""

    version: str
    start: int
    end: int


class Speculative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Speculative decoding of a generation: how often the model verified drafts, how many tokens the drafts had, and
    how many of these it took."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int


class Reported(msgspec.Struct):
    """A span as an engine tells it, perhaps with other fields."""

    version: str
    start: int
    end: int


class Parsed(msgspec.Struct, frozen=True):
    """A valid reply. `message` is the raw JSON of the assistant message (of a completion: of its text, a string);
    `prompt_text` that of the prompt's ids, empty if they were sent and not repeated in the reply.

    The prompt is `base` known tokens (0: it does not begin with them) and the suffix. `sequence` describes prompt and
    output together, for the next turn. `payloads` are the replay payloads' kinds and raw values, unchecked; a kind may
    occur twice. `cached_tokens`: how many of the prompt's tokens the engine had cached, if it says so. `miscounted`:
    which of its counts of the prompt's tokens differs from the number of ids; only allowed for a request with images.
    `counts`: of text alone, how many tokens prompt and output have, as the upstream says.
    `logprobs_of` is what the reply itself says its logprobs are of.
    `top` is what the request's `LogprobWish` asked for. `was_queued`: SGLang aborted the request in its waiting queue,
    and the reply has no payloads.
    """

    dialect: Dialect
    message: bytes
    prompt_text: bytes
    base: int
    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes
    sequence: KnownTokens
    finish_reason: str | None
    weight_versions: list[VersionSpan]
    payloads: list[tuple[str, msgspec.Raw]] = []
    cached_tokens: int | None = None
    miscounted: str | None = None
    counts: tuple[int, int] | None = None
    top: TopLogprobs | None = None
    speculative: Speculative | None = None
    was_queued: bool = False
    logprobs_of: LogprobsOf | None = None


class Top(msgspec.Struct):
    """The fields besides the choices in every kind of reply."""

    prompt_token_ids: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL
    sglext: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    metrics: msgspec.Raw = NULL
    prompt_logprobs: msgspec.Raw = NULL


class _PromptDetails(msgspec.Struct):
    cached_tokens: CachedTokens | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: CachedTokens | None = None
    completion_tokens: CachedTokens | None = None


_SPANS = msgspec.json.Decoder(list[Reported])
_COUNTS = msgspec.json.Decoder(_Counts | None)
_CACHED = msgspec.json.Decoder(CachedTokens)
_DETAILS = "prompt_tokens_details"
_USAGE = msgspec.json.Decoder(_PromptDetails)


def only_choice(choices: list[Any]) -> Any:
    """The only allowed choice. Raises Rejected."""
    if len(choices) != 1:
        raise Rejected(f"choices must hold one choice, not {len(choices)}")
    return choices[0]


def payloads_in(dialect: Dialect, *homes: Fields) -> list[tuple[str, msgspec.Raw]]:
    """The replay payloads in these objects: kind and raw value."""
    named = NAMES[dialect].items()
    return [
        (kind, fields[name]) for fields in homes for kind, name in named if name in fields and not is_null(fields[name])
    ]


def extension(top: Top) -> Fields:
    """SGLang's place for payloads without `return_meta_info`; some builds put them here as well."""
    return _fields(top.sglext, "sglext")


def metadata(top: Top) -> Fields:
    """SGLang's place for weight versions outside of `meta_info`."""
    return _fields(top.metadata, "metadata")


def _fields(raw: msgspec.Raw, where: str) -> Fields:
    return object_at(raw, where) if is_object(raw) else {}


def finish_reason(choice: Fields, meta: Fields) -> str | None:
    """The finish reason of the choice, else of SGLang's `meta_info`. Raises Rejected, also for a generation that
    failed."""
    reason = value_at(choice.get("finish_reason"), "choices[0].finish_reason")
    if reason is None and "finish_reason" in meta:
        reason = value_at(meta["finish_reason"], "choices[0].meta_info.finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
    if reason is not None and not isinstance(reason, str):
        raise Rejected("choices[0].finish_reason must be a string")
    if reason == "error":
        raise Rejected("choices[0].finish_reason is error: the generation failed")
    return reason


def weight_versions(
    spans_raw: msgspec.Raw | None, where: str, version_raw: msgspec.Raw | None, tokens: int
) -> list[VersionSpan]:
    """Spans that cover the output; the engine's own list overrides its single version. Raises Rejected."""
    if spans_raw is not None and not is_null(spans_raw):
        return versions_of(typed(_SPANS, spans_raw, where), None, where, tokens)
    version = value_at(version_raw, "weight_version")
    if isinstance(version, bool) or not isinstance(version, str | int | None):
        raise Rejected("weight_version must be a string")
    return versions_of(None, version, where, tokens)


def versions_of(spans: list[Reported] | None, version: str | int | None, where: str, tokens: int) -> list[VersionSpan]:
    """As `weight_versions`, of decoded values."""
    if spans is None:
        return [VersionSpan(_version(version), 0, tokens)] if tokens else []
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens or ends != sorted(ends):
        raise Rejected(f"{where} must cover the {tokens} output tokens in order")
    # SGLang names one without tokens for a generation that was aborted, or got other weights, before its first.
    return [VersionSpan(_version(span.version), span.start, span.end) for span in spans if span.start < span.end]


def _version(version: str | int | None) -> str:
    """The version as text. Python refuses to write integers of thousands of digits. Raises Rejected."""
    if isinstance(version, int) and abs(version) >= 10**MAX_VERSION:
        raise Rejected("weight_version is too long")
    text = UNKNOWN_VERSION if version is None else str(version)
    if len(text) > MAX_VERSION:
        raise Rejected("weight_version is too long")
    return text


def cached_tokens(raw: msgspec.Raw | None, usage: Fields) -> int | None:
    """The count in SGLang's `meta_info` (`raw`), else in `usage`. It is a statistic: None if invalid."""
    try:
        if not is_null(raw):
            return _CACHED.decode(raw or b"")
        details = None if is_null(usage.get(_DETAILS)) else _USAGE.decode(usage[_DETAILS])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if details is None else details.cached_tokens


def counts(top: Top) -> tuple[int, int]:
    """The tokens of prompt and output in `usage`; 0 where it does not say. Raises Rejected."""
    usage: _Counts | None = typed(_COUNTS, top.usage, "usage")
    return (0, 0) if usage is None else (usage.prompt_tokens or 0, usage.completion_tokens or 0)


class SglangSpeculative(msgspec.Struct, gc=False):
    """The counters in SGLang's `meta_info`; earlier builds have the later names."""

    spec_verify_ct: CachedTokens | None = None
    spec_num_proposed_drafts: CachedTokens | None = None
    spec_num_correct_drafts: CachedTokens | None = None
    spec_draft_token_num: CachedTokens | None = None
    spec_accept_token_num: CachedTokens | None = None


class _VllmSpeculative(msgspec.Struct):
    num_spec_steps: CachedTokens
    num_draft_tokens: CachedTokens
    num_accepted_draft_tokens: CachedTokens


class _Metrics(msgspec.Struct):
    speculative_decoding: _VllmSpeculative | None = None


_SGLANG_SPECULATIVE = msgspec.json.Decoder(SglangSpeculative)
_METRICS = msgspec.json.Decoder(_Metrics)


def counted_drafts(meta: SglangSpeculative) -> Speculative | None:
    """None if the engine does not speculate."""
    drafts, accepted = meta.spec_num_proposed_drafts, meta.spec_num_correct_drafts
    drafts = meta.spec_draft_token_num if drafts is None else drafts
    accepted = meta.spec_accept_token_num if accepted is None else accepted
    if meta.spec_verify_ct is None or drafts is None or accepted is None:
        return None
    return Speculative(meta.spec_verify_ct, drafts, accepted)


def speculative(meta: msgspec.Raw | None, metrics: msgspec.Raw) -> Speculative | None:
    """The counters in SGLang's `meta_info`, else in vLLM's `metrics`. They are statistics: None if invalid."""
    try:
        if meta is not None:
            return counted_drafts(_SGLANG_SPECULATIVE.decode(meta))
        metric = None if is_null(metrics) else _METRICS.decode(metrics).speculative_decoding
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if metric is None:
        return None
    return Speculative(metric.num_spec_steps, metric.num_draft_tokens, metric.num_accepted_draft_tokens)


def was_queued(finish: str | None, count: msgspec.Raw | None, own: msgspec.Raw = NULL) -> bool:
    """Did SGLang abort the request in its waiting queue, where nothing has counted the prompt?

    Then `usage` (`count`) has 0 prompt tokens, and `meta_info` (`own`) no number: also of a request that was taken back
    into the queue with some output.
    """
    return finish == "abort" and is_null(own) and count is not None and bytes(count).strip() == b"0"


def miscounted(tokens: int, *counts: tuple[str, msgspec.Raw | None]) -> str | None:
    """Which of the engine's counts of the prompt is present but not `tokens`, as text. Raises Rejected."""
    for where, raw in counts:
        count = value_at(raw, where)
        if count is not None and (type(count) is not int or count != tokens):
            return f"{where} is not {tokens}, the number of the prompt's ids"
    return None


def same_output(choice: Fields, output_ids: list[int], *names: str) -> list[bytes]:
    """The text of further copies of the output's ids, which must be equal. Raises Rejected."""
    kept: list[bytes] = []
    for name in names:
        raw = choice.get(name)
        if raw is not None and not is_null(raw):
            if typed(IDS, raw, f"choices[0].{name}") != output_ids:
                raise Rejected(f"choices[0].{name} is not the {len(output_ids)} ids of the output")
            kept.append(bytes(raw))
    return kept


def float64(values: list[float]) -> bytes:
    """Little-endian, eight bytes a token."""
    return array("d", values).tobytes()
