"""A simulated API process: the same assembly as in `app.main`, over a store, an engine and a clock that are made up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from app.assembly import DRAIN_S, Assembly
from app.domain.fleet import Fleet
from app.errors import AppError
from app.fleet.engine_pool import EnginePool
from app.fleet.pauses import Pauses
from app.sessions.cache import SessionCache
from app.sessions.lifecycle import Sessions
from app.sessions.recovery import written
from app.settings import Settings
from app.store import incarnations
from app.turn.turns import Turns
from tests.tools.simulation import service
from tests.tools.simulation.database import Server, SimulatedDatabase
from tests.tools.simulation.engine import Engines, SimulatedEngine
from tests.tools.simulation.loop import Owner
from tests.tools.simulation.service import register
from tests.tools.simulation.weather import Weather
from workers import job
from workers.pool import Crashed, QueueFull

T = TypeVar("T")


class Disconnected(Exception):
    """The client's connection ended before an answer came."""


class SimulatedPool:
    """Where a process judges large replies; a job takes a moment, or two workers die over it."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self._rng = rng
        self._weather = weather

    async def run(self, work: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        await asyncio.sleep(self._rng.expovariate(200))
        if self._weather.is_bad and self._rng.random() < self._weather.workers_fail:
            raise Crashed([], 1.0) if self._rng.random() < 0.5 else QueueFull("1000 jobs wait for a worker already")
        return job.run(work, memoryview(b"".join(pieces)))


class Process:
    """One run of one API process, from `start` to `stop` or until it is killed."""

    def __init__(
        self,
        name: str,
        server: Server,
        engines: Engines,
        settings: Settings,
        poll_s: float,
        *,
        alone: bool,
        note: Callable[[str], None],
        fault: Callable[[str], None],
        is_gone: Callable[[int], bool],
    ) -> None:
        """`note` is told what happens, `fault` of an exception that is no answer.

        `is_gone` says of an incarnation whether it was on this host and its process is gone.
        """
        self.owner = Owner(name)
        self.name = name
        self.clock_offset_s = 0.0
        self.serving = False
        self.database = SimulatedDatabase(server, alone=alone)
        self._server = server
        self._engines = engines
        self._settings = settings
        self._poll_s = poll_s
        self._note = note
        self._fault = fault
        self._is_gone = is_gone
        self.incarnation = 0
        self.is_over = False
        self._connections: dict[asyncio.Future[Any], None] = {}
        server.loop.add_owner(self.owner)

    async def start(self) -> None:
        """In its own context. Raises AppError where the store is out of reach."""
        server, settings, database = self._server, self._settings, self.database
        loop, rng, weather = server.loop, server.rng, server.weather
        alone = database.is_sqlite
        self.incarnation = await database.write(lambda tx: register(tx, self.name, alone=alone), durable=True)
        self._service = Assembly(
            database=database,
            client=SimulatedEngine(rng, weather, self._engines, self._note, self._fault, self._is_shut),
            pool=SimulatedPool(rng, weather),
            settings=settings,
            clock=self.clock,
            incarnation=lambda: self.incarnation,
            lease_left=self._lease_left,
            poll_s=self._poll_s,
        )
        await service.start(self._service)
        self.serving = True
        self._note(f"{self.name} serves as incarnation {self.incarnation} from {loop.time():.3f}")

    async def _lease_left(self, incarnation: int) -> float | None:
        """As `Recovery.lease_left`, of the simulated processes."""
        lease_s = self._settings.lease_s
        found = await self.database.read(lambda c: incarnations.standing(c, incarnation, lease_s))
        if found.ended:
            return None
        if not self._is_gone(incarnation):
            return found.left
        await written(self.database, lambda tx: incarnations.end(tx, incarnation))
        return None

    def clock(self) -> float:
        """Seconds since the epoch, by this process's clock, which may be wrong."""
        return wall(self._server.loop.time()) + self.clock_offset_s

    async def stop(self) -> None:
        """An orderly end, in the order of `app.main`."""
        self.serving = False
        self._service.gates.stop()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=DRAIN_S)
        await service.stop(self._service)

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more, its connections end."""
        self.serving = False
        self.is_over = True
        self._server.loop.kill(self.owner)
        for connection in self._connections:
            if not connection.done():
                connection.set_exception(Disconnected("the server died"))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work of this process."""
        return self._server.loop.create_task(work, context=self.owner.context())

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]], sent: Callable[[T], None]) -> T:
        """A client's request: the answer once it is back. `sent` is told of it when the process lets it go.

        Raises what the process answers, and Disconnected.
        """
        await self._travel()
        if not self.serving:
            raise Disconnected("nobody listens")
        loop, world = self._server.loop, self._server.loop.world.context()
        answer: asyncio.Future[T] = loop.create_future()
        self._connections[answer] = None
        task = self.spawn(work())

        def done(task: asyncio.Task[T]) -> None:
            del self._connections[answer]
            error = Disconnected("the request was cancelled") if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, (AppError, Disconnected)):
                self._fault(f"{self.name} met {error!r}")
                error = Disconnected("an internal error")
            if error is None:
                sent(task.result())
            if answer.done():
                return
            if error is None:
                answer.set_result(task.result())
            else:
                answer.set_exception(error)

        task.add_done_callback(done, context=world)
        found = await answer
        await self._travel()
        if self._server.happens(self._server.weather.reply_lost):
            raise Disconnected("the reply was lost")
        return found

    def _is_shut(self, adapter: str | None) -> bool:
        return self.fleet.is_shut(adapter)

    @property
    def turns(self) -> Turns:
        return self._service.turns

    @property
    def sessions(self) -> Sessions:
        return self._service.sessions

    @property
    def cache(self) -> SessionCache:
        return self._service.cache

    @property
    def pauses(self) -> Pauses:
        return self._service.pauses

    @property
    def engine_pool(self) -> EnginePool:
        return self._service.engine_pool

    @property
    def fleet(self) -> Fleet:
        """What the process knows of the fleet."""
        return self._service.fleet.fleet

    def snapshot(self, session_id: str) -> Coroutine[Any, Any, None]:
        """As `service.snapshot`."""
        return service.snapshot(self._service, session_id)

    async def _travel(self) -> None:
        await asyncio.sleep(self._server.rng.expovariate(1 / self._server.weather.network_s))


EPOCH_S = 1_750_000_000.0


def wall(seconds: float) -> float:
    """The true time of day at the loop's time `seconds`."""
    return EPOCH_S + seconds
