"""The drill of what was undone: the database crashes before a claim or a note is on disk, and what others write takes
its place in the log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from sqlalchemy import select

from app.domain.events import SessionConfig
from app.store.schema import open_turns
from tests.tools.simulation import fights
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.database import MemoryServer
from tests.tools.simulation.habits import Habits
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.tree_client import TreeClient
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
        asked = fights._new(first, first.messages)
        turn = asyncio.create_task(fights._send(first, *asked, None))
        await self._until(self._has_claim)
        self._crash()
        others = [_try(second.turn(tries=2))] if self._rng.random() < 0.7 else []
        if self._kind is TreeClient:
            others.append(_try(fights._send(first, *asked, None)))
        await asyncio.gather(turn, *others)

    async def _lose_note(self) -> None:
        """A process has noted that a reply was given again, and goes on where another one has assigned a reward."""
        first, second = self._clients
        await fights.again(first)
        await self._until(lambda: self._server.store.unsynced > 0)
        self._crash()
        await _try(second.insist(second._reward, 1))
        await fights._send(first, *fights._new(first, first.messages), None)

    def _has_claim(self) -> bool:
        query = select(open_turns.c.fence).where(open_turns.c.session_id == SESSION)
        return self._server.store.read(lambda connection: connection.execute(query).first()) is not None

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
