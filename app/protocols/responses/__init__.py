"""OpenAI Responses, as Codex and openai-agents speak it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from app.protocols.base import COMMON, TEXT, Schema, WireProtocol, nullable
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.responses.parse import complete_request, parse_responses
from app.protocols.responses.reply import LiveResponse, as_events, failed, render_compacted, response_of

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


def _error(error: ErrorFields) -> bytes:
    return openai_error(msgspec.structs.replace(error, code="context_length_exceeded") if error.is_context else error)


RESPONSES = WireProtocol(
    name="responses",
    route="/v1/responses",
    parse=parse_responses,
    reply=lambda reply: msgspec.json.encode(response_of(reply)),
    events=as_events,
    live=LiveResponse,
    error=_error,
    error_event=failed,
    schema=REQUEST,
    example=EXAMPLE,
    complete=complete_request,
    has_layouts=True,
    history="tree",
)

COMPACTION = msgspec.structs.replace(
    RESPONSES,
    route="/v1/responses/compact",
    parse=functools.partial(parse_responses, compacts=True),
    reply=render_compacted,
    schema={
        **REQUEST,
        "title": "CompactionRequest",
        "description": "An OpenAI Responses request whose history is summarized.",
    },
)
"""A history's summary is a turn like any other; only its reply is spelled otherwise."""
