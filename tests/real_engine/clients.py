"""Clients of a real engine: all they know of a session is what their SDK gave them, with its own retries."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from integration.stand import Stand
from openai import OpenAI

from app.domain.proofs import find_proof
from ops.engine.process import SERVED_AS
from tests.tools.real_engine import weather
from tests.tools.tito_check import tokenizers

QUESTIONS = 6
MOST_CALLS = 3
"""Of the tool, for one question: a tiny model may forget to answer."""

RETRIES = 30
"""More than a restart needs."""


class Client(ABC):
    """One session, each second turn of it a stream. `acknowledged` are the names of the replies that it got."""

    def __init__(self, stand: Stand, number: int, temperature: float = 1.0) -> None:
        self.talk = stand.talk()
        self.acknowledged: list[str] = []
        self.tool_calls = 0
        self._rng = random.Random(number)
        self._sdk = self._connected(f"{stand.server.base_url}{self.talk.path}")
        self._fields = {"model": SERVED_AS, "max_tokens": 150, "temperature": temperature}

    def _connected(self, url: str) -> Any:
        return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=RETRIES, timeout=60)

    def name_of(self, turn: int, said: weather.Message) -> str:
        """How this client knows the turn in which the engine said this."""
        name: str = said["id"]
        return name

    def run(self) -> None:
        with self._sdk:
            for number in range(QUESTIONS):
                city = self._rng.choice(weather.CITIES)
                self.ask(weather.question(city, aloud=self.thinks and number % 2 == 1), city)

    @abstractmethod
    def ask(self, question: weather.Message, city: str) -> None:
        """One question and all turns that it takes."""

    @property
    def thinks(self) -> bool:
        return True

    @property
    def streams(self) -> bool:
        return len(self.acknowledged) % 2 == 1


class ToolLoop(Client):
    """Asks, gives the tool's results and is answered; `messages` is the history as its protocol spells it."""

    def __init__(self, stand: Stand, number: int, temperature: float = 1.0) -> None:
        super().__init__(stand, number, temperature)
        self.messages: list[Any] = []

    def ask(self, question: weather.Message, city: str) -> None:
        self.messages.append(question)
        for _ in range(MOST_CALLS):
            calls = self.turn()
            if not calls:
                break
            self.messages += self.results({call: weather.result(self._rng, city) for call in calls})
            self.tool_calls += 1

    @abstractmethod
    def turn(self) -> list[str]:
        """One turn, which the history grows by: the ids of its calls."""

    @abstractmethod
    def results(self, told: dict[str, str]) -> list[Any]:
        """What the tool said, by the id of its call."""


class Chat(ToolLoop):
    """With `plain` no tool, no reasoning and no chance: then vLLM's rendering of its history is exact."""

    def __init__(self, stand: Stand, number: int, *, plain: bool = False) -> None:
        super().__init__(stand, number, 0.0 if plain else 1.0)
        self.plain = plain

    @property
    def thinks(self) -> bool:
        return not self.plain

    def turn(self) -> list[str]:
        asked: dict[str, Any] = {**self._fields, "messages": self.messages}
        if not self.plain:
            asked["tools"] = [weather.TOOL]
        if self.streams:
            with self._sdk.chat.completions.stream(**asked) as stream:
                for _ in stream:
                    pass
                reply: Any = stream.current_completion_snapshot  # Also of a reply that was cut at its length.
        else:
            reply = self._sdk.chat.completions.create(**asked)
        message = reply.choices[0].message
        self.acknowledged.append(reply.id)
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        return [call.id for call in message.tool_calls or ()]

    def results(self, told: dict[str, str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": call, "content": text} for call, text in told.items()]


class Translated(ToolLoop):
    """In a protocol that the engine does not speak: a reply's id is Turnlog's and names its turn."""

    def name_of(self, turn: int, said: weather.Message) -> str:
        return str(turn)

    def acknowledge(self, reply_id: str) -> None:
        proof = find_proof(reply_id)
        assert proof is not None, reply_id
        self.acknowledged.append(proof.partition("_")[0])


class Messages(Translated):
    """The anthropic package."""

    def _connected(self, url: str) -> Any:
        return Anthropic(base_url=url, api_key="unused", max_retries=RETRIES, timeout=60)

    def turn(self) -> list[str]:
        function = weather.TOOL["function"]
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        asked = {**self._fields, "messages": self.messages, "tools": [tool]}
        asked["extra_body"] = {"temperature": asked.pop("temperature")}  # the package no longer names it
        if self.streams:
            with self._sdk.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = self._sdk.messages.create(**asked)
        self.acknowledge(reply.id)
        self.messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
        return [block.id for block in reply.content if block.type == "tool_use"]

    def results(self, told: dict[str, str]) -> list[Any]:
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in told.items()]
        return [{"role": "user", "content": blocks}]


class Responses(Translated):
    """The openai package, with the whole history in each request."""

    def turn(self) -> list[str]:
        asked = {**self._fields, "input": self.messages, "tools": [{"type": "function", **weather.TOOL["function"]}]}
        asked["max_output_tokens"] = asked.pop("max_tokens")
        if self.streams:
            with self._sdk.responses.stream(**asked) as stream:
                reply = stream.get_final_response()
        else:
            reply = self._sdk.responses.create(**asked)
        self.acknowledge(reply.id)
        self.messages += [item.to_dict() for item in reply.output]
        return [item.call_id for item in reply.output if item.type == "function_call"]

    def results(self, told: dict[str, str]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": call, "output": text} for call, text in told.items()]


class Text(Client):
    """Completions whose prompt is text, which goes on behind each answer."""

    prompt = ""

    def ask(self, question: weather.Message, city: str) -> None:
        self.prompt += f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
        asked: dict[str, Any] = {**self._fields, "prompt": self.prompt}
        if self.streams:
            pieces: list[Any] = list(self._sdk.completions.create(**asked, stream=True))
        else:
            pieces = [self._sdk.completions.create(**asked)]
        self.acknowledged.append(pieces[0].id)
        self.prompt += "".join(piece.choices[0].text for piece in pieces if piece.choices) + "<|im_end|>\n"


class Ids(Client):
    """Completions whose prompt is ids: those of all replies, and what the client itself adds."""

    def __init__(self, stand: Stand, number: int, *, model: Path) -> None:
        super().__init__(stand, number)
        self._tokenizer = tokenizers.load(model)
        self.ids: list[int] = []

    def ask(self, question: weather.Message, city: str) -> None:
        added = [question] if self.ids else [{"role": "system", "content": "Be brief."}, question]
        text = self._tokenizer.apply_chat_template(added, add_generation_prompt=True, tokenize=False)
        self.ids += self._tokenizer.encode("\n" * bool(self.ids) + text, add_special_tokens=False)
        reply: Any = self._sdk.completions.create(**self._fields, prompt=self.ids)  # type: ignore[call-overload]
        self.acknowledged.append(reply.id)
        self.ids += reply.choices[0].token_ids
