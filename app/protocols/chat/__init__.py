"""OpenAI chat completions: the engines' own protocol, whose replies pass as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.continued_body import ContinuedBody
from app.domain.events import History
from app.domain.request import ChatRequest, CompletionRequest
from app.protocols.base import CommittedReply, LiveRenderer, StoredTurn
from app.protocols.chat.calls import with_given_ids
from app.protocols.chat.events import DONE, as_stream
from app.protocols.chat.live import LiveChat
from app.protocols.chat.parse import parse_chat
from app.protocols.chat.schema import EXAMPLE, REQUEST
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.sse import KEEPALIVE, event


class Chat:
    name = "chat"
    route = "/v1/chat/completions"
    is_native = True
    has_layouts = True
    history: History = "linear"
    keepalive = KEEPALIVE
    schema: Mapping[str, Any] = REQUEST
    example: Mapping[str, Any] = EXAMPLE

    def parse(
        self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
    ) -> ChatRequest | CompletionRequest:
        return parse_chat(body, has_few_values, continued)

    def complete(self, request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
        return request

    def reply(self, reply: CommittedReply) -> bytes:
        return with_given_ids(reply)

    def events(self, reply: CommittedReply) -> bytes:
        return as_stream(with_given_ids(reply))

    def live(self, begun: CommittedReply) -> LiveRenderer:
        return LiveChat(begun)

    def error(self, error: ErrorFields) -> bytes:
        return openai_error(error)

    def error_event(self, error: ErrorFields) -> bytes:
        return event(msgspec.Raw(openai_error(error))) + DONE


PROTOCOL = Chat()
