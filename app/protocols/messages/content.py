"""Content of the Messages API and what it is in a chat: blocks, and a call's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from app.domain import bounds
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
    except msgspec.ValidationError as error:
        raise InvalidRequest(_at(str(error), where)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not a value that can be read") from error


def _at(fault: str, where: str) -> str:
    """msgspec's message with the place in the whole request."""
    matched = _FAULT.fullmatch(fault)
    what, path = (matched["what"], matched["path"] or "") if matched else (fault, "")
    missing = _MISSING.fullmatch(what)
    return (
        f"{where}{path}.{missing[1]} is missing" if missing else f"{where}{path}: {what[:1].lower()}{what[1:_LONGEST]}"
    )


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
            return {"type": "image_url", "image_url": {"url": _image_url(block, f"{where}.source")}}
        case "document":
            return {"type": "text", "text": _document(block, where)}
        case "tool_reference":
            return {"type": "tool_reference", "name": required(block.tool_name, f"{where}.tool_name")}
    raise unsupported("a block", block.type, where)


def _source(block: Block, where: str) -> _Source:
    return decode(_SOURCE, required(block.source or None, where), where)


def _image_url(block: Block, where: str) -> str:
    source = _source(block, where)
    if source.type == "url":
        return required(source.url, f"{where}.url")
    if source.type == "base64":
        kind = required(source.media_type, f"{where}.media_type")
        return f"data:{kind};base64,{required(source.data, f'{where}.data')}"
    raise unsupported("a source", source.type, where)


def _document(block: Block, where: str) -> str:
    """A document of text, with its title and context."""
    if is_given(block.citations) and decode(_CITATIONS, block.citations, f"{where}.citations").enabled:
        raise Unsupported(f"{where}.citations: an engine does not cite")
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
    return msgspec.Raw(raw if _returns(raw) else msgspec.json.encode({_INVALID: text}))


def as_arguments(raw: bytes) -> str:
    """The arguments of an input, which is a JSON object: its own spelling without the white space."""
    if _INVALID.encode() in raw:
        text = _wrapped(_decoded(raw))
        if text is not None:
            return text
    return msgspec.json.format(raw, indent=-1).decode()


def _returns(raw: bytes) -> bool:
    """Is it an object that every client can read, and that comes back as one?"""
    if bounds.is_too_much(raw) or too_deep(raw, MAX_DEPTH - _AROUND):
        return False
    value = _decoded(raw)
    return isinstance(value, dict) and _wrapped(value) is None


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
