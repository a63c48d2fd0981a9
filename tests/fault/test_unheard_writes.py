"""A write may be done although its process was told that it failed: what the process remembers must not deny it."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from app.domain.events import SessionConfig
from app.errors import SessionClosed, StoreUnavailable
from app.fleet.state import POLL_S
from app.services import Services
from app.sessions.lifecycle import NewSession
from app.settings import Settings
from app.store.dialect import Tx
from app.upstream.client import EngineClient
from tests.tools.simulation import service
from tests.tools.simulation.store import MemoryDatabase, MemoryStore
from workers.pool import Pool

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


class NoPool(Pool):
    def __init__(self) -> None:
        """Nothing is judged here."""

    async def stop(self, grace_s: float) -> None:
        return


async def lease_left(incarnation: int) -> float | None:
    return None


async def close(made: Services, database: DeafDatabase) -> None:
    database.hears = 0
    with pytest.raises(StoreUnavailable):
        await made.sessions.close("s")
    database.hears = sys.maxsize
    with pytest.raises(SessionClosed):
        await made.sessions.require("s")


async def erase(made: Services, database: DeafDatabase) -> None:
    await made.sessions.close("s")
    database.hears = 1  # that which frees chunks
    with pytest.raises(StoreUnavailable):
        await made.erasure.drop_content("s")
    database.hears = sys.maxsize
    entry = await made.cache.current("s")
    assert entry is not None
    assert entry.session.status == "erased"


@pytest.mark.anyio
@pytest.mark.parametrize("write", [close, erase])
async def test_what_nobody_heard_of_is_known_to_the_next_read(write: Callable[..., Awaitable[Any]]) -> None:
    store = MemoryStore()
    store.restart(time.time)
    database = DeafDatabase(store)
    number = await database.write(lambda tx: service.register(tx, "host", alone=True), durable=True)
    settings = Settings.model_construct(upstreams=("http://engine",), lease_s=3600.0)
    client = EngineClient(connect_timeout_s=1, timeout_s=1, max_bytes=1)
    made = service.made(settings, database, client, NoPool(), time.time, number, lease_left, POLL_S)
    await service.start(made)
    try:
        await made.sessions.create(NewSession("s", SessionConfig(rollback_window=1), None))
        await write(made, database)
    finally:
        await made.stop()
        await client.close()
        store.close()
