"""A write may be done although its process was told that it failed: what the process remembers must not deny it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from app.domain.events import SessionConfig
from app.errors import SessionClosed, StoreUnavailable
from app.fleet.state import POLL_S
from app.sessions.lifecycle import NewSession
from app.store.dialect import Tx
from fault.modelled import SETTINGS, Engine, NoPool
from tests.tools.simulation import service
from tests.tools.simulation.store import MemoryDatabase, MemoryStore

T = TypeVar("T")


class DeafDatabase(MemoryDatabase):
    """SQLite whose answers to writes are lost while it `is_deaf`."""

    is_sqlite = True
    is_deaf = False

    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T:
        found = await super()._write(function, durable=durable, runs_inline=runs_inline)
        if self.is_deaf:
            raise StoreUnavailable("the answer was lost")
        return found


async def lease_left(incarnation: int) -> float | None:
    return None


def test_a_close_that_nobody_heard_of_is_known_to_the_next_read() -> None:
    asyncio.run(close_unheard())


async def close_unheard() -> None:
    store = MemoryStore()
    store.restart(time.time)
    database = DeafDatabase(store)
    number = await database.write(lambda tx: service.register(tx, "host", alone=True), durable=True)
    made = service.made(SETTINGS, database, Engine(), NoPool(), time.time, number, lease_left, POLL_S)
    await service.start(made)
    try:
        await made.sessions.create(NewSession("s", SessionConfig(rollback_window=1), None))
        database.is_deaf = True
        with pytest.raises(StoreUnavailable):
            await made.sessions.close("s")
        database.is_deaf = False
        with pytest.raises(SessionClosed):
            await made.sessions.require("s")
    finally:
        await made.stop()
        store.close()
