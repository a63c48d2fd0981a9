"""Reads an engine's stream of chat completion chunks, as vLLM sends it with `return_token_ids`, into the reply that it
would have sent as a whole: what is validated, stored and rendered is the same for both.

    chunk       has
    first       id, created, model, prompt_token_ids; a delta with the role
    each        a delta, token_ids, logprobs.content
    last        also finish_reason, stop_reason, weight_versions
    then        usage, without a choice; `[DONE]`

Lists of ids and logprobs are joined as raw JSON, so that what was sent is what is checked. Of the chunks between the
first and the last, which are as many as tokens, only what every one has is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from app.domain.request import join_object
from workers.parse_json import Fields, Rejected, is_null, no_contradiction

Delta = Mapping[str, Any]
"""A piece of the message: `content`, `reasoning` or `reasoning_content`, `tool_calls`; nothing in it is null."""

Push = Callable[[bytes, Delta], None]
"""Takes the reply as its first chunk gives it, with an empty message, and the next delta."""

STREAM = b',"stream":true,"stream_options":{"include_usage":true}'
"""Raw members of a request's object that ask for a stream."""

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


class _Called(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int
    id: Any = None
    function: _Called | None = None


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


_CHUNK = msgspec.json.Decoder(_Chunk)
_ONCE = (b'"choices":', b'"delta":', b'"token_ids":', b'"content":[')
"""Names that such a chunk has once; what has one twice is read field by field. No text can have them in it."""

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
    """One stream. `push` gets each delta as soon as it has come. `tokens` is how many have come."""

    def __init__(self, push: Push | None = None) -> None:
        super().__init__()
        self.tokens = 0
        self._push = push
        self._root: dict[str, bytes] = {}
        self._begun = b""
        self._choice: dict[str, bytes] = {}
        self._message: dict[str, Any] = {"role": "assistant"}
        self._texts: dict[str, list[str]] = {}
        self._calls: list[dict[str, Any]] = []
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
        return self._whole(self._root, self._choice)

    @property
    def has_calls(self) -> bool:
        """Has a tool call begun?"""
        return bool(self._calls)

    def begun(self) -> bytes:
        """The reply so far, as if the engine had aborted it after these tokens, without the calls that have begun."""
        self._calls = []
        prompt = _count_items(self._root.get("prompt_token_ids", b"[]"))
        usage = {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
        choice = {**self._choice, "finish_reason": b'"abort"'}
        return self._whole({**self._root, "usage": msgspec.json.encode(usage)}, choice)

    def _whole(self, root: Mapping[str, bytes], end: Mapping[str, bytes]) -> bytes:
        choice = {
            "stop_reason": b"null",
            **end,
            "index": b"0",
            "message": msgspec.json.encode(self._whole_message()),
            "token_ids": b"[" + b",".join(self._lists["token_ids"]) + b"]",
            "logprobs": b'{"content":[' + b",".join(self._lists["logprobs"]) + b"]}",
        }
        return join_object({**root, "choices": b"[" + join_object(choice) + b"]"})

    def _read(self, data: bytes) -> None:
        if not self._is_plain(data):
            self._chunk(_fields(data, "a chunk"))

    def _is_plain(self, data: bytes) -> bool:
        """Read a chunk between the first and the last, if it is one."""
        if not self._begun or self.has_ended or any(data.count(name) != 1 for name in _ONCE):
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
        if not is_null(chunk.get("error")):
            raise CutStream("the engine ended the stream with an error")
        choices = _RAWS.decode(chunk.pop("choices", msgspec.Raw(b"[]")))
        chunk["object"] = msgspec.Raw(b'"chat.completion"')
        self._root.update(_values(chunk))
        if not choices:
            return
        if len(choices) > 1:
            raise BadStream("a chunk has several choices")
        if not self._begun:
            self._begun = self._beginning()
        self._add(_fields(choices[0], "a choice"))

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
        self._take(delta, ids, content)
        self._choice.update(_values(choice))

    def _take(self, delta: dict[str, Any], ids: msgspec.Raw | None, logprobs: msgspec.Raw | None) -> None:
        """What each chunk has."""
        if inner := self._join("token_ids", ids):
            self.tokens += inner.count(b",") + 1
        self._join("logprobs", logprobs)
        news = dict(self._news(delta))
        if news and self._push is not None:
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

    def _news(self, delta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Adds a delta to the message; yields what is new."""
        for name, value in delta.items():
            if value is None or name == "role":
                continue
            if name == "tool_calls":
                if calls := [self._call(call) for call in msgspec.convert(value, list[_CallDelta])]:
                    yield name, calls
                continue
            if not isinstance(value, str):
                raise BadStream(f"{name} of a delta is not a text")
            self._texts.setdefault(name, []).append(value)
            if value:
                yield name, value

    def _call(self, delta: _CallDelta) -> dict[str, Any]:
        """Adds a piece of a tool call; returns it without what its call has already."""
        called = delta.function or _Called()
        arguments = called.arguments or ""
        if delta.index == len(self._calls):
            function = {"name": called.name or "", "arguments": arguments}
            self._calls.append({"id": delta.id, "type": "function", "function": {**function, "arguments": [arguments]}})
            return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        if not 0 <= delta.index < len(self._calls):
            raise BadStream("the tool calls of a stream are out of order")
        self._calls[delta.index]["function"]["arguments"].append(arguments)
        return {"index": delta.index, "function": {"arguments": arguments}}

    def _whole_message(self) -> dict[str, Any]:
        """As vLLM's parsers leave it: the content is null only beside reasoning or calls."""
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        content = texts.pop("content", "")
        message = {**self._message, "content": content, **{name: text or None for name, text in texts.items()}}
        for call in self._calls:
            call["function"]["arguments"] = "".join(call["function"]["arguments"])
        if self._calls:
            message["tool_calls"] = self._calls
        if not content and any(value for name, value in message.items() if name != "role"):
            message["content"] = None
        return message


def _count_items(raw: bytes) -> int:
    """The length of a list of numbers."""
    return raw.count(b",") + (raw != b"[]")


def _fields(raw: bytes | msgspec.Raw, where: str) -> Fields:
    members: Fields = _FIELDS.decode(raw)
    no_contradiction(raw, members, where)
    return members


def _values(fields: Fields) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in fields.items() if not is_null(raw)}
