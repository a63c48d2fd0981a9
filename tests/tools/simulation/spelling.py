"""How clients spell their messages: what is sent means the same to the session's matcher, and rarely has the same
bytes. What messages mean is told here from the contract, not by the code under test."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.domain.events import Matcher
from app.turn.in_flight import InFlightTurn

Message = Mapping[str, Any]

THOUGHT = "<think>hm</think>"
"""What some replies begin with; a harness may leave it out, or move it."""

MATCHERS: tuple[Matcher, ...] = ("tolerant", "tolerant", "tolerant", "strict", "role_content_only")


def meaning(message: Message, matcher: Matcher = "tolerant") -> tuple[Any, ...]:
    """What two spellings of one message have in common."""
    if matcher == "strict":
        return (json.dumps(message, sort_keys=True),)
    text = _text(message.get("content")).strip()
    if matcher == "role_content_only":
        return message["role"], text
    calls = tuple(
        (call["id"], call["function"]["name"], json.dumps(_arguments(call), sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    return message["role"], spoken(text), calls, message.get("tool_call_id")


def spoken(text: str) -> str:
    """A reply's text without the thought before it."""
    return text.rpartition("</think>")[2].strip()


def results(history: Sequence[Message]) -> list[Message]:
    """What the tools answer to the calls at a history's end, if there are any; some have failed."""
    calls = (history[-1].get("tool_calls") or ()) if history else ()
    said = f"Exit code {len(history) // 2 % 2}\n"
    return [{"role": "tool", "tool_call_id": call["id"], "content": said + call["function"]["name"]} for call in calls]


class Asked(msgspec.Struct, frozen=True):
    """A request as its client meant it, and the bytes of its messages; `turn` knows which claim it got, if any."""

    turn: InFlightTurn
    messages: Sequence[Message]
    raws: Sequence[bytes]


class Spelling:
    """Drawn apart from all else in a schedule. `asked` is every request in the order in which they were sent."""

    def __init__(self, seed: int, *, is_plain: bool) -> None:
        """`is_plain`: each message is always spelled as it came, for the default matcher."""
        self.asked: list[Asked] = []
        self._rng = rng = random.Random(f"spelling {seed}")
        self._is_plain = is_plain
        self._changes = 0.0 if is_plain else rng.choice((0.0, 0.3, 0.9))
        self._styles = (rng.random(), rng.random())
        self._matchers: dict[str, Matcher] = {}

    def draw_matcher(self, session_id: str) -> Matcher:
        """That of a session that is yet to be created."""
        drawn: Matcher = "tolerant" if self._is_plain else self._rng.choice(MATCHERS)
        return self._matchers.setdefault(session_id, drawn)

    def fork(self, fork_id: str, source_id: str) -> None:
        """A fork has its source's matcher."""
        self._matchers[fork_id] = self.matcher(source_id)

    def matcher(self, session_id: str) -> Matcher:
        return self._matchers.get(session_id, "tolerant")

    def body(self, turn: InFlightTurn, messages: Sequence[Message], others: Mapping[str, Any]) -> bytes:
        """The body of a request, which is remembered."""
        style = self._rng.choice((*self._styles, self._rng.random()))
        raws = [self._spelled(message, self.matcher(turn.session_id), style) for message in messages]
        self.asked.append(Asked(turn, messages, raws))
        return msgspec.json.encode({"model": "simulated", "messages": [msgspec.Raw(raw) for raw in raws], **others})

    def _spelled(self, message: Message, matcher: Matcher, style: float) -> bytes:
        """In one style a message has the same bytes each time."""
        plain = msgspec.json.encode(message)
        rng = random.Random(style.hex().encode() + plain)
        if rng.random() >= self._changes:
            return plain
        fields = dict(message) if matcher == "strict" else _respelled(message, rng, leaves_out=matcher == "tolerant")
        if rng.random() < 0.5:
            fields = dict(reversed(fields.items()))
        return json.dumps(fields, indent=rng.choice((None, None, 1))).encode()


def _respelled(message: Message, rng: random.Random, *, leaves_out: bool) -> dict[str, Any]:
    """`leaves_out`: reasoning may be dropped or moved."""
    fields = {name: value for name, value in message.items() if value is not None}
    text = _text(fields["content"])
    if leaves_out and rng.random() < 0.5:
        fields.pop("reasoning_content", None)
        if (bare := spoken(text)) != text and rng.random() < 0.5:
            fields["reasoning_content"] = "hm"
        text = rng.choice((bare, text.replace("hm", "\nhm\n") + "\n"))
    middle = len(text) - len(spoken(text)) // 2  # Nobody cuts a thought's tags.
    parts = [{"type": "text", "text": part} for part in (text[:middle], text[middle:])]
    fields["content"] = rng.choice((text, f" {text}\n", parts))
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_call(call, rng) for call in calls]
    else:
        fields |= rng.choice(({}, {"tool_calls": []}, {"tool_calls": None, "refusal": None}))
    return fields


def _call(call: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same call, its arguments serialised again."""
    arguments = dict(reversed(_arguments(call).items())) if rng.random() < 0.5 else _arguments(call)
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, indent=rng.choice((None, 2)))}}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    read: dict[str, Any] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return read


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
