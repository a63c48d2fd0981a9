"""Content blocks, and what they are in a chat: parts of text and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest, Unsupported
from app.protocols.messages.reading import decode, is_given, required

NOTHING = msgspec.Raw(b"")

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
    input: msgspec.Raw = NOTHING
    content: msgspec.Raw = NOTHING
    source: msgspec.Raw = NOTHING
    citations: msgspec.Raw = NOTHING


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
