"""Anthropic Messages: what Claude Code and the anthropic SDKs speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.protocols.base import COMMON, TEXT, Schema, WireProtocol
from app.protocols.messages.parse import parse_messages
from app.protocols.messages.reply import LiveMessage, as_message, error_body, error_event, events_of, named
from app.protocols.sse import event

_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role", "content"],
}

REQUEST: Mapping[str, Any] = {
    "title": "MessagesRequest",
    "type": "object",
    "description": "An Anthropic Messages request. Fields that the API does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "max_tokens": {"type": "integer", "minimum": 1},
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "description": "The whole history."},
        "system": {"description": "Text, or text blocks."},
        "tools": {"description": "Tools with an `input_schema`; stored once a session."},
    },
    "required": ["model", "max_tokens", "messages"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {
    "model": "simulator",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 6 times 7?"}],
}


MESSAGES = WireProtocol(
    name="messages",
    route="/v1/messages",
    parse=parse_messages,
    reply=lambda reply: msgspec.json.encode(as_message(reply)),
    events=lambda reply: named(events_of(as_message(reply))),
    live=LiveMessage,
    error=error_body,
    error_event=error_event,
    schema=REQUEST,
    example=EXAMPLE,
    gives_lists=False,
    has_layouts=True,
    history="tree",
    keepalive=event({"type": "ping"}, "ping"),
)
