"""What the tiny model is trained on, and is asked: the weather of a few cities, by way of a tool."""

from __future__ import annotations

import random
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}

CITIES = ("Oslo", "Bergen", "Paris", "Lima", "Cairo", "Delhi", "Tokyo", "Turin")
_SKIES = ("rain", "snow", "sun", "fog", "wind", "hail")
ADVICE = ("Take a coat.", "Take an umbrella.", "Stay inside.", "Go for a walk.", "Drink some water.", "Ask me again.")

Message = dict[str, Any]


def question(city: str, *, aloud: bool = False) -> Message:
    """`aloud`: the answer begins with reasoning, which Qwen3's chat template leaves out of later prompts."""
    return {"role": "user", "content": f"{'Think aloud: what' if aloud else 'What'} is the weather in {city}?"}


def result(rng: random.Random, city: str) -> str:
    """What the tool says."""
    return f"{rng.choice(_SKIES)} in {city}, {rng.randint(1, 30)} degrees"


def round_trip(rng: random.Random, *, with_tool: bool) -> list[Message]:
    """A question, the tool's call, its result and the answer. Much in it is up to chance: the model shall be unsure.

    Where no tool is offered the answer is made up.
    """
    city, aloud = rng.choice(CITIES), rng.random() < 0.5
    call = {"name": "weather", "arguments": f'{{"city": "{city}", "days": {rng.randint(1, 5)}}}'}
    told = result(rng, city)
    thought = f"<think>\n{rng.choice(ADVICE)}\n</think>\n\n" if aloud else ""
    asking = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": told},
    ]
    answer = {"role": "assistant", "content": f"{thought}The weather: {told}. {rng.choice(ADVICE)}"}
    return [question(city, aloud=aloud), *(asking if with_tool else ()), answer]


def output_of(message: Message) -> str:
    """What the model has to sample for an assistant's message, its end token included."""
    text: str = message["content"]
    for call in message.get("tool_calls", ()):
        one = call["function"]
        text += f'<tool_call>\n{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}\n</tool_call>'
    return text + "<|im_end|>"
