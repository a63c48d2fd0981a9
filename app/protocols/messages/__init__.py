"""Anthropic Messages: what Claude Code and the anthropic SDKs speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.events import History
from app.domain.known_body import ContinuedBody
from app.domain.request import ChatRequest, CompletionRequest
from app.protocols.base import COMMON, TEXT, CommittedReply, LiveRenderer, Schema, StoredTurn
from app.protocols.errors import ErrorFields
from app.protocols.messages.parse import parse_messages
from app.protocols.messages.reply import LiveMessage, as_message, as_stream, error_body
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


class Messages:
    name = "messages"
    route = "/v1/messages"
    methods: tuple[str, ...] = ("POST",)
    is_native = False
    gives_payloads = False
    has_layouts = True
    history: History = "tree"
    keepalive = event({"type": "ping"}, "ping")
    schema: Mapping[str, Any] = REQUEST
    example: Mapping[str, Any] = EXAMPLE

    def parse(
        self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
    ) -> ChatRequest | CompletionRequest:
        return parse_messages(body, has_few_values, continued)

    def complete(self, request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
        return request

    def reply(self, reply: CommittedReply) -> bytes:
        return msgspec.json.encode(as_message(reply))

    def events(self, reply: CommittedReply) -> bytes:
        return as_stream(as_message(reply))

    def live(self, begun: CommittedReply) -> LiveRenderer:
        return LiveMessage(begun)

    def error(self, error: ErrorFields) -> bytes:
        return error_body(error)

    def error_event(self, error: ErrorFields) -> bytes:
        return event(msgspec.Raw(error_body(error)), "error")
