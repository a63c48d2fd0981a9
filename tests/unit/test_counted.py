from __future__ import annotations

import time

import pytest
from helpers.store import Store, create

from app.sessions.figures import FRESH_S, CachedFigures
from app.store.database import Database
from app.store.dialect import StorePoints
from ops.server import reserve_port

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_figures_are_read_again_when_they_are_old(sqlite_store: Store) -> None:
    clock = Clock()
    counted = CachedFigures(sqlite_store.database, clock)
    first = await counted.now()
    assert first is not None
    assert (first.sessions, first.open_turns) == ({"open": 0, "closed": 0, "erased": 0, "undone": 0}, 0)
    assert first.bytes > 0
    await sqlite_store.submit(create("s"))
    assert await counted.now() is first
    clock.now += FRESH_S
    later = await counted.now()
    assert later is not None
    assert later.sessions == {"open": 1, "closed": 0, "erased": 0, "undone": 0}


async def test_who_asks_does_not_wait_for_a_database_that_is_away() -> None:
    owner = Clock()
    database = Database(f"postgresql+asyncpg://nobody@127.0.0.1:{reserve_port(owner)}/nothing", points=StorePoints())
    counted = CachedFigures(database, time.monotonic)
    assert await counted.now() is None
    assert not counted.is_up
    assert counted._reading is not None, "it did not wait until the database was given up"
    await counted.stop()
    await database.close()
