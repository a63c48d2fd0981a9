"""Random conversations: what a client adds, and what a policy answers."""

from __future__ import annotations

import json
import random
from typing import Any, Literal, get_args

Message = dict[str, Any]

What = Literal["plain", "cut", "thinking", "shuffled", "missing", "names"]
"""What is special about them: some answers are cut, thinking is switched between turns, results come in another order,
some are missing, or they name their tool."""

KINDS: tuple[What, ...] = get_args(What)

_TEXT = (
    "the file a line of code says that 42 is not 1,000.5 — naïve façade Übermut 北京 🙂 let's see; x_1 = f(y) {} [] "
    "look\tat it\n\nthen go on (if you can) 'quoted' \"twice\" and so on... ok? yes! no: maybe/never \\ back"
)
_PIECES = tuple(_TEXT.split(" "))


class Talk:
    """One conversation's random choices. `tools`: the template renders tools."""

    def __init__(self, rng: random.Random, what: What, *, tools: bool) -> None:
        self._rng = rng
        self._what = what
        with_tools = rng.random() < (0.6 if what == "plain" else 0.9)
        self.tools = [self._tool(number) for number in range(rng.randint(1, 3))] if tools and with_tools else None
        self._calls = with_tools
        self._count = 0

    def opening(self) -> list[Message]:
        messages = [self._user()]
        if self._rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": self.text()})
        return messages

    def arguments(self, before: dict[str, Any]) -> dict[str, Any]:
        if self._what != "thinking":
            return before
        thinks = self._rng.random() < 0.5
        return {"enable_thinking": thinks, "thinking": thinks}

    def following(self, answer: Message) -> list[Message]:
        """Results of the calls and at times a question; a question after an answer, seldom a system message."""
        results = [self._result(call) for call in answer.get("tool_calls") or []]
        if self._what == "shuffled":
            self._rng.shuffle(results)
        if self._what == "missing" and len(results) > 1:
            del results[self._rng.randrange(len(results))]
        chance = self._rng.random()
        if results and chance < 0.8:
            return results
        if chance > 0.97:
            results.append({"role": "system", "content": self.text()})
        return [*results, self._user()]

    def answer(self) -> tuple[Message, list[str]]:
        """The message, and words of which the last that is rendered ends its text, or its last call's arguments."""
        self._count += 1
        words = [f"text{self._count}ends", f"call{self._count}ends"]
        message: Message = {"role": "assistant", "content": f"{self.text(30)} {words[0]}"}
        if self._rng.random() < 0.4:
            message["reasoning_content"] = self.text(40)
        if self._calls and self._rng.random() < 0.6:
            most = 3 if self._what in ("plain", "shuffled", "missing", "names") else 1
            message["tool_calls"] = [self._call() for _ in range(self._rng.randint(1, most))]
            function = message["tool_calls"][-1]["function"]
            function["arguments"] = json.dumps({**json.loads(function["arguments"]), "last": words[1]})
            if self._rng.random() < 0.6:
                message["content"] = None
            else:
                message.pop("reasoning_content", None)  # gpt-oss takes one of both beside calls
        return message, words

    @property
    def cuts(self) -> bool:
        return self._what == "cut" and self._rng.random() < 0.5

    def text(self, most: int = 12) -> str:
        return " ".join(self._rng.choices(_PIECES, k=self._rng.randint(1, most))).strip()

    def _user(self) -> Message:
        if self._rng.random() < 0.2:
            parts = [{"type": "text", "text": self.text()} for _ in range(self._rng.randint(1, 3))]
            return {"role": "user", "content": parts}
        return {"role": "user", "content": self.text(40)}

    def _call(self) -> Message:
        name = self._rng.choice(self.tools)["function"]["name"] if self.tools else "tool_0"
        arguments = {f"p{number}": self._value() for number in range(self._rng.randint(0, 2))}
        text = json.dumps(arguments, separators=self._rng.choice([(",", ":"), (", ", ": ")]))
        function = {"name": name, "arguments": text}
        call_id = "".join(self._rng.choices("abcdefghij0123456789", k=9))  # as Mistral wants them
        return {"id": call_id, "index": None, "type": "function", "function": function}

    def _value(self) -> Any:
        return self._rng.choice([self.text(3), 7, [1, "two"], {"a": True, "b": {"c": 1}}, "x"])

    def _result(self, call: Message) -> Message:
        result: Message = {"role": "tool", "tool_call_id": call["id"], "content": self.text(20)}
        if self._rng.random() < 0.2:
            result["content"] = [{"type": "text", "text": self.text()}, {"type": "text", "text": self.text()}]
        if self._what == "names":
            result["name"] = call["function"]["name"]
        return result

    def _tool(self, number: int) -> Message:
        function: Message = {
            "name": f"tool_{number}",
            "description": self.text(6),
            "parameters": {"type": "object", "properties": {"p0": {"type": "string", "description": self.text(3)}}},
        }
        items = list(function.items())
        self._rng.shuffle(items)
        return {"type": "function", "function": dict(items)}
