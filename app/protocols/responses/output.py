"""A committed reply's message as output items, in their order: reasoning, message, calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.protocols.engine_reply import reasoning_of
from app.protocols.responses import ids
from app.protocols.responses.tools import Named

Item = dict[str, Any]

_INPUT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


def output_items(message: Mapping[str, Any], proof: str, named: Mapping[str, Named], encrypted: bool) -> list[Item]:
    """A reply without calls has a message, be it empty: a client that drops reasoning still returns something of it."""
    items: list[Item] = []
    if found := reasoning_of(message):
        items.append(reasoning_item(ids.REASONING + proof, found))
        if encrypted:
            items[-1]["encrypted_content"] = ids.ENCRYPTED + proof
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    content = message.get("content")
    if content or not calls:
        items.append(message_item(ids.MESSAGE + proof, content if isinstance(content, str) else ""))
    return items + [call_item(call, proof, index, named) for index, call in enumerate(calls)]


def reasoning_item(item_id: str, text: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def message_item(item_id: str, text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def call_item(call: Mapping[str, Any], proof: str, index: int, named: Mapping[str, Named]) -> Item:
    """`index`: its place among the calls. The arguments are the sampled text."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    flat, arguments = _text(function.get("name")), _arguments(function.get("arguments"))
    spelled = named.get(flat) or Named(flat)
    called = _text(call.get("id")) or f"call_{proof}_{index}"
    item: Item = {"call_id": called, "name": spelled.name}
    if spelled.namespace is not None:
        item["namespace"] = spelled.namespace
    if not spelled.is_custom:
        item_id = ids.call_id(ids.FUNCTION, proof, index)
        return {"id": item_id, "type": "function_call", **item, "arguments": arguments, "status": "completed"}
    given = _input_of(arguments)
    item_id = ids.call_id(ids.CUSTOM, proof, index, given is None)
    status = "completed"
    return {
        "id": item_id,
        "type": "custom_tool_call",
        **item,
        "input": arguments if given is None else given,
        "status": status,
    }


def _input_of(arguments: str) -> str | None:
    """A custom tool's input; None if the arguments are not an object with one text, `input`."""
    try:
        fields = _INPUT.decode(arguments)
        return _TEXT.decode(fields["input"]) if fields.keys() == {"input"} else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()
