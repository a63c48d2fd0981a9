"""The drill of claims that are let go: whoever was refused a turn, or was not told of its claim, is in nobody's way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from app.domain.events import SessionConfig
from app.errors import SessionBusy
from app.turn.in_flight import TurnReply
from tests.tools.simulation.client import Client, message_of
from tests.tools.simulation.database import MemoryServer
from tests.tools.simulation.spelling import Message

LET_GO = 0.25
"""How many schedules have this drill."""

REFUSED = ("no_ids", "nan")
"""Replies that are refused."""

FAULTS = ("500", "lost", *REFUSED)

ROUNDS = 2

DOWN_S, WRITTEN_S = 0.8, 2.5
"""How long nothing can be written, and within which it is written then: processes try again each second."""

NEAR_S = 0.01


class LetGoClient(Client):
    """Asks one process for one turn after the other, and fewer than all succeed."""

    def __init__(self, server: MemoryServer, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = server
        self._draws = random.Random(f"let go {seed}")

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1, on_abort="fail"))
        await self.turn()
        for _ in range(ROUNDS):
            await self._refused(self._draws.choice(FAULTS))
            process = self.asked
            if process is not None and not process.database.is_sqlite:
                await self._not_told()
        await self._refused_unwritten()

    async def _refused(self, how: str) -> None:
        """Another engine may be asked where one has given no answer."""
        messages, logical = self._new(self.messages)
        self._world.engines.ordered[self.session_id] = how
        await self._once(messages, logical, retry_count=0)
        self._world.must(not self._has_claim(), f"a turn was refused ({how}), and its claim is still there")
        reply = await self._once(messages, logical, retry_count=1)
        if reply is not None:
            self.messages = [*messages, message_of(reply)]

    async def _not_told(self) -> None:
        """The process hears nothing of its claim, and finds it as soon as it wants another."""
        messages, logical = self._new(self.messages)
        self._server.hides = self._has_claim
        await self._once(messages, logical, retry_count=0)
        self._server.hides = None
        reply = await self._once(messages, logical, retry_count=self._draws.choice((0, 1)))
        if reply is not None:
            self.messages = [*messages, message_of(reply)]

    async def _refused_unwritten(self) -> None:
        """That a reply was refused cannot be written yet, and is as soon as that is possible."""
        begun, before = self._world.engines.begun, self._world.engines.begun[self.session_id]
        self._world.engines.ordered[self.session_id] = self._draws.choice(REFUSED)
        asked = asyncio.create_task(self._once(*self._new(self.messages), retry_count=0))
        while begun[self.session_id] == before and not asked.done():
            await asyncio.sleep(NEAR_S)
        self._server.down_until = self._world.loop.time() + DOWN_S
        await asked
        await asyncio.sleep(DOWN_S + WRITTEN_S)
        self._world.must(not self._has_claim(), "a turn was refused while the database was down, and is open for good")

    async def _once(self, messages: list[Message], logical: str, *, retry_count: int) -> TurnReply | None:
        """Its reply, if it has one. Raises SessionClosed, SessionNotFound."""
        reply = await self.once(messages, logical, retry_count=retry_count)
        was_busy = isinstance(self.refused, SessionBusy)
        self._world.must(not was_busy, f"{self.name} was told of a turn that nobody is at")
        return reply

    def _has_claim(self) -> bool:
        return self._world.store.has_claim(self.session_id)
