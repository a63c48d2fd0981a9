"""A write may be done although its process was told that it failed: what the process remembers must not deny it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest

from app.domain.events import SessionConfig
from app.errors import SessionClosed, StoreUnavailable
from app.fleet.state import POLL_S
from app.services import Services
from app.sessions.lifecycle import NewSession
from app.store.dialect import Tx
from fault.modelled import SETTINGS, Engine, NoPool
from tests.tools.simulation import service
from tests.tools.simulation.store import MemoryDatabase, MemoryStore

T = TypeVar("T")


class DeafDatabase(MemoryDatabase):
    """SQLite that answers as many writes as it `hears`: those behind them are done, and their answers lost."""

    is_sqlite = True
    hears = sys.maxsize

    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T:
        found = await super()._write(function, durable=durable, runs_inline=runs_inline)
        self.hears -= 1
        if self.hears < 0:
            raise StoreUnavailable("the answer was lost")
        return found


async def lease_left(incarnation: int) -> float | None:
    return None


def test_a_close_that_nobody_heard_of_is_known_to_the_next_read() -> None:
    asyncio.run(close_unheard())


def test_so_is_an_erasure() -> None:
    asyncio.run(erase_unheard())


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[DeafDatabase, Services]]:
    """A process with one session, `s`."""
    store = MemoryStore()
    store.restart(time.time)
    database = DeafDatabase(store)
    number = await database.write(lambda tx: service.register(tx, "host", alone=True), durable=True)
    made = service.made(SETTINGS, database, Engine(), NoPool(), time.time, number, lease_left, POLL_S)
    await service.start(made)
    try:
        await made.sessions.create(NewSession("s", SessionConfig(rollback_window=1), None))
        yield database, made
    finally:
        await made.stop()
        store.close()


async def close_unheard() -> None:
    async with served() as (database, made):
        database.hears = 0
        with pytest.raises(StoreUnavailable):
            await made.sessions.close("s")
        database.hears = sys.maxsize
        with pytest.raises(SessionClosed):
            await made.sessions.require("s")


async def erase_unheard() -> None:
    async with served() as (database, made):
        await made.sessions.close("s")
        database.hears = 1  # that which frees chunks
        with pytest.raises(StoreUnavailable):
            await made.erasure.drop_content("s")
        database.hears = sys.maxsize
        entry = await made.cache.current("s")
        assert entry is not None
        assert entry.session.status == "erased"
