"""Recorded runs of agent programs as a load.

They are of November 2026: what Claude Code 2.1, Codex 0.169, OpenCode 1.18, openai-agents 0.24 and mini-swe-agent 2.4,
behind Turnlog, had an engine sent as chat. All mended the same small program in ten steps. Of prompts and
descriptions of tools a file has only the lengths; words of the stand-in's vocabulary take their place.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.load import CHAT, REQUESTED_FIELDS, Wire
from ops.simulator.tokenizer import WORDS as VOCABULARY

FOLDER = Path(__file__).parent
WORDS = "$words"
"""The member of an object that stands for a text of so many characters."""

_encode = msgspec.json.encode


class Trace:
    """The requests of one session: each repeats the previous one, with the reply's own message in the recorded one's
    place. `turns` is how many were answered, and infinite after the last."""

    def __init__(self, tools: bytes, turns: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._left = list(turns)
        self._messages: list[bytes] = [_encode(message) for message in turns[0]["messages"]]
        self.turns: float = 0

    def body(self) -> tuple[bytes, ...]:
        """The next request's body, in pieces. It orders the recorded reply of the stand-in."""
        reply = self._left[0]["reply"]
        calls = reply.get("tool_calls", ())
        sim = {"text": reply.get("content", ""), "call_ids": [call["id"] for call in calls]}
        sim |= {"calls": [call["function"] for call in calls]} if calls else {"tool_calls": False}
        front = b'{"model":"simulator","sim":%b%b,"tools":%b,"messages":[' % (
            _encode(sim),
            REQUESTED_FIELDS,
            self._tools,
        )
        return (front, b",".join(self._messages), b"]}")

    def answered(self, message: bytes) -> None:
        """Add a reply's message, and what the program said next."""
        recorded = self._left.pop(0)["reply"].get("tool_calls", ())
        self.turns += 1
        if not self._left:
            self.turns = float("inf")
            return
        following = b",".join(map(_encode, self._left[0]["messages"]))
        made = msgspec.json.decode(message).get("tool_calls") or ()
        for ours, theirs in zip(recorded, made, strict=False):
            following = following.replace(_encode(ours["id"]), _encode(theirs["id"]))
        self._messages += [message, following]


class Traces:
    """Recorded runs, one after the other: a load's `Source`."""

    wire: Wire = CHAT
    is_known = False
    turns_per_session = 11
    """Of the longest."""

    def dialogues(self) -> Iterator[Trace]:
        """Raises OSError."""
        read = [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]
        traces = [_filled(trace, random.Random(0)) for trace in read]
        for trace in itertools.cycle(traces):
            yield Trace(_encode(trace["tools"]), trace["turns"])


def _filled(value: Any, rng: random.Random) -> Any:
    """With words in place of each length, and texts of several parts joined."""
    if isinstance(value, dict):
        if WORDS in value:
            return " ".join(rng.choices(VOCABULARY, k=value[WORDS] // 2))[: value[WORDS]]
        filled = {name: _filled(item, rng) for name, item in value.items()}
        if isinstance(filled.get("content"), list):
            filled["content"] = "".join(filled["content"])
        return filled
    return [_filled(item, rng) for item in value] if isinstance(value, list) else value
