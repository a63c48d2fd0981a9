"""The drill of claims that were undone: the database crashes while turns are in flight, and others get their fences."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from app.domain.events import SessionConfig
from app.errors import AppError
from tests.tools.simulation import fights
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.database import MemoryServer
from tests.tools.simulation.habits import Habits
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.tree_client import TreeClient
from tests.tools.simulation.world import World

UNDONE = 0.4
"""How many schedules end with this drill, where a process does not die with its database."""

ROUNDS, RIVALS = 3, 2

CRASH_S = 0.12
"""Mean time between crashes; a turn takes about 0.3 s."""

Does = Callable[[Client], Coroutine[Any, Any, object]]


class UndoneDrill:
    """Rivals at all processes, each of which may have lost a claim whose fence is another's now."""

    def __init__(self, world: World, server: MemoryServer, seed: int) -> None:
        self._world = world
        self._server = server
        self._rng = random.Random(f"undone {seed}")
        kind = self._rng.choice((Client, TreeClient))
        self._config = SessionConfig(rollback_window=1, history=kind.history, on_abort="return")
        self._clients = [kind(world, f"undone{name}", "undone", Habits(loyalty=0.3)) for name in "ab"[:RIVALS]]
        in_order = world.theme == "fights" and not world.settings.replay
        self._does: Sequence[Does] = (fights.twice, fights.earlier, fights.back) if in_order else (_turn,)

    async def run(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        for client in self._clients:
            await client.join(self._config)
            await client.turn()
        weather = self._world.weather
        transaction_s, weather.transaction_s = weather.transaction_s, self._rng.choice((0.002, 0.05))
        crashing = asyncio.create_task(self._crash())
        try:
            await asyncio.gather(*map(self._fight, self._clients))
        finally:
            crashing.cancel()
            weather.transaction_s = transaction_s

    async def _fight(self, client: Client) -> None:
        for _ in range(ROUNDS):
            await asyncio.sleep(self._rng.expovariate(10.0))
            with contextlib.suppress(AppError, Disconnected, GaveUp, TimeoutError):
                await self._rng.choice(self._does)(client)

    async def _crash(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / CRASH_S))
            if self._server.store.unsynced:
                self._world.history.crashes.append(self._world.loop.time())
                lost = self._server.crash(0.0)
                self._world.note(f"the database crashes, {lost} transactions are gone")


async def _turn(client: Client) -> None:
    await client.turn(tries=3)
