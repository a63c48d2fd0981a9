"""The drill of requests that come again: a process knows itself what it could not write down of a reply's delivery, and
what a dead one knew counts as not delivered."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from typing import Any

from app.domain.events import SessionConfig
from app.errors import AppError
from app.turn.in_flight import TurnReply
from tests.tools.simulation.client import TreeClient
from tests.tools.simulation.database import MemoryServer
from tests.tools.simulation.engine import LONG_S
from tests.tools.simulation.kills import Kill
from tests.tools.simulation.process import Disconnected, Process

REPEATS = 0.25
"""How many schedules have this drill."""

DOWN_S = 0.3
"""How long the database is down: shorter than a lease, and longer than the note of a delivery is tried."""

NOTED_S = 1.0
"""More than it takes until a delivery is written down."""

HOWS = ("unread", "read", "died", "alike")

NEAR_S = 0.05

DRAWS = 10
"""How often a process is drawn until it is not the one that another agent has asked."""


class RepeatingClient(TreeClient):
    """Says the same again, and knows what its process may know of the first time."""

    def __init__(self, server: MemoryServer, kill: Kill, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = server
        self._kill = kill
        self._draws = random.Random(f"repeats {seed}")
        self._is_unread = False

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1, history=self.history, on_abort="return"))
        await self.turn()
        for how in self._draws.sample(HOWS, 2):
            await getattr(self, f"_{how}")()
        await asyncio.sleep(NOTED_S)

    async def _unread(self) -> None:
        """Nobody has read the reply, which cannot be written down: whoever asks again, without a mark, is given it."""
        messages, logical = self._new(self.messages)
        self._is_unread = True
        first, process = await self.once(messages, logical), self.asked
        self._is_unread = False
        await asyncio.sleep(2 * DOWN_S)
        if first is not None and process is not None:
            again = await self.once(messages, logical)
            self._must_be(again, first, self.asked is process, "a reply that nobody has read was not given again")

    async def _read(self) -> None:
        """The reply was read: at the process that knows, a marked request for the same is another sample."""
        messages, logical = self._new(self.messages)
        first, process = await self.once(messages, logical), self.asked
        again = await self.once(messages, logical, retry_count=1)
        if first is not None and again is not None and self.asked is process:
            self._world.must(again.turn != first.turn, f"{logical}, which was read, was given again")

    async def _died(self) -> None:
        """Whether the reply was read, only the dead knew: whoever asks for the same is given it."""
        messages, logical = self._new(self.messages)
        if self.asked is not None:
            self.asked.clock_offset_s = 0.0
        first, process = await self.once(messages, logical), self.asked
        if first is None or process is None:
            return
        await self._kill(process)
        await asyncio.sleep(2 * self._world.settings.lease_s + 1.0)
        again = await self.once(messages, logical)
        self._must_be(again, first, True, "a reply that a dead process gave was not given again")

    async def _alike(self) -> None:
        """Another agent has asked the same of another process: a marked request does not wait for that."""
        messages, logical = self._new(self.messages)
        engines, before = self._world.engines, self._world.engines.begun[self.session_id]
        engines.ordered[self.session_id] = "slow"
        others = asyncio.create_task(_try(self._take(messages, logical, None, self._turn(None, "explorer"))))
        while engines.begun[self.session_id] == before and not others.done():
            await asyncio.sleep(NEAR_S)
        drawn = (self._world.pick() for _ in range(DRAWS))
        other = next((process for process in drawn if process is not None and process is not self.asked), None)
        if other is not None:
            self.go_to(other)
            asked_at = self._world.loop.time()
            await self.once(messages, logical, retry_count=1)
            took_s = self._world.loop.time() - asked_at
            self._world.must(took_s < LONG_S / 2, f"{logical} has waited {took_s:.1f} s for another agent's turn")
        await others

    def _must_be(self, again: TurnReply | None, first: TurnReply, counts: bool, what: str) -> None:
        if again is not None and counts:
            self._world.must(again.turn == first.turn, f"{what}: turn {first.turn}, then turn {again.turn}")

    def _tell(self, process: Process, reply: TurnReply, *, delivered: bool | None) -> None:
        if self._is_unread:
            self._server.down_until = self._world.loop.time() + DOWN_S
        super()._tell(process, reply, delivered=delivered and not self._is_unread)


async def _try(work: Awaitable[object]) -> None:
    with contextlib.suppress(AppError, Disconnected):
        await work
