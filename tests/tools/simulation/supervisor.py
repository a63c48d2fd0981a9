"""The processes of a schedule: a supervisor starts each of them again, and a storm kills, freezes and cuts them off."""

from __future__ import annotations

import asyncio
from typing import Any

from app.errors import AppError
from app.store.dialect import WriteConflict
from tests.tools.simulation import checks
from tests.tools.simulation.database import Server
from tests.tools.simulation.drill import behind
from tests.tools.simulation.process import Process
from tests.tools.simulation.world import World

HOUR_S = 3600.0

STORM_S = 40.0
"""How long things go wrong at most; clients are mostly done before."""

STOP_S = 1200.0
"""Within which a process stops that is told to."""

LEARN_S = 120.0
"""Within which every process learns what the fleet's log says, once nothing fails any more."""

POLLS_S = (0.05, 1.0, 1.0, 1.0, 2.0, 2.0)
"""How often processes look at the fleet's log. Each look costs as much as ever, so most schedules have few."""


LOOKS_EVERY = 6
"""Mishaps between two looks at what is stored in the middle of everything."""


class Supervisor:
    """`alone`: one process has the database to itself. `mishaps` counts what the storm has done. Processes look at the
    fleet's log every `least_poll_s` at most."""

    def __init__(self, world: World, server: Server, *, alone: bool, least_poll_s: float) -> None:
        self.mishaps = 0
        self._world = world
        self._server = server
        self._rng = rng = world.rng
        self.is_alone = alone
        self._poll_s = max(rng.choice(POLLS_S), least_poll_s)
        self._processes: list[Process | None] = [None] * (1 if alone else rng.choice((2, 2, 3)))
        self._one_host = rng.random() < 0.3
        self._started: list[Process] = []

    def serving(self) -> list[Process]:
        return [process for process in self._processes if process is not None and process.serving]

    def pick(self) -> Process | None:
        """A process to ask; None where none serves."""
        serving = self.serving()
        return self._rng.choice(serving) if serving else None

    async def keep_all(self) -> None:
        for place, process in enumerate(self._processes):
            if process is None:
                await self._start(place)

    async def stop_all(self) -> None:
        for process in self._processes:
            if process is not None:
                await self._stop(process)

    async def all_agree(self) -> None:
        """Every process learns what the fleet's log says, though one may still wait for an answer from the storm."""
        world = self._world
        processes = [process for process in self._processes if process is not None]
        deadline = world.loop.time() + LEARN_S
        while late := behind(world.store, processes):
            await asyncio.sleep(self._poll_s)
            if world.loop.time() > deadline:
                world.history.problem(f"{late} did not learn within {LEARN_S:g} s what the fleet's log says")
                return

    async def kill_again(self, process: Process) -> None:
        """It dies, and another takes its place."""
        await self._kill(self._processes.index(process), process)

    async def storm(self) -> None:
        """Each schedule has some kinds of mishaps only: all of them together hide what one does."""
        rng, world = self._rng, self._world
        kinds: list[Any] = [self._kill, self._freeze, self._jump, self._lose_store, self._outage, self._restart]
        mishaps = rng.sample(kinds, rng.randint(0, len(kinds)))
        if not mishaps:
            return
        while world.weather.is_bad and world.loop.time() < STORM_S:
            await asyncio.sleep(rng.expovariate(1 / world.weather.mishap_s))
            place = rng.randrange(len(self._processes))
            process = self._processes[place]
            if process is not None and process.serving:
                self.mishaps += 1
                if self.mishaps % LOOKS_EVERY == 1:
                    checks.look(self._world.store, self._world.history)
                await rng.choice(mishaps)(place, process)

    async def _start(self, place: int) -> None:
        """As a supervisor does: again, until it runs."""
        while True:
            name = f"p{len(self._started) + 1}"
            process = Process(name, self._world, self._server, self._poll_s, alone=self.is_alone, is_gone=self._is_gone)
            self._started.append(process)
            self._processes[place] = process
            try:
                await process.spawn(process.start())
                return
            except (AppError, WriteConflict) as error:
                self._world.note(f"{process.name} could not start: {error}")
                process.kill()
            await asyncio.sleep(0.5)

    async def _kill(self, place: int, process: Process) -> None:
        self._world.note(f"{process.name} is killed")
        process.kill()
        await self._replace(place)

    async def _replace(self, place: int) -> None:
        self._processes[place] = None
        await asyncio.sleep(self._rng.choice((0.05, 2.0, 15.0)) * self._rng.random())
        await self._start(place)

    async def _restart(self, place: int, process: Process) -> None:
        self._world.note(f"{process.name} is stopped")
        await self._stop(process)
        await self._replace(place)

    async def _stop(self, process: Process) -> None:
        stopping = process.spawn(process.stop())
        await asyncio.wait({stopping}, timeout=STOP_S)
        if not stopping.done():
            self._world.history.problem(f"{process.name} did not stop")
        elif stopping.exception() is not None and not isinstance(stopping.exception(), (AppError, WriteConflict)):
            self._world.history.problem(f"{process.name} stopped with {stopping.exception()!r}")
        process.kill()

    async def _freeze(self, place: int, process: Process) -> None:
        seconds = self._rng.choice((0.5, 3.0, 20.0)) * self._rng.random()
        self._world.note(f"{process.name} is frozen for {seconds:.3f} s")
        process.owner.frozen_until = self._world.loop.time() + seconds

    async def _jump(self, place: int, process: Process) -> None:
        process.clock_offset_s += self._rng.choice((-HOUR_S, -1.0, 1.0, HOUR_S)) * self._rng.random()
        self._world.note(f"the clock of {process.name} is off by {process.clock_offset_s:.3f} s")

    async def _lose_store(self, place: int, process: Process) -> None:
        """A power cut; where the process has the store to itself it is on the same machine."""
        if self.is_alone:
            process.kill()
        self._world.history.crashes.append(self._world.loop.time())
        lost = self._server.crash(self._rng.random() * self._world.weather.down_s)
        self._world.note(f"the database crashes, {lost} transactions are gone")
        if self.is_alone:
            await self._replace(place)

    async def _outage(self, place: int, process: Process) -> None:
        seconds = self._rng.random() * self._world.weather.down_s
        self._world.note(f"the database cannot be reached for {seconds:.3f} s")
        self._server.down_until = self._world.loop.time() + seconds

    def _is_gone(self, incarnation: int) -> bool:
        """Can the others of its host tell that the process is gone?"""
        return self._one_host and any(one.is_over for one in self._started if one.incarnation == incarnation)
