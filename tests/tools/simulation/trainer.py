"""Who changes weights and engines while clients are at work: a trainer that shuts gates, an operator of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from app.features.gates.pauses import Pauses
from tests.tools.simulation.process import Process, ordered
from tests.tools.simulation.world import World

ADAPTERS = ("a", "b")

STATES: tuple[Literal["serving", "draining"] | None, ...] = ("serving", "draining", None)
"""What an operator makes of an engine; None: it is removed."""

AGAIN_S = 0.5

Order = Callable[[Process], Coroutine[Any, Any, object]]


class Trainer:
    """Shuts and opens gates by way of any process; one that has died leaves its gates to their leases."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._weather = world.weather
        self._engines = world.settings.upstreams

    async def train(self) -> None:
        """While the weather is bad."""
        rng = self._rng
        while self._weather.is_bad:
            await asyncio.sleep(rng.expovariate(0.3))
            name = rng.choice((*ADAPTERS, None))
            lease_s = rng.choice((0.5, 5.0, 30.0))
            mode = rng.choice(("abort", "in_place"))
            for _ in range(rng.choice((1, 1, 2))):
                await self.order(f"pause {name or 'all'}", lambda p: pause(p, name, lease_s, mode))  # noqa: B023
            await asyncio.sleep(rng.expovariate(1.0))
            if rng.random() < 0.7:
                await self.order(f"resume {name or 'all'}", lambda p: resume(p, name))  # noqa: B023

    async def operate(self) -> None:
        """Take engines out and put them back, while the weather is bad."""
        while self._weather.is_bad:
            await asyncio.sleep(self._rng.expovariate(0.3))
            url = self._rng.choice(self._engines)
            how = self._rng.choice(STATES)
            if how is None:
                await self.order(f"remove {url}", lambda p: p.service.engine_pool.remove(url))  # noqa: B023
            else:
                await self.order(f"{url} is {how}", lambda p: p.service.engine_pool.put(url, how))  # noqa: B023

    async def put_back(self) -> None:
        """Every engine serves again. One that was paused when it was taken out has not heard that the others go on."""
        for url in self._engines:
            await self.insist(f"put {url}", lambda p: p.service.engine_pool.put(url, "serving"))  # noqa: B023
        await self.insist("resume all", lambda p: resume(p, None))

    async def insist(self, what: str, order: Order) -> None:
        """Until it is done."""
        done = await self.order(what, order)
        while not done:
            await asyncio.sleep(AGAIN_S)
            done = await self.order(what, order)

    async def order(self, what: str, order: Order) -> bool:
        """Was it done? What goes wrong is nothing to the one who ordered it: it may have been done all the same."""

        async def done(process: Process) -> bool:
            await order(process)
            return True

        return await ordered(self._world, what, done) is True


def pause(process: Process, name: str | None, lease_s: float, mode: Any = "abort") -> Coroutine[Any, Any, object]:
    """Shut the gate of an adapter, or of all."""
    pauses = _pauses(process)
    return pauses.pause_fleet(None, mode, lease_s) if name is None else pauses.pause_adapter(None, name, lease_s)


def resume(process: Process, name: str | None) -> Coroutine[Any, Any, object]:
    """Open it."""
    pauses = _pauses(process)
    return pauses.resume_fleet(None) if name is None else pauses.resume_adapter(None, name, None)


def _pauses(process: Process) -> Pauses:
    pauses: Pauses = process.service.features["gates"]
    return pauses
