"""Clients of a real engine: all they know of a session is what the OpenAI SDK gave them, with its own retries."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from integration.stand import Stand
from openai import OpenAI

from tests.tools.real_engine import weather
from tests.tools.real_engine.process import SERVED_AS
from tests.tools.tito_check import tokenizers

QUESTIONS = 6
MOST_CALLS = 3
"""Of the tool, for one question: a tiny model may forget to answer."""

RETRIES = 30
"""More than a restart needs."""


class Client(ABC):
    """One session, each second turn of it a stream. `acknowledged` are the engine's ids of the replies it got."""

    def __init__(self, stand: Stand, number: int, temperature: float = 1.0) -> None:
        self.talk = stand.talk()
        self.acknowledged: list[str] = []
        self.tool_calls = 0
        self._rng = random.Random(number)
        base_url = f"{stand.server.base_url}{self.talk.path}/v1"
        self._sdk = OpenAI(base_url=base_url, api_key="unused", max_retries=RETRIES, timeout=60)
        self._fields = {"model": SERVED_AS, "max_tokens": 150, "temperature": temperature}

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


class Chat(Client):
    """A tool loop; or, `plain`, no tool, no reasoning and no chance: then vLLM's rendering of its history is exact."""

    def __init__(self, stand: Stand, number: int, *, plain: bool = False) -> None:
        super().__init__(stand, number, 0.0 if plain else 1.0)
        self.plain = plain
        self.messages: list[Any] = []

    @property
    def thinks(self) -> bool:
        return not self.plain

    def ask(self, question: weather.Message, city: str) -> None:
        self.messages.append(question)
        for _ in range(MOST_CALLS):
            calls = self.turn().tool_calls or ()
            self.messages += [
                {"role": "tool", "tool_call_id": call.id, "content": weather.result(self._rng, city)} for call in calls
            ]
            if not calls:
                break
            self.tool_calls += 1

    def turn(self) -> Any:
        """One turn, which the history grows by: the assistant's message."""
        asked: dict[str, Any] = {**self._fields, "messages": self.messages}
        if not self.plain:
            asked["tools"] = [weather.TOOL]
        if self.streams:
            with self._sdk.chat.completions.stream(**asked) as stream:
                reply: Any = stream.get_final_completion()
        else:
            reply = self._sdk.chat.completions.create(**asked)
        message = reply.choices[0].message
        self.acknowledged.append(reply.id)
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        return message


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
