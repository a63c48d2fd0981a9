"""The tools that the demo's agents offer to the model, and the code that runs their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from openai.types.chat import ChatCompletionToolUnionParam

BOILING_C: Mapping[str, float] = {"water": 100.0, "ethanol": 78.4, "acetone": 56.1, "mercury": 356.7}


def multiply(a: int, b: int) -> int:
    return a * b


def count_words(text: str) -> int:
    return len(text.split())


def boiling_point(substance: str) -> float:
    return BOILING_C[substance]


TOOLS: Mapping[str, Callable[..., object]] = {
    "multiply": multiply,
    "count_words": count_words,
    "boiling_point": boiling_point,
}


def _described(name: str, description: str, properties: dict[str, object]) -> ChatCompletionToolUnionParam:
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_FACTOR = {"type": "integer", "minimum": 2, "maximum": 99}

DESCRIPTIONS: tuple[ChatCompletionToolUnionParam, ...] = (
    _described("multiply", "The product of two integers.", {"a": _FACTOR, "b": _FACTOR}),
    _described("count_words", "How many words a text has.", {"text": {"type": "string"}}),
    _described(
        "boiling_point",
        "Boiling point at one atmosphere, in degrees Celsius.",
        {"substance": {"type": "string", "enum": list(BOILING_C)}},
    ),
)


def run(name: str, arguments: str) -> str:
    """Run a tool call; returns its result as text for the model. An invalid call returns an error as text."""
    try:
        wanted: dict[str, Any] = json.loads(arguments)
        return json.dumps({"result": TOOLS[name](**wanted)})
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
