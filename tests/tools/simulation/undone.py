"""The drill of what was undone: the database crashes before a claim or a note is on disk, and what others write takes
its place in the log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from app.domain.events import SessionConfig
from tests.tools.simulation.client import Client, GaveUp, TreeClient
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.database import MemoryServer
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

UNDONE = 0.4
"""How many schedules have this drill, where a process does not die with its database."""

ROUNDS = 2

LOOK_S, PATIENCE_S = 0.005, 2.0

SESSION = "undone"


class UndoneDrill:
    """Two clients, each at a process of its own, or both at one."""

    def __init__(self, world: World, server: MemoryServer, seed: int, processes: Callable[[], list[Process]]) -> None:
        self._world = world
        self._server = server
        self._processes = processes
        self._rng = random.Random(f"undone {seed}")
        self._kind = self._rng.choice((Client, TreeClient, TreeClient))
        self._clients = [self._kind(world, f"undone{name}", SESSION, Habits(loyalty=1.0)) for name in "ab"]

    async def run(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        config = SessionConfig(rollback_window=1, history=self._kind.history, on_abort="return")
        for client in self._clients:
            await client.join(config)
            await client.turn()
        for _ in range(ROUNDS):
            for client, process in zip(self._clients, self._two(), strict=True):
                client.go_to(process)
            await self._rng.choice((self._lose_claim, self._lose_claim, self._lose_note))()

    def _two(self) -> list[Process]:
        processes = self._processes()
        return [self._rng.choice(processes) for _ in "ab"] if self._rng.random() < 0.3 else self._apart(processes)

    def _apart(self, processes: list[Process]) -> list[Process]:
        return (self._rng.sample(processes, len(processes)) * 2)[:2]

    async def _lose_claim(self) -> None:
        """While a turn is generated another gets its fence; in a tree also the same request, at the same process."""
        first, second = self._clients
        asked = first._new(first.messages)
        turn = asyncio.create_task(first._send(*asked, None))
        await self._until(lambda: self._server.store.has_claim(SESSION))
        self._crash()
        others = [_try(second.turn(tries=2))] if self._rng.random() < 0.7 else []
        if self._kind is TreeClient:
            others.append(_try(first._send(*asked, None)))
        await asyncio.gather(turn, *others)

    async def _lose_note(self) -> None:
        """A process has noted that a reply was given again, and goes on where another one has assigned a reward."""
        first, second = self._clients
        await first.again()
        await self._until(lambda: self._server.store.unsynced > 0)
        self._crash()
        await _try(second.insist(second._reward, 1))
        await first._send(*first._new(first.messages), None)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Or for as long as it may take."""
        deadline = self._world.loop.time() + PATIENCE_S
        while not is_so() and self._world.loop.time() < deadline:
            await asyncio.sleep(LOOK_S)

    def _crash(self) -> None:
        self._world.history.crashes.append(self._world.loop.time())
        lost = self._server.crash(0.0)
        self._world.note(f"the database crashes, {lost} transactions are gone")


async def _try(work: Awaitable[object]) -> None:
    try:
        await work
    except (GaveUp, Disconnected):
        return
