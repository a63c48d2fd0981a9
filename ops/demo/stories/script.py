"""A session as a script: what its agent is asked, what the engine answers, and what the tools return."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Hold = Literal["running", "stuck", "gated"]
"""A last turn that does not end: at the engine, at an engine that never answers, or at its adapter's gate."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with its result, which the environment has after `seconds`."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    seconds: float = 0.25


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `ask` is a user's message before it, `back` how many turns the agent takes back first.

    With a `fault` of the simulator that gives no reply, the turn commits nothing and the agent goes on. `fields` are
    more fields of its request, `sim` more of the simulator's instructions.
    """

    text: str = ""
    think: str = ""
    calls: Sequence[Call] = ()
    ask: str = ""
    back: int = 0
    fault: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    sim: Mapping[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Characters that the engine generates."""
        return len(self.text) + len(self.think) + sum(len(str(call.arguments)) for call in self.calls)


@dataclass(frozen=True, slots=True)
class Agent:
    """A branch with a name of its own: a sub-agent's task and what it does."""

    name: str
    system: str
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Session:
    """`create` is the body of `POST /sessions`. The `agents` run at once after the first of the `turns`.

    `compacted` are turns after the history was replaced by a summary. `notes` are annotations of the session,
    `verdicts` of its turns by number from 1, `columns` what is written on the sampled tokens.
    """

    create: Mapping[str, Any]
    system: str
    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    agents: Sequence[Agent] = ()
    compacted: Sequence[Turn] = ()
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    closes: bool = True
    hold: Hold | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Mapping[int, Any] = field(default_factory=dict)
    columns: Sequence[str] = ()

    @property
    def id(self) -> str:
        return str(self.create["session_id"])

    def request(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of a turn."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"model": "simulator", "messages": messages, "temperature": 1.0, **tools}


def tool(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    """A function whose parameters are all required; a property is its description."""
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def chance(*names: object) -> random.Random:
    """The same numbers for the same names."""
    return random.Random("/".join(map(str, names)))
