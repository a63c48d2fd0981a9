"""Random conversations: what a client adds, and what a policy answers, as a message and as the ids it sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Encode = Callable[[str], list[int]]

_TEXT = (
    "the file a line of code says that 42 is not 1,000.5 — naïve façade Übermut 北京 🙂 let's see; x_1 = f(y) {} [] "
    "look\tat it\n\nthen go on (if you can) 'quoted' \"twice\" and so on... ok? yes! no: maybe/never \\ back"
)
_PIECES = tuple(_TEXT.split(" "))


@dataclass(frozen=True)
class Kind:
    """What a family's template can render."""

    tools: bool
    reasoning: bool
    late_system: bool
    thinking_switch: bool
    end_tokens: tuple[str, str]
    """What a generation ends with: an answer, a call."""
    other_stop: str


@dataclass(frozen=True)
class Reply:
    """`how`: `whole`, `cut` (no end token) or `other_stop`."""

    message: Message
    ids: list[int]
    how: str


class Talk:
    """One conversation's random choices."""

    def __init__(self, rng: random.Random, kind: Kind) -> None:
        self._rng = rng
        self._kind = kind
        self.tools = [self._tool(number) for number in range(rng.randint(1, 3))] if self._with_tools() else None
        self.arguments: dict[str, Any] = {}
        if kind.thinking_switch and rng.random() < 0.4:
            self.arguments["enable_thinking"] = rng.random() < 0.5
        self._calls = 0

    def _with_tools(self) -> bool:
        return self._kind.tools and self._rng.random() < 0.7

    def text(self, most: int = 12) -> str:
        return " ".join(self._rng.choices(_PIECES, k=self._rng.randint(1, most))).strip()

    def opening(self) -> list[Message]:
        messages: list[Message] = []
        if self._rng.random() < 0.6:
            messages.append({"role": "system", "content": self.text()})
        messages.append(self._user())
        if self._rng.random() < 0.15:
            messages += [*self._injected(), self._user()]
        return messages

    def following(self, parent: Message) -> list[Message]:
        """What a client adds behind a reply: results of its calls or not, a question, messages it injects itself."""
        calls = parent.get("tool_calls") or []
        messages: list[Message] = []
        if calls and self._rng.random() < 0.9:
            messages += [self._result(call) for call in calls]
            if self._rng.random() < 0.75:
                return messages
        if self._rng.random() < 0.12:
            messages += self._injected()
        if self._kind.late_system and self._rng.random() < 0.1:
            messages.append({"role": "system", "content": self.text()})
        messages.append(self._user())
        return messages

    def reply(self, canonical: Callable[[Message], str | None], encode: Encode) -> Reply:
        """`canonical` gives what the template writes for a message behind the generation prompt, None if it cannot."""
        message = self.message()
        text = canonical(message)
        if text is None:
            message.pop("reasoning_content", None)
            text = canonical(message)
        if text is None:  # the generation prompt has begun the reasoning
            message["reasoning_content"] = self.text(40)
            text = canonical(message)
        assert text is not None
        ids = self._spelled(text, encode)
        chance = self._rng.random()
        if chance < 0.1 and len(ids) > 3:
            ids = ids[: self._rng.randint(1, len(ids) - 1)]
            return Reply({"role": "assistant"}, ids, "cut")
        if chance < 0.15:
            return Reply(message, [*ids, *encode(self._kind.other_stop)], "other_stop")
        end = self._kind.end_tokens[1 if message.get("tool_calls") else 0]
        return Reply(message, [*ids, *encode(end)], "whole")

    def _injected(self) -> list[Message]:
        """An assistant message that the client wrote, with calls and their results or without."""
        if not self.tools or self._rng.random() < 0.5:
            return [{"role": "assistant", "content": self.text()}]
        calls = [self._call() for _ in range(self._rng.randint(1, 2))]
        return [{"role": "assistant", "content": None, "tool_calls": calls}, *map(self._result, calls)]

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text(30)}
        if self._kind.reasoning and self._rng.random() < 0.6:
            message["reasoning_content"] = self.text(40)
        if self.tools and self._rng.random() < 0.5:
            message["tool_calls"] = [self._call() for _ in range(self._rng.randint(1, 3))]
            if self._rng.random() < 0.4:
                message["content"] = None
        return message

    def _spelled(self, text: str, encode: Encode) -> list[int]:
        """The text's ids, in one case of four cut up as no tokenizer would: policies do sample such sequences."""
        if self._rng.random() < 0.75:
            return encode(text)
        at = self._rng.randint(0, len(text))
        return encode(text[:at]) + encode(text[at:])

    def _user(self) -> Message:
        if self._rng.random() < 0.2:
            parts = [{"type": "text", "text": self.text()} for _ in range(self._rng.randint(1, 3))]
            return {"role": "user", "content": parts}
        return {"role": "user", "content": self.text(40)}

    def _call(self) -> Message:
        assert self.tools is not None
        self._calls += 1
        name = self._rng.choice(self.tools)["function"]["name"]
        arguments = {f"p{number}": self._value() for number in range(self._rng.randint(0, 3))}
        text = json.dumps(arguments, separators=self._rng.choice([(",", ":"), (", ", ": ")]))
        function = {"name": name, "arguments": text}
        return {"id": f"call_{self._calls}", "index": None, "type": "function", "function": function}

    def _value(self) -> Any:
        return self._rng.choice([self.text(3), 7, [1, "two", None], {"a": True, "b": {"c": 1}}, ""])

    def _result(self, call: Mapping[str, Any]) -> Message:
        content: Any = self.text(20)
        if self._rng.random() < 0.2:
            content = [{"type": "text", "text": self.text()}, {"type": "text", "text": self.text()}]
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    def _tool(self, number: int) -> Message:
        function: Message = {"name": f"tool_{number}", "description": self.text(6)}
        if self._rng.random() < 0.8:
            function["parameters"] = {"type": "object", "properties": {"p0": {"type": "string"}, "p1": {}}}
        if self._rng.random() < 0.3:
            function["strict"] = True
        items = list(function.items())
        self._rng.shuffle(items)
        return {"type": "function", "function": dict(items)}
