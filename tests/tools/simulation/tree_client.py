"""A client of a tree of turns: several at once, from anywhere in it, and some of them once more."""

from __future__ import annotations

import asyncio
from typing import Any

from app.domain.events import History, SessionConfig
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.spelling import Message

AGENTS = (None, None, "explorer")

HOWS = ("on", "on", "fork", "fork", "root", "carry", "again", "again")
"""After the newest history, after any, at the beginning, there with another branch's reply, or a request once more."""


class TreeClient(Client):
    """`histories` are the messages after each turn that it was answered; the first is the beginning."""

    history: History = "tree"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.histories: list[list[Message]] = [[]]

    async def _step(self, config: SessionConfig) -> None:
        if self._rng.random() < 0.5:
            await super()._step(config)
            return
        branches = [self._branch(self._rng.choice(HOWS)) for _ in range(self._rng.choice((1, 2, 3, 6)))]
        for outcome in await asyncio.gather(*branches, return_exceptions=True):
            if isinstance(outcome, GaveUp):
                self._note(f"{self.name} does not know")
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _branch(self, how: str) -> None:
        """Raises as `turn`."""
        rng, agent, said = self._rng, self._rng.choice(AGENTS), None
        before = self.messages if how == "on" else rng.choice(self.histories)
        if how == "again" and len(before) > 1:
            before, said = before[:-2], before[-2]["content"]
        elif how == "carry":
            before = [{"role": "user", "content": "So far"}, *before[-1:]]
        elif how == "root":
            before = []
        self.messages = await self.turn_after(before, said, agent)
        self.histories.append(self.messages)
