"""Joins several generations of one turn to one reply, written as the engine would have written it.

An interrupted engine returns what it has; asked to continue, it returns the rest. Per-token data is joined as raw JSON,
so that every number keeps its spelling. What describes the whole (counts, the end, weight versions, replay payloads,
the message) is written again. The result is validated like any reply.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pybase64

from workers.join_text import MessageParts, Stop, joined_message, raw_text, stop_across, token_texts
from workers.parse import REPLAY, Protocol, Rejected, VersionSpan
from workers.parse_json import NULL, Fields, is_null, object_at, typed

_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])

_Rows = bytes | np.ndarray[Any, Any] | list[msgspec.Raw]
"""Rows of a payload: raw int32, an array, or JSON values."""


def join_rows(slices: Sequence[tuple[msgspec.Raw, int, int, int]], kind: str, *, npy: bool) -> bytes:
    """The rows of several payloads as one JSON value, in their spelling.

    Each slice: the value, how many rows it holds, and which of them, [start, stop), are taken. Raises Rejected if they
    differ in spelling or row size.
    """
    parts = [_rows(*one, npy=npy) for one in slices]
    widths = {_width(part, stop - start) for part, (_, _, start, stop) in zip(parts, slices, strict=True)}
    if len(widths) > 1:
        raise Rejected(f"{kind} of one turn's generations has rows of different sizes")
    return _encode(parts, kind)


def _rows(value: msgspec.Raw, rows: int, start: int, stop: int, *, npy: bool) -> _Rows:
    """Rows [start, stop) of a payload that holds `rows`."""
    text = bytes(value)
    if text[:1] == b"[":
        items = _RAW_ITEMS.decode(text)
        width = len(items) // rows
        return items[start * width : stop * width]
    data = pybase64.b64decode(msgspec.json.decode(text, type=str), validate=True)
    if npy:
        table: np.ndarray[Any, Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return table[start:stop]
    width = len(data) // rows
    return data[start * width : stop * width]


def _width(part: _Rows, rows: int) -> int:
    """Number of ids in each of `rows` rows."""
    if isinstance(part, np.ndarray):
        return math.prod(part.shape[1:])
    if isinstance(part, list):
        return sum(1 + bytes(item).count(b",") for item in part) // rows
    return len(part) // rows // 4


def _encode(parts: Sequence[_Rows], kind: str) -> bytes:
    """The rows as one JSON value, in the parts' spelling. Raises Rejected if they differ in it."""
    first = parts[0]
    if isinstance(first, bytes) and all(isinstance(part, bytes) for part in parts):
        return b'"' + pybase64.b64encode(b"".join(part for part in parts if isinstance(part, bytes))) + b'"'
    if isinstance(first, list) and all(isinstance(part, list) for part in parts):
        return b"[" + b",".join(bytes(item) for part in parts if isinstance(part, list) for item in part) + b"]"
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) < len(parts) or any(array.shape[1:] != arrays[0].shape[1:] for array in arrays):
        raise Rejected(f"{kind} of one turn's generations are spelled in different ways")
    file = io.BytesIO()
    np.save(file, np.concatenate(arrays), allow_pickle=False)
    return b'"' + pybase64.b64encode(file.getvalue()) + b'"'


Dialect = Literal["sglang", "vllm"]

_CHOICES = msgspec.json.Decoder(list[Fields])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_OFFSETS = msgspec.json.Decoder(list[int])

_OF_TOKENS = (
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
)
"""Lists in SGLang's `meta_info` with one item per output token."""

_MASK = "sampling_mask"
"""Such a list on vLLM's choice; the other payloads have rows of the prompt too."""

_OF_THE_END = ("finish_reason", "matched_stop", "stop_reason")
"""Fields of a choice that describe its end."""


class Piece(msgspec.Struct, frozen=True):
    """One validated generation of the turn.

    `tokens` is the number of its output tokens, `versions` their weight versions. `rows` are the rows [start, stop) of
    each payload kind that it returned.
    """

    body: bytes
    tokens: int
    versions: Sequence[VersionSpan]
    rows: dict[str, tuple[int, int]]


class Shape(msgspec.Struct, frozen=True):
    """What is known of the turn: `prompt_tokens` without earlier generations' output, and the client's stop strings.

    `keeps_stop`: stop strings stay in the text. `has_tools`: tools were offered. `is_raw`: the
    messages have the whole text as content, and so has the joined one.
    """

    dialect: Dialect
    protocol: Protocol
    prompt_tokens: int
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    has_tools: bool = False
    is_raw: bool = False


class _Reply(msgspec.Struct, frozen=True):
    """A reply, split into the parts that are joined."""

    piece: Piece
    root: Fields
    choice: Fields
    meta: Fields
    logprobs: Fields


def stopped(pieces: Sequence[Piece], shape: Shape) -> Stop | None:
    """The stop string that begins in one generation and ends in another, which no engine could detect.

    None also if the replies do not contain their tokens' text. Raises Rejected, as `join`.
    """
    if not shape.stops or len(pieces) < 2:
        return None
    replies = [_split(piece) for piece in pieces]
    texts = [token_texts(reply.meta, reply.logprobs, reply.piece.tokens) for reply in replies]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    matches = _tokens_match_message if shape.protocol == "chat" else _tokens_match_text
    if not all(map(matches, replies, known)):
        return None
    return stop_across(known, shape.stops)


def _tokens_match_message(reply: _Reply, tokens: Sequence[bytes]) -> bool:
    return raw_text(_message_parts(reply), tokens) is not None


def _tokens_match_text(reply: _Reply, tokens: Sequence[bytes]) -> bool:
    """Do a completion's tokens, decoded one by one, make up its text? They cannot show shared characters."""
    shown = b"".join(tokens).decode("utf-8", "replace")
    return shown.encode("ascii", "ignore").startswith(_text(reply).encode("ascii", "ignore"))


def _text(reply: _Reply) -> str:
    return msgspec.json.decode(reply.choice["text"], type=str)


def join(
    pieces: Sequence[Piece], shape: Shape, *, stop: Stop | None = None, finish: Literal["length"] | None = None
) -> bytes:
    """The joined reply. `stop` cuts it short; `finish` is the finish reason if no engine ended it.

    Raises Rejected if the generations cannot be joined: a reply passed on unchanged may use any spelling, but a joined
    one must be understood.
    """
    kept, left = [], sum(piece.tokens for piece in pieces) if stop is None else stop.tokens
    for piece in pieces:
        kept.append(min(piece.tokens, left))
        left -= kept[-1]
    used = len(pieces) if stop is None else max(place for place, count in enumerate(kept) if count) + 1
    return _Joint([_split(piece) for piece in pieces[:used]], kept[:used], shape, stop, finish).body()


def versions(pieces: Sequence[Piece], tokens: int) -> list[VersionSpan]:
    """The weight versions of the first `tokens` tokens of all generations."""
    spans: list[VersionSpan] = []
    start = 0
    for piece in pieces:
        for span in piece.versions:
            begin, end = start + span.start, min(start + span.end, tokens)
            if spans and spans[-1].version == span.version and begin < end:
                spans[-1] = VersionSpan(span.version, spans[-1].start, end)
            elif begin < end:
                spans.append(VersionSpan(span.version, begin, end))
        start += piece.tokens
    return spans


def _split(piece: Piece) -> _Reply:
    root = object_at(piece.body, "the body")
    choice = _CHOICES.decode(root["choices"])[0]
    return _Reply(piece, root, choice, _fields(choice, "meta_info"), _fields(choice, "logprobs"))


def _fields(home: Fields, name: str) -> Fields:
    raw = home.get(name)
    return {} if raw is None or is_null(raw) else object_at(raw, name)


def _message_parts(reply: _Reply) -> MessageParts:
    return MessageParts.of(_fields(reply.choice, "message"), reply.choice)


class _Joint:
    """Replies to be joined, each cut to its first `kept` tokens."""

    def __init__(
        self,
        replies: Sequence[_Reply],
        kept: Sequence[int],
        shape: Shape,
        stop: Stop | None,
        finish: Literal["length"] | None,
    ) -> None:
        self._replies = replies
        self._kept = kept
        self._shape = shape
        self._stop = stop
        self._finish = finish
        self._tokens = sum(kept)
        self._first, self._last = replies[0], replies[-1]

    def body(self) -> bytes:
        root = _merged(self._first.root, self._last.root)
        root["choices"] = _raw(b"[" + _object(self._choice()) + b"]")
        root["usage"] = self._usage()
        metadata = _fields(self._last.root, "metadata")
        if metadata:
            if self._shape.dialect == "sglang":
                self._with_versions(metadata, [_fields(reply.root, "metadata") for reply in self._replies])
            root["metadata"] = _raw(_object(metadata))
        extensions = [_fields(reply.root, "sglext") for reply in self._replies]
        if any(extensions):
            root["sglext"] = _raw(_object(self._with_payloads(_merged(extensions[0], extensions[-1]), extensions)))
        return _object(root)

    def _choice(self) -> Fields:
        choices = [reply.choice for reply in self._replies]
        choice = _merged(self._first.choice, self._last.choice)
        self._end(choice)
        for name in ("token_ids", "response_token_ids", _MASK):
            if name in choice:
                choice[name] = self._list([choice_of.get(name) for choice_of in choices])
        if any(reply.logprobs for reply in self._replies):
            choice["logprobs"] = _raw(_object(self._logprobs()))
        if self._shape.protocol == "chat":
            self._message(choice)
        else:
            choice["text"] = _encoded(self._text())
        if self._first.meta:
            choice["meta_info"] = _raw(_object(self._meta(choice)))
        elif self._shape.dialect == "vllm":
            self._with_versions(choice, choices)
        return self._with_payloads(choice, choices)

    def _end(self, choice: Fields) -> None:
        """The end: the last generation's, unless a stop string or the spent budget ended it before."""
        for name in _OF_THE_END:
            if name in self._last.choice:
                choice[name] = self._last.choice[name]
        if self._stop is None and self._finish is None:
            return
        choice["finish_reason"] = _encoded("stop" if self._stop is not None else self._finish)
        for name in _OF_THE_END[1:]:
            if name in choice:
                choice[name] = _encoded(None if self._stop is None else self._stop.text)

    def _message(self, choice: Fields) -> None:
        texts = [token_texts(reply.meta, reply.logprobs, reply.piece.tokens) for reply in self._replies]
        message, has_calls = joined_message(
            [_message_parts(reply) for reply in self._replies],
            texts,
            stop=self._stop,
            keeps_stop=self._shape.keeps_stop,
            has_tools=self._shape.has_tools,
            is_raw=self._shape.is_raw,
            name=bytes(self._first.root.get("id", b"")),
        )
        choice["message"] = _raw(_object(message))
        if has_calls and bytes(choice.get("finish_reason", b"")) == b'"stop"':
            choice["finish_reason"] = _encoded("tool_calls")
            if "matched_stop" in choice:  # SGLang no longer tells what ended them.
                choice["matched_stop"] = NULL

    def _text(self) -> str:
        """The text. A stop string ends in the last generation and begins before it."""
        if self._stop is None:
            return "".join(map(_text, self._replies))
        *before, _ = self._replies
        text = "".join(map(_text, before)).encode()
        known = [token_texts(reply.meta, reply.logprobs, reply.piece.tokens) or () for reply in before]
        begun = sum(len(token) for tokens in known for token in tokens) - self._stop.at
        kept = self._stop.text if self._shape.keeps_stop else ""
        return text[: len(text) - begun].decode("utf-8", "replace") + kept

    def _meta(self, choice: Fields) -> Fields:
        metas = [reply.meta for reply in self._replies]
        meta = _merged(self._first.meta, self._last.meta)
        for name in ("finish_reason", "weight_version"):
            if name in self._last.meta:
                meta[name] = self._last.meta[name]
        if self._stop is not None:
            meta["finish_reason"] = _encoded({"type": "stop", "matched": self._stop.text})
        elif self._finish is not None or bytes(choice.get("finish_reason", b"")) == b'"length"':
            meta["finish_reason"] = _encoded({"type": "length", "length": self._tokens})
        elif bytes(choice.get("finish_reason", b"")) == b'"tool_calls"':
            meta["finish_reason"] = _encoded({"type": "tool_calls", "matched": None})
        counts = {
            "prompt_tokens": self._shape.prompt_tokens,
            "completion_tokens": self._tokens,
            "output_token_logprobs_length": self._tokens,
            "output_token_sampling_mask_length": self._tokens,
        }
        meta.update((name, _encoded(count)) for name, count in counts.items() if name in meta)
        for name in _OF_TOKENS:
            if name in meta:
                meta[name] = self._list([meta_of.get(name) for meta_of in metas])
        self._with_versions(meta, metas)
        return self._with_payloads(meta, metas)

    def _logprobs(self) -> Fields:
        """Every list in it has one item per token, for either engine."""
        merged = _merged(self._first.logprobs, self._last.logprobs)
        for name in merged:
            raws = [reply.logprobs.get(name) for reply in self._replies]
            if any(_is_list(raw) for raw in raws):
                merged[name] = self._list(raws)
        if _is_list(merged.get("text_offset")):
            merged["text_offset"] = self._offsets()
        return merged

    def _offsets(self) -> msgspec.Raw:
        """Tokens' positions in the text: in characters from vLLM, always -1 from SGLang."""
        offsets: list[int] = []
        length = 0
        for reply, count in zip(self._replies, self._kept, strict=True):
            if not reply.piece.tokens:
                continue
            own = typed(_OFFSETS, reply.logprobs.get("text_offset"), "text_offset")[:count]
            offsets += [at if at < 0 else at + length for at in own]
            length += len(_text(reply))
        return _encoded(offsets)

    def _usage(self) -> msgspec.Raw:
        usages = [_fields(reply.root, "usage") for reply in self._replies]
        usage = dict(usages[0])
        usage["prompt_tokens"] = _encoded(self._shape.prompt_tokens)
        usage["completion_tokens"] = _encoded(self._tokens)
        usage["total_tokens"] = _encoded(self._shape.prompt_tokens + self._tokens)
        thought = [msgspec.json.decode(one.get("reasoning_tokens", b"0")) for one in usages]
        if "reasoning_tokens" in usage and all(isinstance(count, int) for count in thought):
            usage["reasoning_tokens"] = _encoded(min(sum(thought), self._tokens))
        return _raw(_object(usage))

    def _with_versions(self, home: Fields, homes: Sequence[Fields]) -> None:
        """Write the weight versions as spans, if an engine did so or if there are several."""
        spans = versions([reply.piece for reply in self._replies], self._tokens)
        is_single = len(spans) == 1 and self._kept[-1] > 0
        if not is_single or any(not is_null(one.get("weight_versions")) for one in homes):
            home["weight_versions"] = _encoded(spans)

    def _list(self, raws: Sequence[msgspec.Raw | None]) -> msgspec.Raw:
        """Per-token lists joined; null if a generation with tokens lacks its list."""
        if all(is_null(raw) for raw in raws):
            return NULL
        inner = []
        for raw, reply, count in zip(raws, self._replies, self._kept, strict=True):
            if raw is None or is_null(raw):
                if count:
                    return NULL
                continue
            if not _is_list(raw):
                raise Rejected("expected a list with one item per token")
            text = bytes(raw)
            if count < reply.piece.tokens:
                text = b"[" + b",".join(map(bytes, _ITEMS.decode(raw)[:count])) + b"]"
            inner.append(text[1:-1].strip())
        return _raw(b"[" + b",".join(filter(None, inner)) + b"]")

    def _with_payloads(self, home: Fields, homes: Sequence[Fields]) -> Fields:
        for kind in REPLAY[: REPLAY.index(_MASK)]:
            values = [one.get(kind) for one in homes]
            if any(not is_null(value) for value in values) and any(kind in one.piece.rows for one in self._replies):
                home[kind] = self._payload(kind, values)
        return home

    def _payload(self, kind: str, values: Sequence[msgspec.Raw | None]) -> msgspec.Raw:
        """The rows of all generations. Raises Rejected if some are missing."""
        end = max(self._shape.prompt_tokens + self._tokens - 1, 0)
        rows_end: int | None = None
        slices: list[tuple[msgspec.Raw, int, int, int]] = []
        for reply, value in zip(self._replies, values, strict=True):
            rows = reply.piece.rows.get(kind)
            if value is None or is_null(value) or rows is None:
                continue
            start, stop = rows
            rows_end = start if rows_end is None else rows_end
            if start > rows_end:
                break
            if min(stop, end) > rows_end:
                slices.append((value, stop - start, rows_end - start, min(stop, end) - start))
                rows_end = min(stop, end)
        if rows_end is not None and rows_end < end:
            raise Rejected(f"{kind} of {len(values)} generations leaves out rows from {rows_end} on, of {end}")
        if len(slices) == 1 and slices[0][2] == 0 and slices[0][3] == slices[0][1]:
            return slices[0][0]
        if not slices:
            return next(value for value in values if value is not None and not is_null(value))
        return _raw(join_rows(slices, kind, npy=self._shape.dialect == "vllm"))


def _is_list(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(memoryview(raw)[:1]) == b"["


def _merged(first: Fields, last: Fields) -> Fields:
    """The first generation's fields in their order, then those that only the last has."""
    return {**first, **{name: value for name, value in last.items() if name not in first}}


def _encoded(value: object) -> msgspec.Raw:
    return _raw(msgspec.json.encode(value))


def _raw(text: bytes) -> msgspec.Raw:
    return msgspec.Raw(text)


def _object(fields: Fields) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()) + b"}"
