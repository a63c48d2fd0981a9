"""What the policy learns: to call the right tool with the right argument, and to answer with what the tool said.

In a group of the kind `call` a rollout is one turn, the call. In a group of the kind `answer` the tool's result comes
back, and the second turn has to use it. All of it is a function of the run's seed and the group's number.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
Kind = Literal["call", "answer"]

ATTEMPTS = 8
"""Rollouts of a group."""

MAX_TOKENS = 40
"""Of a turn: a right call has about 20."""

NOUNS = {
    "weather": ("weather", "sky"),
    "time": ("time", "hour"),
    "crowd": ("crowd", "street"),
    "train": ("train", "railway"),
}
"""How a question names what each tool knows."""

CITIES = (
    *("Oslo", "Bergen", "Paris", "Lima", "Cairo", "Delhi"),
    *("Tokyo", "Turin", "Quito", "Perth", "Accra", "Hanoi"),
)
WORDS = (
    *("early", "late", "grey", "bright", "calm", "loud", "cold", "warm"),
    *("slow", "quick", "full", "empty", "dry", "wet", "new", "old"),
)
"""What a tool can say."""


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool(name) for name in NOUNS]


class Task(msgspec.Struct, frozen=True):
    """A group's task. `result` is what the right call gives."""

    group_id: str
    kind: Kind
    noun: str
    tool: str
    city: str
    result: str

    @property
    def question(self) -> Message:
        return {"role": "user", "content": f"The {self.noun} in {self.city}?"}


def task_of(seed: int, group: int) -> Task:
    """The task of the group with this number, counted from 0."""
    rng = random.Random(f"{seed}/{group}")
    tool, city = rng.choice(list(NOUNS)), rng.choice(CITIES)
    kind: Kind = "answer" if group % 2 else "call"
    noun = rng.choice(NOUNS[tool])
    return Task(f"task-{group}", kind, noun, tool, city, said(rng.random(), tool, city))


def said(salt: float, tool: str, city: str) -> str:
    """What a tool says of a city; with another salt, something else."""
    return random.Random(f"{salt}/{tool}/{city}").choice(WORDS)


def advance(task: Task, replies: Sequence[Message]) -> list[Message] | float:
    """The messages of the rollout's next turn, or its reward if it has ended.

    `replies` are the assistant's messages so far.
    """
    messages = [task.question]
    if not replies:
        return messages
    calls = replies[0].get("tool_calls") or []
    is_right = len(calls) == 1 and _is_call(calls[0], task)
    if task.kind == "call" or not calls:
        return float(is_right)
    if len(replies) > 1:
        words = [word for word in WORDS if word in str(replies[1].get("content")).split()]
        return float(is_right and words == [task.result])
    messages.append(replies[0])
    for call in calls:
        result = task.result if _is_call(call, task) else "unknown"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


def _is_call(call: Mapping[str, Any], task: Task) -> bool:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return False
    return (function["name"], arguments) == (task.tool, {"city": task.city})


def answer_of(city: str, result: str) -> str:
    """How an answer uses a tool's result."""
    return f"In {city} it is {result} now"


def digest(row: Mapping[str, Any]) -> str:
    """The SHA-256 of what a trainer takes from a row: token ids, loss mask and logprobs."""
    taken = [row["tokens"], row["loss_mask"], row["logprobs"]]
    return hashlib.sha256(json.dumps(taken).encode()).hexdigest()
