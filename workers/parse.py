"""What an engine returned, judged: bytes in, `Parsed` or `Rejected` out.

The one place that knows when a 200 is malformed, for SGLang's and vLLM's shapes. It builds Python objects
only for what is checked or stored, and the checked bytes are the stored bytes. Replay payloads are found
here and judged in `payloads`.

    Parsed.suffix_ids, .output_ids   little-endian int32, one per token
    Parsed.logprobs                  little-endian float64, one per output token, natural log

A prompt grows with every turn, its ids as JSON text too. So tokens are compared, hashed and cut by that
text, and only what is new of it is decoded (100k ids: 0.2 ms to hash, 3 ms to decode).
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from workers.depth import MAX_DEPTH, too_deep

Dialect = Literal["sglang", "vllm"]

MAX_TOKEN_ID = 2**31 - 1
MISSING_LOGPROB = -9999.0
"""vLLM's stand-in for a logprob it does not have."""

REPLAY = ("routed_experts", "indexer_topk")
"""The replay payloads: in SGLang's `meta_info`, or on vLLM's choice."""

MAX_VERSION = 256
"""Characters of a weight version: it is a name, repeated in every event and row."""

UNKNOWN_VERSION = "unknown"
"""The weight version of an engine that names none."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, msgspec.Meta(gt=MISSING_LOGPROB)]


class Rejected(Exception):
    """A malformed reply. The message names the rule and the place, never content."""


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under weight version `version`."""

    version: str
    start: int
    end: int


class Known(msgspec.Struct, frozen=True):
    """Tokens that a prompt may begin with: how many, and length and hash of their text (see `token_text`)."""

    tokens: int
    text_bytes: int
    hash: str


class Parsed(msgspec.Struct, frozen=True):
    """A sound reply. `message` is the raw JSON of the assistant message, `prompt_text` that of the prompt's ids.

    The prompt is `base` known tokens (0: it does not begin with them) and the suffix. `sequence` describes
    prompt and output together, as the next turn will know them. `payloads` are the replay payloads'
    kinds and raw values, not looked at; a kind may be there twice.
    """

    dialect: Dialect
    message: bytes
    prompt_text: bytes
    base: int
    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes
    sequence: Known
    finish_reason: str | None
    weight_versions: list[Span]
    payloads: list[tuple[str, msgspec.Raw]] = []


def token_text(ids: Iterable[int]) -> bytes:
    """Token ids as text that concatenates as they do: decimal, a comma after each."""
    return "".join(f"{number}," for number in ids).encode()


class _Triple(msgspec.Struct, array_like=True):
    """`[logprob, token id, text, …]`; what follows the id is not looked at."""

    logprob: Logprob
    id: TokenId


class _ContentLogprob(msgspec.Struct):
    logprob: Logprob


Fields = dict[str, msgspec.Raw]


NULL = msgspec.Raw(b"null")


class _Root(msgspec.Struct):
    """A reply's top level, split in one pass down to the fields of its choices."""

    choices: list[Fields]
    prompt_token_ids: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL
    sglext: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL


_ROOT = msgspec.json.Decoder(_Root)
_OBJECT = msgspec.json.Decoder(Fields)
_TRIPLES = msgspec.json.Decoder(list[_Triple])
_CONTENT = msgspec.json.Decoder(list[_ContentLogprob])
_IDS = msgspec.json.Decoder(list[TokenId])
_SPANS = msgspec.json.Decoder(list[Span])
_PLACE = re.compile(r" - at `(.*)`$")


def parse_reply(body: bytes, dialect: Literal["auto", "sglang", "vllm"], known: Known | None = None) -> Parsed:
    """Judge a 200 of `/v1/chat/completions` (non-streaming, capture mode) whose prompt may begin with `known`.

    With `auto` the shape decides: token ids beside the choice are vLLM's, else SGLang's rules hold.
    Raises Rejected, naming the first rule that is broken.
    """
    try:
        return _parse(body, dialect, known)
    except RecursionError as error:
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels") from error


def _parse(body: bytes, dialect: Literal["auto", "sglang", "vllm"], known: Known | None) -> Parsed:
    _utf8(body)
    root: _Root = _typed(_ROOT, body, "the body")
    if len(root.choices) != 1:
        raise Rejected(f"choices must hold one choice, not {len(root.choices)}")
    choice = root.choices[0]
    if dialect == "auto":
        dialect = "vllm" if _looks_like_vllm(root, choice) else "sglang"
    read = _vllm if dialect == "vllm" else _sglang
    parsed, bulk = read(root, choice, known)
    _readable(body, [*bulk, *(bytes(raw) for _, raw in parsed.payloads)])
    return parsed


def _looks_like_vllm(root: _Root, choice: Fields) -> bool:
    return "meta_info" not in choice and ("token_ids" in choice or bytes(root.prompt_token_ids) != b"null")


def _sglang(root: _Root, choice: Fields, known: Known | None) -> tuple[Parsed, list[bytes]]:
    where = "choices[0].meta_info"
    meta_raw = choice.get("meta_info")
    if meta_raw is None:
        raise Rejected(f"{where} is missing")
    meta = _object(meta_raw, where)
    _no_duplicates(bytes(meta_raw), meta, where)
    triples = _typed(_TRIPLES, meta.get("output_token_logprobs"), f"{where}.output_token_logprobs")
    _count(meta.get("completion_tokens"), len(triples), f"{where}.completion_tokens", "output_token_logprobs")
    prompt = _Prompt(choice.get("prompt_token_ids"), "choices[0].prompt_token_ids", known)
    message = _message(choice, len(triples))
    output_ids = [triple.id for triple in triples]
    parsed = Parsed(
        dialect="sglang",
        message=message,
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=_int32(prompt.suffix),
        output_ids=_int32(output_ids),
        logprobs=_float64([triple.logprob for triple in triples]),
        sequence=prompt.followed_by(output_ids),
        finish_reason=_finish_reason(choice, meta),
        weight_versions=_weight_versions(root, meta, len(triples)),
        payloads=_payloads(meta, _extension(root)),
    )
    return parsed, [prompt.text, *_flat(meta["output_token_logprobs"], len(triples))]


def _vllm(root: _Root, choice: Fields, known: Known | None) -> tuple[Parsed, list[bytes]]:
    output_ids = _typed(_IDS, choice.get("token_ids"), "choices[0].token_ids")
    logprobs = _object(choice.get("logprobs"), "choices[0].logprobs")
    entries = _typed(_CONTENT, logprobs.get("content"), "choices[0].logprobs.content")
    if len(entries) != len(output_ids):
        raise Rejected(f"choices[0].logprobs.content has {len(entries)} entries for {len(output_ids)} output token ids")
    usage = _object(root.usage, "usage")
    _count(usage.get("completion_tokens"), len(output_ids), "usage.completion_tokens", "token_ids")
    prompt = _Prompt(root.prompt_token_ids, "prompt_token_ids", known)
    parsed = Parsed(
        dialect="vllm",
        message=_message(choice, len(output_ids)),
        prompt_text=prompt.text,
        base=prompt.base,
        suffix_ids=_int32(prompt.suffix),
        output_ids=_int32(output_ids),
        logprobs=_float64([entry.logprob for entry in entries]),
        sequence=prompt.followed_by(output_ids),
        finish_reason=_finish_reason(choice, {}),
        weight_versions=_weight_versions(root, {}, len(output_ids)),
        payloads=_payloads(choice),
    )
    return parsed, [prompt.text]


def _payloads(*homes: Fields) -> list[tuple[str, msgspec.Raw]]:
    found = [(name, fields[name]) for fields in homes for name in REPLAY if name in fields]
    return [(name, raw) for name, raw in found if bytes(memoryview(raw)[:5]) != b"null"]


def _extension(root: _Root) -> Fields:
    """Where SGLang puts payloads without `return_meta_info`; some builds put them here as well."""
    return {} if bytes(memoryview(root.sglext)[:1]) != b"{" else _object(root.sglext, "sglext")


def _message(choice: Fields, output_tokens: int) -> bytes:
    raw = choice.get("message")
    message = _object(raw, "choices[0].message")
    calls = _value(message.get("tool_calls"), "choices[0].message.tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Rejected("choices[0].message.tool_calls must be a list of objects")
    content = _value(message.get("content"), "choices[0].message.content")
    if content is None:
        reasoning = _value(message.get("reasoning_content"), "choices[0].message.reasoning_content")
        reasoning = reasoning or _value(message.get("reasoning"), "choices[0].message.reasoning")
        if not calls and not reasoning and output_tokens:
            raise Rejected("choices[0].message has no content, no tool calls and no reasoning_content")
    elif not isinstance(content, str):
        raise Rejected("choices[0].message.content must be a string")
    role = _value(message.get("role"), "choices[0].message.role")
    if role != "assistant":
        raise Rejected("choices[0].message.role must be assistant")
    return bytes(raw or b"")


def _finish_reason(choice: Fields, meta: Fields) -> str | None:
    reason = _value(choice.get("finish_reason"), "choices[0].finish_reason")
    if reason is None and "finish_reason" in meta:
        reason = _value(meta["finish_reason"], "choices[0].meta_info.finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
    if reason is not None and not isinstance(reason, str):
        raise Rejected("choices[0].finish_reason must be a string")
    return reason


def _weight_versions(root: _Root, meta: Fields, tokens: int) -> list[Span]:
    """Spans that cover the output; an engine's own list of spans wins over its single version."""
    if "weight_versions" in meta and bytes(meta["weight_versions"]) != b"null":
        where = "choices[0].meta_info.weight_versions"
        spans: list[Span] = _typed(_SPANS, meta["weight_versions"], where)
        ends = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens or ends != sorted(ends):
            raise Rejected(f"{where} must cover the {tokens} output tokens in order")
        return [Span(_version(span.version), span.start, span.end) for span in spans]
    version = _value(meta.get("weight_version"), "choices[0].meta_info.weight_version")
    if version is None:
        metadata = _value(root.metadata, "metadata")
        version = metadata.get("weight_version") if isinstance(metadata, dict) else None
    if isinstance(version, bool) or not isinstance(version, str | int | None):
        raise Rejected("weight_version must be a string")
    return [Span(_version(version), 0, tokens)] if tokens else []


def _version(version: str | int | None) -> str:
    """A number of thousands of digits is none that Python would write."""
    if isinstance(version, int) and abs(version) >= 10**MAX_VERSION:
        raise Rejected("weight_version is too long")
    text = UNKNOWN_VERSION if version is None else str(version)
    if len(text) > MAX_VERSION:
        raise Rejected("weight_version is too long")
    return text


class _Prompt:
    """The prompt's ids as the engine spelled them; only those behind `known` are decoded."""

    def __init__(self, raw: msgspec.Raw | None, where: str, known: Known | None) -> None:
        if raw is None:
            raise Rejected(f"{where} is missing")
        self.text = bytes(raw)
        compact = self.text.translate(None, b" \t\r\n")
        inner = compact[1:-1] + b"," if len(compact) > 2 else b""
        self.base = 0
        self._hasher = hashlib.sha256()
        if known is not None and len(inner) >= known.text_bytes:
            hasher = hashlib.sha256(memoryview(inner)[: known.text_bytes])
            if hasher.hexdigest() == known.hash:
                self.base, self._hasher = known.tokens, hasher
        start = known.text_bytes if known is not None and self.base else 0
        rest = inner[start:-1]
        self.suffix: list[int] = _typed(_IDS, b"[" + rest + b"]" if start else self.text, where)
        if b"-" in rest:
            raise Rejected(f"{where} holds a negative zero")
        self._hasher.update(memoryview(inner)[start:])
        self._text_bytes = len(inner)

    def followed_by(self, output_ids: list[int]) -> Known:
        output = token_text(output_ids)
        self._hasher.update(output)
        return Known(
            self.base + len(self.suffix) + len(output_ids), self._text_bytes + len(output), self._hasher.hexdigest()
        )


def _count(raw: msgspec.Raw | None, found: int, where: str, of: str) -> None:
    count = _value(raw, where)
    if isinstance(count, bool) or not isinstance(count, int):
        raise Rejected(f"{where} must be an integer")
    if count != found:
        raise Rejected(f"{where} is {count}, but {of} has {found} entries")


def _no_duplicates(raw: bytes, fields: Fields, where: str) -> None:
    """Keys that stand twice: two readers would believe different values.

    Where the fields account for every byte of a compact object, none was dropped; else it is read slowly.
    """
    accounted = 1 + sum(len(name) + 4 + len(memoryview(value)) for name, value in fields.items())
    if accounted == len(raw):
        return

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise Rejected(f"{where} has duplicate keys")
        return found

    json.loads(raw, object_pairs_hook=unique, parse_int=str, parse_float=str)


def _readable(body: bytes, bulk: list[bytes]) -> None:
    """Can whoever reads the reply hold all of it? `bulk` are long flat lists that their types have bounded."""
    rest = body
    for text in bulk:
        rest = rest.replace(text, b"0", 1)
    _value(rest, "the body")
    if too_deep(rest):
        raise Rejected(f"nests deeper than {MAX_DEPTH} levels")


def _flat(raw: msgspec.Raw, entries: int) -> list[bytes]:
    """A list of `entries` lists, where it holds nothing deeper; else it is left to be looked at whole."""
    text = bytes(raw)
    return [text] if text.count(b"[") == entries + 1 and b"{" not in text else []


def _utf8(body: bytes) -> None:
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Rejected(f"not UTF-8 at byte {error.start}") from error


def _object(raw: msgspec.Raw | bytes | None, where: str) -> Fields:
    if raw is None:
        raise Rejected(f"{where} is missing")
    fields: Fields = _typed(_OBJECT, raw, where, "an object")
    return fields


def _value(raw: msgspec.Raw | bytes | None, where: str) -> Any:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{where} is not valid JSON") from error


def _typed(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw | bytes | None, where: str, kind: str = "") -> Any:
    if raw is None:
        raise Rejected(f"{where} is missing")
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if kind:
            raise Rejected(f"{where} must be {kind}") from error
        place = _PLACE.search(str(error))
        inside = place.group(1).removeprefix("$") if place else ""
        raise Rejected(f"{where}{inside}: {str(error)[: place.start()] if place else error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{where} is not valid JSON: {error}") from error


def _int32(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def _float64(values: list[float]) -> bytes:
    return array("d", values).tobytes()
