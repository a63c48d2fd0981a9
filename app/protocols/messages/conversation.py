"""A conversation of the Messages API as chat messages: blocks, and a call's arguments both ways.

What a turn's request becomes, with its reply behind it, must begin what the next turn's request becomes, or the session
would fork. So a message's translation depends on its neighbours only up to the next assistant message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from app.domain import bounds
from app.domain.known_body import ContinuedBody, State
from app.domain.proofs import find_proof
from app.domain.request import as_raw, translated
from app.errors import InvalidRequest, Unsupported
from workers.parse_json import MAX_DEPTH, too_deep

T = TypeVar("T")

_FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$?(?P<path>.*)`)?", re.DOTALL)
_LONGEST = 120
"""Characters of a message: it may repeat an invalid value."""

_MISSING = re.compile(r"Object missing required field `(.*)`")


def decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, where: str) -> T:
    """The value at `where` of the request."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:  # msgspec's message with the place in the whole request
        matched = _FAULT.fullmatch(str(error))
        what, path = (matched["what"], matched["path"] or "") if matched else (str(error), "")
        if missing := _MISSING.fullmatch(what):
            raise InvalidRequest(f"{where}{path}.{missing[1]} is missing") from error
        raise InvalidRequest(f"{where}{path}: {what[:1].lower()}{what[1:_LONGEST]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} cannot be parsed") from error


def required(value: T | None, where: str) -> T:
    """A field that its block must have."""
    if value is None:
        raise InvalidRequest(f"{where} is missing")
    return value


def object_text(raw: msgspec.Raw, where: str) -> bytes:
    """A raw JSON object. Raises InvalidRequest for anything else."""
    text = bytes(raw).strip()
    if not text:
        raise InvalidRequest(f"{where} is missing")
    if text[:1] != b"{":
        raise InvalidRequest(f"{where} must be an object")
    return text


def is_given(raw: msgspec.Raw | None) -> bool:
    """Is there a value other than null?"""
    return raw is not None and bytes(raw).strip() not in (b"", b"null")


ABSENT = msgspec.Raw(b"")

Part = dict[str, Any]
"""A content part of a chat message: `text`, `image_url` or `tool_reference`."""


class Block(msgspec.Struct):
    """Any block: which fields it must have depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    input: msgspec.Raw = ABSENT
    tool: msgspec.Raw = ABSENT
    definition: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT
    citations: msgspec.Raw = ABSENT


Content = str | list[Block]


class _Source(msgspec.Struct):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Citations(msgspec.Struct):
    enabled: bool | None = None


_CONTENT: msgspec.json.Decoder[Content] = msgspec.json.Decoder(Content)
_SOURCE = msgspec.json.Decoder(_Source)
_CITATIONS = msgspec.json.Decoder(_Citations)
_SHOWN = 64
"""Characters of an unknown type in an error's message."""


def unsupported(what: str, type_: str, where: str) -> Unsupported:
    return Unsupported(f"{where}: {what} of type {type_[:_SHOWN]!r} cannot be sent to an engine")


def blocks_of(content: Content, where: str) -> Iterator[tuple[Block, str]]:
    """The blocks of a content, each with its place."""
    if isinstance(content, str):
        yield Block("text", content), where
        return
    for index, block in enumerate(content):
        yield block, f"{where}[{index}]"


def content_of(raw: msgspec.Raw, where: str) -> Content:
    """The content of a `tool_result`, which may be absent."""
    return decode(_CONTENT, raw, where) if is_given(raw) else []


def text_of(block: Block, where: str) -> str:
    """Raises InvalidRequest for a block that is not text."""
    if block.type != "text":
        raise InvalidRequest(f"{where}.type must be text, not {block.type[:_SHOWN]!r}")
    return required(block.text, f"{where}.text")


def part_of(block: Block, where: str) -> Part:
    """A block of a user or of a tool's result as a chat's part."""
    match block.type:
        case "text":
            return {"type": "text", "text": required(block.text, f"{where}.text")}
        case "image":
            at, source = f"{where}.source", _source(block, f"{where}.source")
            if source.type == "url":
                url = required(source.url, f"{at}.url")
            elif source.type == "base64":
                kind = required(source.media_type, f"{at}.media_type")
                url = f"data:{kind};base64,{required(source.data, f'{at}.data')}"
            else:
                raise unsupported("a source", source.type, at)
            return {"type": "image_url", "image_url": {"url": url}}
        case "document":
            return {"type": "text", "text": _document(block, where)}
        case "tool_reference":
            return {"type": "tool_reference", "name": required(block.tool_name, f"{where}.tool_name")}
    raise unsupported("a block", block.type, where)


def _source(block: Block, where: str) -> _Source:
    return decode(_SOURCE, required(block.source or None, where), where)


def _document(block: Block, where: str) -> str:
    """A document of text, with its title and context."""
    if is_given(block.citations) and decode(_CITATIONS, block.citations, f"{where}.citations").enabled:
        raise Unsupported(f"{where}.citations: engines do not support citations")
    source = _source(block, f"{where}.source")
    if source.type != "text":
        raise unsupported("a source", source.type, f"{where}.source")
    parts = (block.title, block.context, required(source.data, f"{where}.source.data"))
    return "\n".join(part for part in parts if part)


class Parts:
    """Joins neighbouring texts; empty ones are left out."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def copy(self) -> Parts:
        made = Parts()
        made._parts = [dict(part) for part in self._parts]
        return made

    def add(self, part: Part, separator: str) -> None:
        """`separator` stands between the part and a text before it."""
        if part["type"] != "text":
            self._parts.append(part)
        elif part["text"]:
            last = self._parts[-1] if self._parts else None
            if last is not None and last["type"] == "text":
                last["text"] += separator + part["text"]
            else:
                self._parts.append(part)

    def content(self) -> str | Sequence[Part]:
        """A text, or parts if there is anything else."""
        if not self._parts:
            return ""
        return self._parts if len(self._parts) > 1 or self._parts[0]["type"] != "text" else self._parts[0]["text"]


_INVALID = "INVALID_JSON"

_AROUND = 10
"""Levels of nesting left for what is around the arguments in the request that returns them."""


def as_input(arguments: Any) -> msgspec.Raw:
    """The input of a `tool_use` block as raw JSON.

    What the model sampled is spliced into the reply as it is, if clients can read it as an object and send it back.
    Anything else travels inside `{"INVALID_JSON": text}`, which Anthropic documents for arguments that are no JSON.
    """
    if arguments is None:
        return msgspec.Raw(b"{}")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    if not text.strip():
        return msgspec.Raw(b"{}")
    raw = text.encode()
    if not bounds.is_too_much(raw) and not too_deep(raw, MAX_DEPTH - _AROUND):
        value = _decoded(raw)
        if isinstance(value, dict) and _wrapped(value) is None:
            return msgspec.Raw(raw)
    return as_raw({_INVALID: text})


def as_arguments(raw: bytes) -> str:
    """The arguments of an input, which is a JSON object: its own spelling without the white space."""
    if _INVALID.encode() in raw:
        text = _wrapped(_decoded(raw))
        if text is not None:
            return text
    return msgspec.json.format(raw, indent=-1).decode()


def _decoded(raw: bytes) -> Any:
    """None if it cannot be read."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _wrapped(value: Any) -> str | None:
    """The text of `{"INVALID_JSON": text}`, with nothing else in it."""
    text = value.get(_INVALID) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None


_BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a header into a block of the system text; it may change with every request."""

_CALL = 2
"""Of the ranks of what a reply holds, in the order of its generation: reasoning, text, calls."""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: Content


_MESSAGE = msgspec.json.Decoder(_Message)
_SYSTEM: msgspec.json.Decoder[Content | None] = msgspec.json.Decoder(Content | None)


class ToolChange(msgspec.Struct, frozen=True):
    """From a place in the messages on a tool is offered, or, unless `is_added`, withdrawn. It is named, or defined."""

    where: str
    tool: msgspec.Raw
    is_added: bool = True


class Conversation(msgspec.Struct, frozen=True):
    """Chat messages; `proofs` are those of their signatures, the newest last, `call_ids` those of calls and results.
    `is_prefill`: the last is an assistant's. `states` are those of their translation (`translated`)."""

    messages: list[msgspec.Raw]
    proofs: tuple[str, ...]
    call_ids: Sequence[str]
    is_prefill: bool
    tool_changes: Sequence[ToolChange]
    states: Sequence[State] = ()


def conversation(
    system: Sequence[str],
    raws: Sequence[msgspec.Raw],
    continued: ContinuedBody | None = None,
    *,
    keeps_states: bool = False,
) -> Conversation:
    """`system` are the texts of the system prompt, `continued` is what is known of the body.

    Raises InvalidRequest, which names the field, and Unsupported.
    """
    chat, states = translated(_Chat(), raws, continued, keeps_states=keeps_states)
    if not chat.has_begun:
        raise InvalidRequest("messages must have a user message")
    messages = chat.end()
    if text := "\n\n".join(filter(None, [*system, *chat.leading])):
        messages.insert(0, as_raw({"role": "system", "content": text}))
    is_prefill = chat.role == "assistant"
    return Conversation(messages, tuple(chat.proofs), chat.call_ids, is_prefill, chat.tool_changes, states)


def system_texts(raw: msgspec.Raw | None) -> list[str]:
    """The texts of the request's system prompt. Raises InvalidRequest."""
    return [] if raw is None else _system_texts(decode(_SYSTEM, raw, "system"), "system")


def _system_texts(content: Content | None, where: str) -> list[str]:
    """The texts of a system prompt; a block with a billing header is none of them."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = [text_of(block, at) for block, at in blocks_of(content, where)]
    return [text for text in texts if not text.startswith(_BILLING)]


class _Assistant:
    """What a reply held, possibly spread over several messages of the client."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def ranks(self) -> list[int]:
        """The ranks of its parts; an empty message counts as text."""
        parts = (self.reasoning, self.texts, self.calls)
        return [rank for rank, part in enumerate(parts) if part] or [_CALL - 1]

    def takes(self, other: _Assistant) -> bool:
        """May `other` be the rest of this reply?"""
        last, first = max(self.ranks), min(other.ranks)
        return first > last or first == last == _CALL

    def take(self, other: _Assistant) -> None:
        self.reasoning += other.reasoning
        self.texts += other.texts
        self.calls += other.calls

    def copy(self) -> _Assistant:
        made = _Assistant()
        made.take(self)
        return made

    def message(self) -> dict[str, Any]:
        text = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Chat:
    """Chat messages as they grow. Neighbouring messages of users become one, as the API says.

    `leading` are the texts of system messages before any other, `role` is that of the last message. `_is_silent`: the
    user has had a turn since the last reply, but nothing in it.
    """

    def __init__(self) -> None:
        self.proofs: list[str] = []
        self.call_ids: list[str] = []
        self.leading: list[str] = []
        self.tool_changes: list[ToolChange] = []
        self.role: str | None = None
        self._messages: list[msgspec.Raw] = []
        self._assistant: _Assistant | None = None
        self._parts = Parts()
        self._is_silent = False

    @property
    def has_begun(self) -> bool:
        return bool(self._messages or self._assistant or self._parts or self._is_silent)

    def copy(self) -> _Chat:
        made = _Chat()
        made.proofs, made.leading, made.role = self.proofs[:], self.leading[:], self.role
        made.call_ids, made.tool_changes = self.call_ids[:], self.tool_changes[:]
        made._messages, made._is_silent = self._messages[:], self._is_silent
        made._assistant = None if self._assistant is None else self._assistant.copy()
        made._parts = self._parts.copy()
        return made

    def read(self, index: int, raw: msgspec.Raw) -> None:
        where = f"messages[{index}]"
        if too_deep(bytes(raw)):
            raise InvalidRequest(f"{where} nests deeper than {MAX_DEPTH} levels")
        message = decode(_MESSAGE, raw, where)
        where += ".content"
        if message.role == "system":
            texts = self._system(message.content, where)
            if not self.has_begun:
                self.leading += texts
                return
            message.content = "\n\n".join(texts)
            if not message.content:
                return
        self.role = message.role
        if message.role == "assistant":
            self.add_assistant(message.content, where)
        else:
            self.add_user(message.content, where)

    def _system(self, content: Content, where: str) -> list[str]:
        """The texts of system instructions in the middle; a change of the tools is noted."""
        texts: list[Block] = []
        for block, at in blocks_of(content, where):
            if block.type in ("tool_addition", "tool_removal"):
                self.tool_changes.append(ToolChange(at, block.tool, block.type == "tool_addition"))
            elif block.type == "tool_definition":
                given = as_raw({"type": block.type, "definition": block.definition})
                self.tool_changes.append(ToolChange(at, given))
            else:
                texts.append(block)
        return _system_texts(texts, where)

    def end(self) -> list[msgspec.Raw]:
        self._end_assistant()
        self._end_user()
        return self._messages

    def add_user(self, content: Content, where: str) -> None:
        if self._assistant is not None or not self._messages:
            self._is_silent = True
        self._end_assistant()
        separator = "\n\n"
        for block, at in blocks_of(content, where):
            if block.type == "tool_result":
                self._end_parts()
                answered, parts = required(block.tool_use_id, f"{at}.tool_use_id"), Parts()
                self.call_ids.append(answered)
                for inner, inner_at in blocks_of(content_of(block.content, f"{at}.content"), f"{at}.content"):
                    parts.add(part_of(inner, inner_at), "\n")
                result: dict[str, Any] = {"role": "tool", "tool_call_id": answered, "content": parts.content()}
                self._append({**result, "is_error": True} if block.is_error else result)
            elif block.type == "mid_conv_system":
                for text in self._system(content_of(block.content, f"{at}.content"), f"{at}.content"):
                    self._parts.add({"type": "text", "text": text}, separator)
            else:
                self._parts.add(part_of(block, at), separator)
            separator = "\n"

    def add_assistant(self, content: Content, where: str) -> None:
        self._end_user()
        new = _Assistant()
        for block, at in blocks_of(content, where):
            match block.type:
                case "text":
                    new.texts.append(required(block.text, f"{at}.text"))
                case "thinking":
                    if thinking := required(block.thinking, f"{at}.thinking"):
                        new.reasoning.append(thinking)
                    if proof := find_proof(block.signature or ""):
                        self.proofs.append(proof)
                case "tool_use":
                    new.calls.append(call := _call(block, at))
                    self.call_ids.append(call["id"])
                case "redacted_thinking":
                    pass
                case _:
                    raise unsupported("a block", block.type, at)
        if self._assistant is not None and self._assistant.takes(new):
            self._assistant.take(new)
        else:
            self._end_assistant()
            self._assistant = new

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(as_raw(message))
        self._is_silent = False

    def _end_assistant(self) -> None:
        if self._assistant is not None:
            self._messages.append(as_raw(self._assistant.message()))
            self._assistant = None

    def _end_parts(self) -> None:
        if self._parts:
            self._append({"role": "user", "content": self._parts.content()})
            self._parts = Parts()

    def _end_user(self) -> None:
        """A user who said nothing still had a turn."""
        self._end_parts()
        if self._is_silent:
            self._append({"role": "user", "content": ""})


def _call(block: Block, where: str) -> dict[str, Any]:
    call_id, name = required(block.id, f"{where}.id"), required(block.name, f"{where}.name")
    arguments = as_arguments(object_text(block.input, f"{where}.input"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
