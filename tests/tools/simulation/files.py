"""The folder of the archives that all processes of a schedule share: its files are in memory, and it fails as a store
does, before or after what it was asked for is done."""

from __future__ import annotations

import asyncio
import itertools

from app.errors import PayloadsUnavailable
from app.features.archive.archive import Archive
from app.features.objects.bucket import Bucket
from tests.tools.simulation.world import World

FOLDER = "s3://archives"


class Files(Bucket):
    """What a process sees of it. A file that was put is durable."""

    is_folder = True

    def __init__(self, world: World) -> None:
        self.url = FOLDER
        self.keeps_versions = False
        self._world = world

    async def put(self, name: str, body: bytes) -> None:
        await self._way()
        if self._world.files.setdefault(name, body) != body:
            raise PayloadsUnavailable(f"{name} is there already")
        await self._way()

    async def read(self, name: str) -> bytes | None:
        await self._way()
        return self._world.files.get(name)

    async def size(self, name: str) -> int | None:
        body = await self.read(name)
        return None if body is None else len(body)

    async def delete(self, name: str) -> None:
        await self._way()
        self._world.files.pop(name, None)
        await self._way()

    async def _way(self) -> None:
        world = self._world
        await asyncio.sleep(world.rng.expovariate(1 / world.weather.network_s))
        if world.happens(world.weather.refused):
            raise PayloadsUnavailable(f"{FOLDER} does not answer")


def keep_in_memory(archive: Archive, world: World, process: str) -> None:
    """The archive's files are the schedule's, and their names follow from it."""
    bucket, numbers = Files(world), itertools.count(1)

    async def new_name() -> str:
        return f"{process}-{next(numbers)}.parquet"

    vars(archive).update(_bucket=lambda url: bucket, _new_name=new_name)
