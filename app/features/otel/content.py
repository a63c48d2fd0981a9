"""Messages as the conventions' schema has them (`gen-ai-input-messages.json`, `gen-ai-output-messages.json`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec


def input_messages(messages: Iterable[bytes]) -> str:
    """A turn's new messages, as JSON; earlier ones are in the spans of the turns that it continues."""
    return _encoded([_message(msgspec.json.decode(raw)) for raw in messages])


def output_messages(message: bytes, finish_reason: str) -> str:
    """The sampled message, as JSON; of a completion it is the text alone."""
    value = msgspec.json.decode(message)
    given = value if isinstance(value, dict) else {"content": value}
    return _encoded([{**_message({"role": "assistant", **given}), "finish_reason": finish_reason}])


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [part]}
    parts: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        parts.append({"type": "reasoning", "content": reasoning})
    if isinstance(content, list):
        parts.extend(_part(part) for part in content)
    elif content is not None:
        parts.append({"type": "text", "content": content})
    parts.extend(_call(call) for call in message.get("tool_calls") or ())
    return {"role": role, "parts": parts}


def _part(part: Any) -> dict[str, Any]:
    """A part of another type than text stays as it is, which the schema allows."""
    if not isinstance(part, dict):
        return {"type": "text", "content": str(part)}
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text")}
    return {"type": "unknown", **part}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may write what is no JSON, or too deep: then it is the text.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
