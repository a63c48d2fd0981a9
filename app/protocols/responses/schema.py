"""A Responses request in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from app.protocols.schema import COMMON, TEXT, Schema, nullable

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
