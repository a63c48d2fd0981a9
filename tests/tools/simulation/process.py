"""A simulated API process: the services of `app.services`, over a store, an engine and a clock that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from app.domain.events import DEFAULT_RUN
from app.errors import AppError
from app.services import DRAIN_S
from app.sessions.recovery import written
from app.store import incarnations
from tests.tools.simulation import files, service
from tests.tools.simulation.bucket import URL, SimulatedBucket
from tests.tools.simulation.database import Server
from tests.tools.simulation.loop import Owner
from tests.tools.simulation.service import register
from tests.tools.simulation.staged import engine_of
from tests.tools.simulation.world import World
from workers import job
from workers.pool import Crashed, Pool, QueueFull

T = TypeVar("T")


class Disconnected(Exception):
    """The client's connection ended before an answer came."""


class Reset(Disconnected):
    """The process saw the connection end so, behind the reply that it had handed to the kernel."""

    def __init__(self, reply: Any) -> None:
        super().__init__("the connection was reset")
        self.reply = reply


class SimulatedPool(Pool):
    """Where a process judges large replies; a job takes a moment, or two workers die over it."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self, work: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        rng = self._world.rng
        await asyncio.sleep(rng.expovariate(200))
        if self._world.happens(self._world.weather.workers_fail):
            raise Crashed([], 1.0) if rng.random() < 0.5 else QueueFull("1000 jobs are already waiting for a worker")
        return job.run(work, memoryview(b"".join(pieces)))

    async def stop(self, grace_s: float) -> None:
        return


class Process:
    """One run of one API process, from `start` to `stop` or until it is killed."""

    def __init__(
        self, name: str, world: World, server: Server, poll_s: float, *, alone: bool, is_gone: Callable[[int], bool]
    ) -> None:
        """`is_gone` says of an incarnation whether it was on this host and its process is gone."""
        self.owner = Owner(name)
        self.name = name
        self.clock_offset_s = 0.0
        self.serving = False
        bucket = SimulatedBucket(world) if world.settings.payloads == URL else None
        self.database = server.database(name, alone=alone, bucket=bucket)
        self._world = world
        self._poll_s = poll_s
        self._is_gone = is_gone
        self.incarnation = 0
        self.is_over = False
        self._connections: dict[asyncio.Future[Any], None] = {}
        world.loop.add_owner(self.owner)

    async def start(self) -> None:
        """In its own context. Raises AppError where the store is out of reach."""
        world, database = self._world, self.database
        alone = database.is_sqlite
        url = None if database.bucket is None else URL
        self.incarnation = await database.write(lambda tx: register(tx, self.name, alone=alone, url=url), durable=True)
        self.service = service.made(
            world.settings,
            database,
            engine_of(world, lambda adapter: self.service.fleet.fleet.is_shut(DEFAULT_RUN, adapter, has_claim=True)),
            SimulatedPool(world),
            self.clock,
            self.incarnation,
            self._lease_left,
            self._poll_s,
        )
        files.keep_in_memory(self.service.features["archive"], world, self.name)
        await service.start(self.service)
        self.serving = True
        world.note(f"{self.name} serves as incarnation {self.incarnation} from {world.loop.time():.3f}")

    async def _lease_left(self, incarnation: int) -> float | None:
        """As `Recovery.lease_left`, of the simulated processes."""
        lease_s = self._world.settings.lease_s
        found = await self.database.read(lambda c: incarnations.standing(c, incarnation, lease_s))
        if found.ended:
            return None
        if not self._is_gone(incarnation):
            return found.left
        await written(self.database, lambda tx: incarnations.end(tx, incarnation))
        return None

    def clock(self) -> float:
        """Seconds since the epoch, by this process's clock, which may be wrong."""
        return wall(self._world.loop.time()) + self.clock_offset_s

    async def stop(self) -> None:
        """An orderly end. Raises AppError where the store cannot be told."""
        self.serving = False
        self.service.features["gates"].gates.stop()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=DRAIN_S)
        await self.service.stop()

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more, its connections end."""
        self.serving = False
        self.is_over = True
        self._world.loop.kill(self.owner)
        self.database.die()
        for connection in self._connections:
            if not connection.done():
                connection.set_exception(Disconnected("the server died"))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work of this process."""
        return self._world.loop.create_task(work, context=self.owner.context())

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]], sent: Callable[[T], None]) -> T:
        """A client's request: the answer once it is back. `sent` is told of it when the process lets it go.

        Raises what the process answers, and Disconnected.
        """
        await self._travel()
        if not self.serving:
            raise Disconnected("nobody listens")
        loop, world = self._world.loop, self._world.loop.world.context()
        answer: asyncio.Future[T] = loop.create_future()
        self._connections[answer] = None
        task = self.spawn(work())

        def done(task: asyncio.Task[T]) -> None:
            del self._connections[answer]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            is_cut = task.cancelled() and not self.serving  # A process that stops does not wait for ever.
            if error is not None and not is_cut and not isinstance(error, (AppError, Disconnected)):
                self._world.history.problem(f"{self.name} met {error!r}")
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
        if self._world.happens(self._world.weather.reply_lost):
            raise Disconnected("the reply was lost")
        if self.serving and self._world.happens(self._world.weather.reply_reset):
            raise Reset(found)
        return found

    async def _travel(self) -> None:
        await asyncio.sleep(self._world.rng.expovariate(1 / self._world.weather.network_s))


async def ordered(
    world: World,
    what: str,
    work: Callable[[Process], Coroutine[Any, Any, T]],
    sent: Callable[[T], None] = lambda _: None,
    patience_s: float = 60.0,
) -> T | None:
    """Order something of any process; None where it is not known to be done, which it may be all the same. `sent` is
    told of what the process answers, whether or not that comes."""
    process = world.pick()
    if process is None:
        return None
    world.note(f"{what}, by way of {process.name}")
    try:
        async with asyncio.timeout(patience_s):
            return await process.call(lambda: work(process), sent)
    except (AppError, Disconnected, TimeoutError) as error:
        world.note(f"{what}: {type(error).__name__} {error}")
        return None


EPOCH_S = 1_750_000_000.0


def wall(seconds: float) -> float:
    """The true time of day at the loop's time `seconds`."""
    return EPOCH_S + seconds
