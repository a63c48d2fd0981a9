"""Reads an engine's stream of chat completion chunks into the reply that it would have sent as a whole: what is
validated, stored and rendered is the same for both.

    chunk       vLLM's, with `return_token_ids`, has            SGLang's, with IDS_STREAM, has
    first       id, created, model, prompt_token_ids; a role    id, created, model; a role
    each        a delta, token_ids, logprobs.content            a delta, logprobs.content
    last        also finish_reason, stop_reason,                no delta; finish_reason, matched_stop
                weight_versions
    then        usage, without a choice; `[DONE]`               before it sglext: input_ids, output_ids, routed_experts

Lists of ids and logprobs are joined as raw JSON, so that what was sent is what is checked. Of the chunks between the
first and the last, which are as many as tokens, only what every one has is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from app.domain.request import join_object
from app.upstream.deltas import Delta, JoinedMessage
from workers.parse_json import NULL, Fields, Rejected, is_null, no_contradiction
from workers.reply import FAILED

Push = Callable[[bytes, Delta], None]
"""Takes the reply as its first chunk gives it, with an empty message, and the next delta."""

STREAM = b',"stream":true,"stream_options":{"include_usage":true}'
"""Raw members of a request's object that ask for a stream."""

IDS_STREAM = STREAM + b',"return_input_ids_in_sglext":true,"return_output_ids_in_sglext":true'
"""Those that ask SGLang for one that has the ids."""

EVENT_STREAM = "text/event-stream"


class BadStream(Exception):
    """The stream is no whole reply; the message says why."""


class CutStream(BadStream):
    """The engine ended the stream early."""


class StreamReader(Protocol):
    """Takes the bytes of a stream. `is_live`: somebody waits for each delta."""

    @property
    def is_live(self) -> bool: ...

    def feed(self, piece: bytes) -> None:
        """The next bytes of the body, cut anywhere. Raises BadStream."""
        ...

    def reply(self) -> bytes:
        """The whole reply. Raises BadStream if the stream has ended before."""
        ...


_FIELDS = msgspec.json.Decoder(Fields)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_DELTA = msgspec.json.Decoder(dict[str, Any])


class _Limits(msgspec.Struct):
    max_completion_tokens: Any = None
    max_tokens: Any = None


class _Told(msgspec.Struct):
    """An engine's error."""

    code: Any = None
    type: Any = None


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] = {}
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """A chunk between the first and the last."""

    choices: tuple[_Choice]
    error: None = None
    usage: None = None


class _Extension(msgspec.Struct):
    """SGLang's ids, of the one choice."""

    output_ids: tuple[list[int]]
    input_ids: msgspec.Raw = msgspec.Raw(b"null")


class _Entry(msgspec.Struct):
    token: str
    logprob: msgspec.Raw


_CHUNK = msgspec.json.Decoder(_Chunk)
_IDS_OF_SGLANG = ("input_ids", "output_ids")
_EXTENSION = msgspec.json.Decoder(_Extension)
_ENTRIES = msgspec.json.Decoder(list[_Entry])
_LIMITS = msgspec.json.Decoder(_Limits)
_TOLD = msgspec.json.Decoder(_Told | None)
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")

PAST_LIMIT = 16
"""So many tokens may come past a request's limit: an engine that verifies drafts may end a few late."""

_ONCE = (b'"choices":', b'"delta":', b'"content":[')
"""Names that such a chunk has once, and vLLM's `token_ids` too; what has one twice is read field by field. No text can
have them in it."""

_IDS, _ENTRY = b'"token_ids":', b'"top_logprobs":'

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What decoding an engine's JSON may raise."""


class EventReader:
    """Splits a stream into the data of its events."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._is_done = False

    def feed(self, piece: bytes) -> None:
        """The next bytes of the body, cut anywhere. Raises BadStream."""
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line = b"".join([*self._line, end]).removesuffix(b"\r")
            self._line = []
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                self._event(data)
        if rest:
            self._line.append(rest)

    def _event(self, data: bytes) -> None:
        if self._is_done:
            raise BadStream("the stream went on after its end")
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            self._read(data)
        except (*UNREADABLE, Rejected) as error:
            raise BadStream(f"a chunk of the stream cannot be read: {error}") from error

    def _read(self, data: bytes) -> None:
        raise NotImplementedError

    def _require_whole(self, has_ended: bool) -> None:
        """Raises BadStream if the stream has ended before its end."""
        if not self._is_done or self._data or self._line:
            raise CutStream("the stream ended before its end")
        if not has_ended:
            raise BadStream("the stream ended without a finish reason")


class ReplyStream(EventReader):
    """One stream. `push` gets each delta as soon as it has come. `tokens` is how many have come, of which the request
    allows `limit`."""

    def __init__(self, push: Push | None = None, limit: int | None = None) -> None:
        super().__init__()
        self.tokens = 0
        self._limit = limit
        self._push = push
        self._root: dict[str, bytes] = {}
        self._begun = b""
        self._choice: dict[str, bytes] = {}
        self._message = JoinedMessage()
        self._lists: dict[str, list[bytes]] = {"token_ids": [], "logprobs": []}

    @property
    def is_live(self) -> bool:
        return self._push is not None

    @property
    def has_ended(self) -> bool:
        """Has the last token come?"""
        return "finish_reason" in self._choice

    @property
    def was_aborted(self) -> bool:
        """Has the engine said that it was?"""
        return self._choice.get("finish_reason") == b'"abort"'

    def reply(self) -> bytes:
        """The whole reply. Raises BadStream if the stream has ended before."""
        self._require_whole(self.has_ended)
        try:
            return self._whole(self._root, self._choice)
        except Rejected as error:
            raise BadStream(str(error)) from error

    @property
    def has_calls(self) -> bool:
        """Has a tool call begun?"""
        return self._message.has_calls

    def begun(self) -> bytes:
        """The reply so far, as if the engine had aborted it after these tokens, without the calls that have begun."""
        self._message.drop_calls()
        prompt = _count_items(self._root.get("prompt_token_ids", b"[]"))
        usage = {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
        choice = {**self._choice, "finish_reason": b'"abort"'}
        return self._whole({**self._root, "usage": msgspec.json.encode(usage)}, choice)

    def _whole(self, root: Mapping[str, bytes], end: Mapping[str, bytes]) -> bytes:
        content = b"[" + b",".join(self._lists["logprobs"]) + b"]"
        choice = {
            **end,
            "index": b"0",
            "message": msgspec.json.encode(self._message.whole()),
            "logprobs": b'{"content":' + content + b"}",
        }
        if "matched_stop" in end or "sglext" in root:
            return _of_sglang(root, choice, content)
        choice = {"stop_reason": b"null", **choice, "token_ids": b"[" + b",".join(self._lists["token_ids"]) + b"]"}
        return join_object({**root, "choices": b"[" + join_object(choice) + b"]"})

    def _read(self, data: bytes) -> None:
        if not self._is_plain(data):
            self._chunk(no_contradiction(data, "a chunk"))

    def _is_plain(self, data: bytes) -> bool:
        """Read a chunk between the first and the last, if it is one."""
        if not self._begun or self.has_ended or any(data.count(name) != 1 for name in _ONCE) or data.count(_IDS) > 1:
            return False
        try:
            [choice] = _CHUNK.decode(data).choices
        except UNREADABLE:
            return False
        if choice.finish_reason is not None or choice.index or choice.logprobs is None:
            return False
        self._take(choice.delta, choice.token_ids, choice.logprobs.content)
        return True

    def _chunk(self, chunk: Fields) -> None:
        require_no_error(chunk.get("error"))
        choices = _RAWS.decode(chunk.pop("choices", msgspec.Raw(b"[]")))
        chunk["object"] = msgspec.Raw(b'"chat.completion"')
        self._root.update(_values(chunk))
        if not choices:
            return
        if len(choices) > 1:
            raise BadStream("a chunk has several choices")
        if not self._begun:
            self._begun = self._beginning()
        self._add(no_contradiction(choices[0], "a choice"))

    def _beginning(self) -> bytes:
        """The reply with an empty message, and how many tokens the prompt has."""
        fields = dict(self._root)
        fields["usage"] = b'{"prompt_tokens":%d}' % _count_items(fields.pop("prompt_token_ids", b"[]"))
        return join_object({**fields, "choices": b'[{"index":0,"message":{"role":"assistant"}}]'})

    def _add(self, choice: Fields) -> None:
        if "finish_reason" in self._choice:
            raise BadStream("the stream went on after its finish reason")
        if bytes(choice.pop("index", msgspec.Raw(b"0"))) != b"0":
            raise BadStream("a chunk is not of the first choice")
        delta = _DELTA.decode(choice.pop("delta", msgspec.Raw(b"{}")))
        ids, logprobs = choice.pop("token_ids", None), choice.pop("logprobs", None)
        content = None if logprobs is None or is_null(logprobs) else _FIELDS.decode(logprobs).get("content")
        if bytes(choice.get("finish_reason", NULL)) == FAILED:
            raise CutStream(told_error(choice.get("error")))
        self._take(delta, ids, content)
        self._choice.update(_values(choice))
        if self.has_ended and (calls := self._message.rest()):
            self._push_news({"tool_calls": calls})

    def _take(self, delta: dict[str, Any], ids: msgspec.Raw | None, logprobs: msgspec.Raw | None) -> None:
        """What each chunk has."""
        of_ids, of_logprobs = self._join("token_ids", ids), self._join("logprobs", logprobs)
        self.tokens += of_ids.count(b",") + 1 if of_ids else of_logprobs.count(_ENTRY)
        require_within(self.tokens, self._limit)
        if news := self._message.add(delta):
            self._push_news(news)

    def _push_news(self, news: Delta) -> None:
        if self._push is not None:
            self._push(self._begun, news)

    def _join(self, name: str, raw: msgspec.Raw | None) -> bytes:
        """Adds a list's items to those that have come; returns them."""
        if is_null(raw):
            return b""
        text = bytes(raw or b"")
        if text[:1] != b"[" or text[-1:] != b"]":
            raise BadStream(f"{name} of a chunk is not a list")
        if inner := text[1:-1].strip():
            self._lists[name].append(inner)
        return inner


def _of_sglang(root: Mapping[str, bytes], choice: Mapping[str, bytes], content: bytes) -> bytes:
    """The reply with the ids where SGLang's whole reply has them. Its stream names no weight version. Raises BadStream.

    SGLang 0.5.23 gives no logprob of a token that shows no text, such as the end, where it runs without parsers.
    """
    try:
        extension, entries = _EXTENSION.decode(root.get("sglext", b"{}")), _ENTRIES.decode(content)
    except UNREADABLE as error:
        raise BadStream(f"the stream has no ids: {error}") from error
    [ids] = extension.output_ids
    if len(ids) != len(entries):
        raise BadStream(f"the stream has {len(entries)} logprobs for {len(ids)} ids")
    triples = [
        b"[%b,%d,%b]" % (bytes(entry.logprob), token, msgspec.json.encode(entry.token))
        for entry, token in zip(entries, ids, strict=True)
    ]
    meta = {
        "id": root.get("id", b"null"),
        "output_token_logprobs": b"[" + b",".join(triples) + b"]",
        "completion_tokens": b"%d" % len(ids),
    }
    prompt = bytes(extension.input_ids)
    whole = {**choice, "prompt_token_ids": prompt, "meta_info": join_object(meta)}
    found = {name: raw for name, raw in root.items() if name != "sglext"}
    payloads = _values(_FIELDS.decode(root["sglext"]))
    if others := {name: raw for name, raw in payloads.items() if name not in _IDS_OF_SGLANG}:
        found["sglext"] = join_object(others)
    return join_object({**found, "choices": b"[" + join_object(whole) + b"]"})


def require_no_error(error: msgspec.Raw | None) -> None:
    """Raises CutStream for an event's `error`, with which an engine ends a stream, also without `[DONE]`."""
    if not is_null(error):
        raise CutStream(told_error(error))


def told_error(error: msgspec.Raw | None) -> str:
    """What may be told of an engine's error: a code and a type, but no message, which may repeat the prompt."""
    try:
        told = _TOLD.decode(error or NULL)
    except UNREADABLE:
        told = None
    words = [] if told is None else [str(one) for one in (told.code, told.type) if isinstance(one, str | int)]
    shown = ", ".join(word for word in words if _WORD.fullmatch(word))
    return "the engine ended the generation with an error" + (f" ({shown})" if shown else "")


def limit_of(params: bytes) -> int | None:
    """How many tokens a chat's parameters allow, as both engines read them."""
    limits = _LIMITS.decode(params)
    return next((limit for limit in msgspec.structs.astuple(limits) if type(limit) is int), None)


def require_within(tokens: int, limit: int | None) -> None:
    """Raises BadStream where an engine goes on past the request's limit."""
    if limit is not None and tokens > limit + PAST_LIMIT:
        raise BadStream(f"{tokens} tokens came, and the request allows {limit}")


def _count_items(raw: bytes) -> int:
    """The length of a list of numbers."""
    return raw.count(b",") + (raw != b"[]")


def _values(fields: Fields) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in fields.items() if not is_null(raw)}
