"""A text completion's request in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from app.protocols.schema import COMMON, IDS, ONE, TEXT, Schema, nullable

_SINGLE: Schema = {"type": "array", "minItems": 1, "maxItems": 1}

REQUEST: Mapping[str, Schema | str | bool | list[str]] = {
    "title": "CompletionRequest",
    "type": "object",
    "description": "An OpenAI completions request. Fields that Turnlog does not know go to the engine as they are.",
    "properties": {
        **COMMON,
        "prompt": {
            "anyOf": [TEXT, IDS, {**_SINGLE, "items": TEXT}, {**_SINGLE, "items": IDS}],
            "description": "Text or ids; a list of one such prompt is that one.",
        },
        "best_of": nullable(ONE),
        "echo": nullable({"const": False}),
    },
    "required": ["prompt"],
    "additionalProperties": True,
}

EXAMPLE: Schema = {"model": "simulator", "prompt": "6 times 7 is", "max_tokens": 8}
