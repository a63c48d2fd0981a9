"""``POST /v1/messages/count_tokens``, which both engines have: Anthropic's request as their own chat's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ops.simulator.template import Template
from ops.simulator.wire import BadRequest

Blocks = list[dict[str, Any]]


class Sent(Struct):
    """The fields of a request that make its prompt."""

    role: str
    content: str | Blocks


class AnthropicTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class CountRequest(Struct):
    """Body of the route."""

    model: str
    messages: list[Sent]
    system: str | Blocks = ""
    tools: list[AnthropicTool] = []


def count(template: Template, body: bytes) -> int:
    """The prompt's tokens. Raises BadRequest and msgspec's errors."""
    request = msgspec.json.decode(body, type=CountRequest)
    system = _text(request.system)
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        chat += _chat(message)
    tools = [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
        }
        for one in request.tools
    ]
    raw = Raw(msgspec.json.encode(tools)) if tools else Raw(b"")
    return template.prompt(template.read([Raw(msgspec.json.encode(one)) for one in chat], raw)).count


def _chat(message: Sent) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        thinking = "".join(one.get("thinking", "") for one in blocks if one.get("type") == "thinking")
        calls = [
            {"function": {"name": one["name"], "arguments": json.dumps(one["input"], ensure_ascii=False)}}
            for one in blocks
            if one.get("type") == "tool_use"
        ]
        return [{"role": "assistant", "content": _text(blocks), "reasoning_content": thinking, "tool_calls": calls}]
    if message.role not in ("user", "system"):
        raise BadRequest(f"unknown role {message.role[:40]!r}")
    results = [
        {"role": "tool", "content": _text(one.get("content", ""))} for one in blocks if one.get("type") == "tool_result"
    ]
    text = _text(blocks)
    return [*results, {"role": message.role, "content": text}] if text or not results else results


def _text(content: str | Blocks) -> str:
    return content if isinstance(content, str) else "".join(one.get("text", "") for one in content)
