"""Anthropic Messages: what Claude Code and the anthropic SDKs speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.continued_body import ContinuedBody
from app.domain.events import History
from app.domain.request import ChatRequest, CompletionRequest
from app.protocols.base import CommittedReply, LiveRenderer, StoredTurn
from app.protocols.errors import ErrorFields
from app.protocols.messages.errors import error_body
from app.protocols.messages.events import as_stream
from app.protocols.messages.live import LiveMessage
from app.protocols.messages.parse import parse_messages
from app.protocols.messages.reply import as_message
from app.protocols.messages.schema import EXAMPLE, REQUEST
from app.protocols.sse import event


class Messages:
    name = "messages"
    route = "/v1/messages"
    is_native = False
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


PROTOCOL = Messages()
