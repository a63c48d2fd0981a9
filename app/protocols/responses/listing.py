"""The input items of a stored turn, for `GET …/responses/{id}/input_items`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.errors import InvalidRequest
from app.protocols.engine_reply import reasoning_of
from app.protocols.responses.items import BETWEEN_SYSTEM
from app.protocols.responses.reply import Item, call_item, message_item, read_echo, reasoning_item
from app.protocols.responses.tools import Named

Order = Literal["asc", "desc"]


def input_items(
    messages: Sequence[msgspec.Raw],
    proof: str,
    echo: bytes | None = None,
    order: Order = "desc",
    limit: int = 20,
    after: str | None = None,
) -> bytes:
    """The list object of a turn's request: `messages` are its chat messages, less the reply. Instructions are no item.

    Raises InvalidRequest for an `after` that is no item's id.
    """
    kept = read_echo(echo)
    items = [item for message in messages for item in _items(msgspec.json.decode(message), kept.named)]
    if items and kept.instructions and items[0].get("role") == "system":
        items = _without_instructions(items, kept.instructions)
    custom = {item["call_id"] for item in items if item["type"] == "custom_tool_call"}
    for index, item in enumerate(items):
        if item["type"] == "function_call_output" and item["call_id"] in custom:
            item["type"] = "custom_tool_call_output"
        item["id"] = f"{_PREFIXES.get(item['type'], 'item')}_{proof}_in{index}"
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise InvalidRequest("after names no input item of this response")
    start = 0 if after is None else names.index(after) + 1
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _without_instructions(items: list[Item], instructions: str) -> list[Item]:
    part = items[0]["content"][0]
    rest = part["text"].removeprefix(instructions).removeprefix(BETWEEN_SYSTEM)
    return [{**items[0], "content": [{**part, "text": rest}]}, *items[1:]] if rest else items[1:]


def _items(message: dict[str, Any], named: Mapping[str, Named]) -> list[Item]:
    role = message["role"]
    if role == "assistant":
        return _assistant(message, named)
    if role == "tool":
        output = _parts(message.get("content"))
        answer = output[0]["text"] if len(output) == 1 and "text" in output[0] else output
        called = message.get("tool_call_id")
        return [{"type": "function_call_output", "call_id": called, "output": answer, "status": "completed"}]
    kind = "user" if role not in ("system", "developer") else role
    return [{"type": "message", "role": kind, "status": "completed", "content": _parts(message.get("content"))}]


def _assistant(message: dict[str, Any], named: Mapping[str, Named]) -> list[Item]:
    items = [reasoning_item("", reasoning)] if (reasoning := reasoning_of(message)) else []
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    texts = "".join(part.get("text", "") for part in _parts(message.get("content")))
    if texts or not calls:
        items.append(message_item("", texts))
    return items + [call_item(call, "0", index, named) for index, call in enumerate(calls)]


def _parts(content: Any) -> list[Item]:
    """Chat content as input parts."""
    if not isinstance(content, list):
        return [{"type": "input_text", "text": content if isinstance(content, str) else ""}]
    return [_part(part) for part in content if isinstance(part, dict)]


def _part(part: dict[str, Any]) -> Item:
    image = part.get("image_url")
    if image is None:
        text = part.get("text")
        return {"type": "input_text", "text": text if isinstance(text, str) else ""}
    fields = image if isinstance(image, dict) else {"url": image}
    return {"type": "input_image", "image_url": fields.get("url"), "detail": fields.get("detail") or "auto"}
