"""Object storage that all processes of a simulation share: slow, sometimes out of reach, and sometimes done although
nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from app.errors import PayloadsUnavailable
from app.features.objects import objects
from app.features.objects.bucket import Bucket, BucketCounters
from app.features.objects.names import OWNER
from tests.tools.simulation.world import World

T = TypeVar("T")

URL = "s3://simulated"


class SimulatedBucket(Bucket):
    """One process's way to it. What is asked for happens whatever becomes of the process meanwhile."""

    def __init__(self, world: World) -> None:
        self.url = URL
        self.counters = BucketCounters()
        self.keeps_versions = False
        self._folder = None
        self._world = world
        self._objects = world.store.objects

    async def put(self, name: str, body: bytes) -> None:
        if await self._ask(lambda: self._objects.setdefault(name, body), self._world.weather.put_s) != body:
            raise PayloadsUnavailable(f"{name} belongs to another store")

    async def copy(self, source: str, target: str) -> None:
        def copy() -> None:
            if source in self._objects:
                self._objects[target] = self._objects[source]

        await self._ask(copy)

    async def read(self, name: str) -> bytes | None:
        return await self._ask(lambda: self._objects.get(name))

    async def list(self, folder: str | None = None) -> AsyncIterator[list[str]]:
        prefix = "" if folder is None else f"{folder}/"
        yield await self._ask(lambda: [name for name in self._objects if name.startswith(prefix)])

    async def delete(self, name: str) -> None:
        await self._ask(lambda: self._objects.pop(name, None))

    async def owner(self, name: str) -> str:
        return (await self._ask(lambda: self._objects.setdefault(OWNER, name.encode()))).decode()

    async def _ask(self, work: Callable[[], T], longer_s: float = 0.0) -> T:
        """Raises PayloadsUnavailable."""
        world, loop = self._world, self._world.loop
        answer: asyncio.Future[T] = loop.create_future()
        is_refused, is_lost = (world.happens(world.weather.engine_faults / 8) for _ in range(2))

        def settle(result: T | None) -> None:
            if answer.done():
                return
            if is_refused or is_lost:
                answer.set_exception(PayloadsUnavailable("the bucket does not answer"))
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def serve() -> None:
            result = None if is_refused else work()
            loop.call_later(delay(), settle, result)

        def delay() -> float:
            return world.rng.expovariate(1 / world.weather.network_s)

        loop.call_later(delay() + longer_s, serve, context=loop.world.context())
        return await answer


@contextlib.contextmanager
def large_from(size: int) -> Iterator[None]:
    """Chunks of at least so many bytes go to object storage: payloads are smaller here than real ones."""
    before, objects.SMALL_BYTES = objects.SMALL_BYTES, size
    try:
        yield
    finally:
        objects.SMALL_BYTES = before
