"""OpenAI Responses, as Codex and openai-agents speak it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.continued_body import ContinuedBody
from app.domain.events import History
from app.domain.request import ChatRequest
from app.protocols.base import CommittedReply, LiveRenderer, StoredTurn
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.responses.events import as_events, failed
from app.protocols.responses.live import LiveResponse
from app.protocols.responses.parse import parse_responses
from app.protocols.responses.reply import render
from app.protocols.responses.schema import EXAMPLE, REQUEST
from app.protocols.responses.stored import complete_request
from app.protocols.sse import KEEPALIVE


class Responses:
    name = "responses"
    route = "/v1/responses"
    is_native = False
    has_layouts = True
    history: History = "tree"
    keepalive = KEEPALIVE
    schema: Mapping[str, Any] = REQUEST
    example: Mapping[str, Any] = EXAMPLE

    def parse(self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
        return parse_responses(body, has_few_values, continued)

    def complete(self, request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
        return complete_request(request, turns)

    def reply(self, reply: CommittedReply) -> bytes:
        return render(reply)

    def events(self, reply: CommittedReply) -> bytes:
        return as_events(reply)

    def live(self, begun: CommittedReply) -> LiveRenderer:
        return LiveResponse(begun)

    def error(self, error: ErrorFields) -> bytes:
        return openai_error(
            msgspec.structs.replace(error, code="context_length_exceeded") if error.is_context else error
        )

    def error_event(self, error: ErrorFields) -> bytes:
        return failed(error)


PROTOCOL = Responses()
