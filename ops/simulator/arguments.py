"""Draws tool arguments that fit a JSON schema from a seeded generator."""

from __future__ import annotations

import random
from typing import Any

from ops.simulator.tokenizer import WORDS

_EXOTIC = ("Zürich", "東京 🚀", 'a "quoted" word', "line\nbreak", "back\\slash", "мир")
_MAX_DEPTH = 6


def draw_arguments(schema: dict[str, Any] | None, rng: random.Random) -> dict[str, Any]:
    """An object that fits ``schema``, for the usual keywords.

    Supported: type, properties, required, enum, const, anyOf, oneOf, items, bounds of numbers, lengths, and local
    ``$ref``. Patterns and formats are ignored.
    """
    root = schema or {}
    value = _draw(root if "properties" in root or "$ref" in root else {"type": "object"}, root, rng, 0)
    return value if isinstance(value, dict) else {}


def _draw(schema: dict[str, Any], root: dict[str, Any], rng: random.Random, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        target: Any = root
        for step in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(step, {}) if isinstance(target, dict) else {}
        return _draw(target, root, rng, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            return _draw(rng.choice(schema[keyword]), root, rng, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties", {})
        return {
            name: _draw(part, root, rng, depth + 1)
            for name, part in properties.items()
            if name in required or rng.random() < 0.5
        }
    if kind == "array":
        low = int(schema.get("minItems", 0))
        count = rng.randint(low, max(low, min(int(schema.get("maxItems", low + 2)), low + 2)))
        return [_draw(schema.get("items", {}), root, rng, depth + 1) for _ in range(count)]
    if kind == "string":
        text = rng.choice(_EXOTIC) if rng.random() < 0.15 else " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
        while len(text) < int(schema.get("minLength", 0)):
            text += rng.choice(WORDS)
        return text[: schema.get("maxLength")]
    if kind in ("integer", "number"):
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0 if high is None else high - 100))
        high = low + 100 if high is None else high
        if kind == "number":
            return float(low + (high - low) * rng.uniform(0.01, 0.99))
        first, last = int(low) + ("exclusiveMinimum" in schema), int(high) - ("exclusiveMaximum" in schema)
        return rng.randint(first, max(first, last))
    return rng.random() < 0.5 if kind == "boolean" else None
