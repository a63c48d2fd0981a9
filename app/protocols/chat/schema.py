"""A chat completion's request in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from app.protocols.schema import COMMON, IDS, TEXT, Schema, nullable

_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": TEXT, "content": {}, "tool_calls": {}, "tool_call_id": {}, "name": {}},
    "required": ["role"],
}

REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "ChatRequest",
    "type": "object",
    "description": "An OpenAI chat request. Fields that Turnlog does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "messages": {
            "type": "array",
            "items": _MESSAGE,
            "minItems": 1,
            "description": "The whole history, and what is new.",
        },
        "tools": {"description": "For the engine; stored once a session."},
        "input_ids": {**nullable(IDS), "description": "The client's own prompt ids."},
    },
    "required": ["messages"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {"model": "simulator", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}
