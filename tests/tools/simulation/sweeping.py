"""What must hold of object storage once nothing fails: objects that no row names are deleted in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sqlalchemy import select

from app.features.objects.names import OWNER
from app.features.objects.objects import Objects
from app.store.content import is_live
from app.store.schema import chunks
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

LOOK_S = 2.0


async def swept(world: World, processes: Callable[[], Sequence[Process]]) -> None:
    """Nothing fails any more: what no row names is deleted in the end. Never ends where it is not."""
    while unnamed(world):
        for process in processes():
            objects: Objects = process.service.features["objects"]
            try:
                await process.call(objects.sweep, lambda _: None)
            except Disconnected:
                continue
        await asyncio.sleep(LOOK_S)


def unnamed(world: World) -> set[str]:
    """The objects that no row names."""
    named = world.store.read(lambda connection: connection.execute(select(chunks.c.location).where(is_live)).all())
    return world.store.objects.keys() - {row[0] for row in named} - {OWNER}


def objects_left(world: World) -> str:
    return f"objects that no row names were not deleted: {sorted(unnamed(world))}"
