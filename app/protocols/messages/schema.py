"""A Messages request in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.protocols.schema import COMMON, TEXT, Schema

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
