"""A conversation of the Messages API as chat messages.

What a turn's request becomes, with its reply behind it, must begin what the next turn's request becomes, or the session
would fork. So a message's translation depends on its neighbours only up to the next assistant message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from app.domain.known_body import ContinuedBody, State
from app.domain.proofs import find_proof
from app.domain.request import translated
from app.errors import InvalidRequest
from app.protocols.messages.content import (
    Block,
    Content,
    Parts,
    as_arguments,
    blocks_of,
    content_of,
    decode,
    object_text,
    part_of,
    required,
    text_of,
    unsupported,
)
from workers.parse_json import MAX_DEPTH, too_deep

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
    """Chat messages; `proofs` are those of their signatures, the newest last. `is_prefill`: the last is an
    assistant's. `states` are those of their translation (`translated`)."""

    messages: list[msgspec.Raw]
    proofs: tuple[str, ...]
    is_prefill: bool
    tool_changes: Sequence[ToolChange]
    states: Sequence[State] = ()


def conversation(
    system: msgspec.Raw | None,
    raws: Sequence[msgspec.Raw],
    continued: ContinuedBody | None = None,
    *,
    keeps_states: bool = False,
) -> Conversation:
    """`continued` is what is known of the body. Raises InvalidRequest, which names the field, and Unsupported."""
    texts = [] if system is None else _system_texts(decode(_SYSTEM, system, "system"), "system")
    chat, states = translated(_Chat(), raws, continued, keeps_states=keeps_states)
    if not chat.has_begun:
        raise InvalidRequest("messages must have a user's message")
    messages = chat.end()
    if text := "\n\n".join(filter(None, [*texts, *chat.leading])):
        messages.insert(0, _raw({"role": "system", "content": text}))
    return Conversation(messages, tuple(chat.proofs), chat.role == "assistant", chat.tool_changes, states)


def _system_texts(content: Content | None, where: str) -> list[str]:
    """The texts of a system prompt; a block with a billing header is none of them."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = [text_of(block, at) for block, at in blocks_of(content, where)]
    return [text for text in texts if not text.startswith(_BILLING)]


def _raw(message: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(message))


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
        made.tool_changes = self.tool_changes[:]
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
                given = _raw({"type": block.type, "definition": block.definition})
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
                self._append(_tool_message(block, at))
            elif block.type == "mid_conv_system":
                for text in self._system(content_of(block.content, f"{at}.content"), f"{at}.content"):
                    self._parts.add({"type": "text", "text": text}, separator)
            else:
                self._parts.add(part_of(block, at), separator)
            separator = "\n"

    def add_assistant(self, content: Content, where: str) -> None:
        self._end_user()
        new = self._assistant_of(content, where)
        if self._assistant is not None and self._assistant.takes(new):
            self._assistant.take(new)
        else:
            self._end_assistant()
            self._assistant = new

    def _assistant_of(self, content: Content, where: str) -> _Assistant:
        assistant = _Assistant()
        for block, at in blocks_of(content, where):
            match block.type:
                case "text":
                    assistant.texts.append(required(block.text, f"{at}.text"))
                case "thinking":
                    if thinking := required(block.thinking, f"{at}.thinking"):
                        assistant.reasoning.append(thinking)
                    if proof := find_proof(block.signature or ""):
                        self.proofs.append(proof)
                case "tool_use":
                    assistant.calls.append(_call(block, at))
                case "redacted_thinking":
                    pass
                case _:
                    raise unsupported("a block", block.type, at)
        return assistant

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(_raw(message))
        self._is_silent = False

    def _end_assistant(self) -> None:
        if self._assistant is not None:
            self._messages.append(_raw(self._assistant.message()))
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


def _tool_message(block: Block, where: str) -> dict[str, Any]:
    answered = required(block.tool_use_id, f"{where}.tool_use_id")
    parts = Parts()
    for inner, at in blocks_of(content_of(block.content, f"{where}.content"), f"{where}.content"):
        parts.add(part_of(inner, at), "\n")
    message: dict[str, Any] = {"role": "tool", "tool_call_id": answered, "content": parts.content()}
    return {**message, "is_error": True} if block.is_error else message


def _call(block: Block, where: str) -> dict[str, Any]:
    call_id, name = required(block.id, f"{where}.id"), required(block.name, f"{where}.name")
    arguments = as_arguments(object_text(block.input, f"{where}.input"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
