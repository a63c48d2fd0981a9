"""Parts of the requests' JSON schemas that several protocols share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ONE: Schema = {"const": 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


COMMON: Mapping[str, Schema] = {
    "model": {"description": "For the engine; a known adapter's name makes it the turn's adapter."},
    "stream": {
        **nullable({"type": "boolean"}),
        "description": "The committed reply as events, sent together; until then the stream is kept alive.",
    },
    "stream_mode": {
        **nullable({"enum": ["whole", "live"]}),
        "description": "`live`: deltas are sent as they are generated (docs/streaming.md). By default the session's.",
    },
    "n": nullable(ONE),
    "lora_path": {"maxLength": 512, "description": "The turn's adapter; beside another of the session's: 400."},
    "nvext": {"description": "`session_control` is Turnlog's, docs/fleet.md; the rest goes to the engine."},
}
"""Fields that are not listed are passed to the engine unchanged."""
