"""Processes that die while something is done which must come to its end all the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tests.tools.simulation.process import Process
from tests.tools.simulation.world import World

Kill = Callable[[Process], Awaitable[None]]

KILLS = (0, 1, 1, 2, 4)
"""How many processes die meanwhile."""

KILL_S = 0.02
"""Mean time between them: a restore of a schedule's few sessions takes about a tenth of a second."""


async def while_killed(world: World, rng: random.Random, kill: Kill, work: Awaitable[None]) -> None:
    """Nobody dies once it is done."""
    killing = asyncio.create_task(_die(world, rng, kill))
    await work
    await killing


async def _die(world: World, rng: random.Random, kill: Kill) -> None:
    for _ in range(rng.choice(KILLS)):
        await asyncio.sleep(rng.expovariate(1 / KILL_S))
        process = world.pick()
        if process is not None:
            await kill(process)
