"""Reads a chat reply of the shape that SGLang and vLLM usually send, in one step.

Its `routed_experts` may have been cut out, if they are one base64 text. It accepts only what
`workers.parse` accepts, with that result, and refuses nothing: where anything is unusual it returns
None, and the rules there decide. Numbers and texts are checked by one typed decode, the prompt's ids
are compared as text, and what is neither ids nor logprobs must encode to the same bytes again: then
no key stands twice, every text is UTF-8 and every number in range.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import orjson
from msgspec import UNSET, Raw, UnsetType

from workers import codec, payloads, scan
from workers.codec import TOKEN_BYTES, Cut, Exchange, StoredTokens
from workers.depth import MAX_DEPTH, too_deep
from workers.parse_json import NULL, Rejected
from workers.parse_parts import (
    MAX_VERSION,
    CachedTokens,
    Dialect,
    Logprob,
    Reported,
    SglangSpeculative,
    VersionSpan,
    counted_drafts,
    speculative,
    versions_of,
)
from workers.parse_prompt import LONG_PROMPT, PLAIN_BYTES, PROMPT, Hasher, KnownText, KnownTokens, TokenId, text_of
from workers.payloads import StoredPayload
from workers.reply import Job, PayloadRange, ValidatedReply

Read = tuple[ValidatedReply, Callable[[], KnownText] | None]


class CutRows(NamedTuple):
    """The JSON string `text` of `routed_experts`, in whose place at `at` the reply has an empty one."""

    at: int
    text: memoryview


class _Triple(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """SGLang's `[logprob, token id, text]`."""

    logprob: Logprob
    id: TokenId
    text: str | None = None


class _Alternative(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An entry of `logprobs.content`. A field that is not known here is not checked by the decoder."""

    logprob: Logprob
    token: str = ""
    bytes: list[int] | None = None
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: Raw = NULL


class _Meta(SglangSpeculative, kw_only=True, gc=False):
    output_token_logprobs: Raw
    completion_tokens: int
    prompt_tokens: int | None = None
    finish_reason: Raw = NULL
    weight_version: str | int | None = None
    weight_versions: list[Reported] | None = None
    cached_tokens: CachedTokens | None = None
    prompt_token_ids: Raw = NULL
    routed_experts: Raw = NULL
    indexer_topk: Raw = NULL
    output_token_sampling_mask: Raw = NULL
    output_token_sampling_logprobs: Raw = NULL


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Raw]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    message: Raw
    meta_info: _Meta | UnsetType = UNSET
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: Raw = NULL
    token_ids: list[TokenId] | None = None
    response_token_ids: Raw = NULL
    weight_versions: list[Reported] | None = None
    routed_experts: Raw = NULL
    indexer_topk: Raw = NULL
    sampling_mask: Raw = NULL


class _Details(msgspec.Struct, gc=False):
    cached_tokens: CachedTokens | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Metadata(msgspec.Struct, gc=False):
    weight_version: str | int | None = None


class _Body(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: Raw = NULL
    usage: _Usage | None = None
    sglext: Raw = NULL
    metadata: _Metadata | None = None
    metrics: Raw = NULL


_BODY = msgspec.json.Decoder(_Body).decode
_MESSAGE = msgspec.json.Decoder(_Message).decode
_TRIPLES = msgspec.json.Decoder(list[_Triple]).decode
_ENTRIES = msgspec.json.Decoder(list[_Entry]).decode
_IDS = msgspec.json.Decoder(list[TokenId]).decode
_NO_USAGE = _Usage()
_encode = msgspec.json.Encoder().encode

ROWS = "routed_experts"
_EMPTY = Raw(b'""')
_EMPTY_ROWS = b'"routed_experts":""'
_PROMPT = b'"prompt_token_ids":['
_BARE = _PROMPT + b"]"
_CONTENT, _TRIPLE_LIST = b'"content":[', b'"output_token_logprobs":['
"""Keys in a compact text. A quote inside a string has a backslash, so nothing else reads like this."""


def read(job: Job, body: bytes, known_text: KnownText | None, cut_rows: CutRows | None = None) -> Read | None:
    """A valid reply without payloads but `cut_rows`, and what makes the text of all its tokens, if the prompt's ids are
    long; None if `workers.parse` must decide. `known_text`: that of `job.known`, if it is in memory."""
    start = body.find(_PROMPT) + len(_PROMPT)
    rows_kind = "" if cut_rows is None else ROWS
    if (
        start < len(_PROMPT)
        or job.protocol != "chat"
        or job.wish is not None
        or job.beginning
        or any(spec.required and spec.kind != rows_kind for spec in job.payload_specs)
    ):
        return None
    known, begun = job.known, None
    if known_text is not None and known_text.begins(body, start):
        begun = known_text
    before = 0 if begun is None else begun.known.text_bytes
    end = body.find(b"]", start + before)
    inner = new = body[start + before : end] + b"," if end > start + before else b""
    # The ids are taken out before anything is decoded: a prompt may have a hundred thousand.
    text = body[:start] + body[end:]
    if end < 0 or text.count(_BARE) != 1 or (job.sent and new != job.sent):
        return None
    base = 0
    hasher: Hasher = hashlib.sha256()
    if begun is not None:
        base, hasher = begun.known.tokens, begun.hasher()
        if not new:
            return None
    elif known is not None and len(new) >= known.text_bytes:
        hasher = hashlib.sha256(memoryview(new)[: known.text_bytes])
        if hasher.hexdigest() == known.hash:
            base, new = known.tokens, new[known.text_bytes :]
        else:
            hasher = hashlib.sha256()
    if new == b"," or new.translate(None, b"0123456789,"):
        return None
    try:
        ids_text = b"[%b]" % new[:-1]
        suffix_ids = scan.plain_ids(ids_text) if len(new) > PLAIN_BYTES else None
        if suffix_ids is None:
            suffix_ids = array("i", _IDS(ids_text)).tobytes()
        tokens = base + len(suffix_ids) // TOKEN_BYTES
        root = _BODY(text)
        [choice] = root.choices
        rows_raw = NULL if cut_rows is None else _EMPTY
        raw_message = bytes(choice.message)
        message = _MESSAGE(raw_message)
        meta, usage = choice.meta_info, root.usage or _NO_USAGE
        content = b"" if choice.logprobs is None else bytes(choice.logprobs.content)
        version = None if root.metadata is None else root.metadata.weight_version
        dialect: Dialect
        if meta is not UNSET:
            triples_text = bytes(meta.output_token_logprobs)
            triples = _TRIPLES(triples_text)
            output = [triple.id for triple in triples]
            logprobs = [triple.logprob for triple in triples]
            if content and content != b"null":
                _ENTRIES(content)
            dialect, spans, cached = "sglang", meta.weight_versions, meta.cached_tokens
            drafts = None if meta.spec_verify_ct is None else counted_drafts(meta)
            version = version if meta.weight_version is None else meta.weight_version
            rest = _without(text, _TRIPLE_LIST, triples_text)
            is_odd = (
                bytes(choice.prompt_token_ids) != b"[]"
                or meta.completion_tokens != len(output)
                or meta.prompt_tokens not in (None, tokens)
                or (choice.finish_reason is None and meta.finish_reason != NULL)
                or choice.token_ids not in (None, output)
                or not root.prompt_token_ids == meta.prompt_token_ids == NULL
                or not root.sglext == meta.indexer_topk == meta.output_token_sampling_mask == NULL
                or meta.output_token_sampling_logprobs != NULL
                or meta.routed_experts != rows_raw
            )
        else:
            entries = _ENTRIES(content)
            output = choice.token_ids or []
            logprobs = [entry.logprob for entry in entries]
            dialect, spans, cached, rest = "vllm", choice.weight_versions, None, text
            drafts = None if root.metrics == NULL else speculative(None, root.metrics)
            is_odd = (
                bytes(root.prompt_token_ids) != b"[]"
                or choice.token_ids is None
                or len(entries) != len(output)
                or usage.completion_tokens != len(output)
                or not choice.prompt_token_ids == choice.indexer_topk == choice.sampling_mask == NULL
                or choice.routed_experts != rows_raw
            )
        output_text = _encode(output)
        has_content = message.content is not None or message.tool_calls or message.reasoning_content
        if (
            is_odd
            or choice.finish_reason == "error"
            or job.dialect not in ("auto", dialect)
            or tokens < 2
            or usage.prompt_tokens not in (None, tokens)
            or choice.response_token_ids not in (NULL, Raw(output_text))
            or message.role != "assistant"
            or not (has_content or message.reasoning or job.is_part or not output)
        ):
            return None
        rest = _without(rest, _CONTENT, content)
        if rest.count(b"[") + rest.count(b"{") > MAX_DEPTH and too_deep(rest):
            return None
        if orjson.dumps(orjson.loads(rest)) != rest:
            return None
        if spans is None and output and type(version) is str and len(version) <= MAX_VERSION:
            versions = [VersionSpan(version, 0, len(output))]
        else:
            versions = versions_of(spans, version, "weight_versions", len(output))
        stored: list[StoredPayload] = []
        cuts: list[Cut] = []
        places: list[PayloadRange] = []
        ids_at, ids_place = start - 1, start - 1
        reply = body[: start - 1] + body[end + 1 :]
        if cut_rows is not None:
            at, rows_text = cut_rows
            [spec] = [spec for spec in job.payload_specs if spec.kind == ROWS]
            # The empty text is the value that was decoded if no other stands there.
            if text.count(_EMPTY_ROWS) != 1:
                return None
            payload, cut = payloads.read(rows_text, spec, base, tokens + len(output), npy=dialect == "vllm")
            if cut.form == "text":
                return None
            stored.append(payload)
            places.append(PayloadRange(ROWS, at, at + len(rows_text)))
            if at > end:
                at -= end + 2 - start
            else:
                ids_at, ids_place = ids_at - 2, ids_place + len(rows_text) - 2
            cuts.append(msgspec.structs.replace(cut, at=at))
            reply = reply[:at] + reply[at + 2 :]
    except (msgspec.MsgspecError, ValueError, RecursionError, Rejected):
        return None
    if cached is None and usage.prompt_tokens_details is not None:
        cached = usage.prompt_tokens_details.cached_tokens
    added = output_text[1:-1] + b"," if output else b""
    hasher.update(new)
    hasher.update(added)
    sequence = KnownTokens(tokens + len(output), before + len(inner) + len(added), hasher.hexdigest())
    output_ids = array("i", output).tobytes()
    token_frame, exchange = codec.pack_turn(
        Exchange(
            messages=job.messages,
            message=raw_message,
            reply=reply,
            headers=job.headers,
            status=job.status,
            prompt_ids_at=ids_at,
            rid=job.rid,
            own=job.own,
            cuts=cuts,
            ids_field=job.ids_field,
            tokens=StoredTokens(suffix_ids, output_ids, array("d", logprobs).tobytes()),
        )
    )
    is_long = end - start > LONG_PROMPT
    result = ValidatedReply(
        dialect=dialect,
        message=raw_message,
        base=base,
        suffix_tokens=tokens - base,
        output_tokens=len(output),
        sequence=sequence,
        finish_reason=choice.finish_reason,
        weight_versions=tuple(versions),
        tokens=token_frame,
        exchange=exchange,
        payloads=stored,
        places=places,
        cached_tokens=cached,
        speculative=drafts,
        output_ids=output_ids if job.sent else b"",
        prompt=PayloadRange(PROMPT, ids_place, ids_place + end + 2 - start, True) if is_long else None,
    )
    if not is_long or job.sent:
        return result, None
    return result, lambda: text_of(begun, inner + added, sequence, hasher)


def _without(text: bytes, key: bytes, value: bytes) -> bytes:
    """The text with 0 in place of this list, if it is the first under the key."""
    at = text.find(key) + len(key) - 1
    if at < len(key) or not text.startswith(value, at):
        return text
    return b"%b0%b" % (text[:at], text[at + len(value) :])
