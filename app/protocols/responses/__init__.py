"""OpenAI Responses, as Codex and openai-agents speak it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.events import History
from app.domain.known_body import ContinuedBody
from app.domain.request import ChatRequest
from app.protocols.base import COMMON, TEXT, CommittedReply, LiveRenderer, Schema, StoredTurn, nullable
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.responses.parse import complete_request, parse_responses
from app.protocols.responses.reply import LiveResponse, as_events, failed, render, render_compacted
from app.protocols.sse import KEEPALIVE

REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "ResponsesRequest",
    "type": "object",
    "description": "An OpenAI Responses request. Fields that Turnlog does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "input": {
            "anyOf": [{**TEXT, "minLength": 1}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
            "description": "A user's text, or items: the whole history and what is new.",
        },
        "instructions": {**nullable(TEXT), "description": "The beginning of the system message."},
        "previous_response_id": {
            **nullable(TEXT),
            "description": "A response of this session, whose history the input continues.",
        },
        "tools": {
            **nullable({"type": "array", "items": {"type": "object"}}),
            "description": "Functions, namespaces and custom tools.",
        },
        "store": {**nullable({"type": "boolean"}), "description": "false: `GET` does not find the response."},
        "truncation": nullable({"const": "disabled"}),
        "background": nullable({"const": False}),
    },
    "required": ["input"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {"model": "simulator", "input": "What is 6 times 7?"}


class Responses:
    name = "responses"
    route = "/v1/responses"
    methods: tuple[str, ...] = ("POST",)
    is_native = False
    gives_payloads = False
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


class Compaction(Responses):
    """A history's summary is a turn like any other; only its reply is spelled otherwise."""

    route = "/v1/responses/compact"
    schema: Mapping[str, Any] = {
        **REQUEST,
        "title": "CompactionRequest",
        "description": "An OpenAI Responses request whose history is summarized.",
    }

    def parse(self, body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
        return parse_responses(body, has_few_values, continued, compacts=True)

    def reply(self, reply: CommittedReply) -> bytes:
        return render_compacted(reply)
