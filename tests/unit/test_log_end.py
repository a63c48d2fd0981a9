"""The end of the log: one read for all who ask, and nothing given that a crash may take back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from app.errors import StoreUnavailable
from app.sessions.log_end import Ends, LogEnd
from app.store.database import Database
from app.store.feed import START, Position, Synced

pytestmark = pytest.mark.anyio

FAR_S = 1000.0


def place(number: int) -> Position:
    return Position(number, number)


class Log:
    """A database with a log of its own; each read waits until it may go on."""

    def __init__(self) -> None:
        self.last = place(1)
        self.log = Synced(0, 0, FAR_S)
        self.reads = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.fault: Exception | None = None

    async def read(self, function: Callable[..., Any]) -> Any:
        self.reads += 1
        await self.may_read.wait()
        if self.fault is not None:
            raise self.fault
        return self.last, self.log


def over(log: Log, poll_s: float = 0.0) -> LogEnd:
    return LogEnd(cast(Database, log), poll_s)


async def test_who_asks_at_once_shares_one_read() -> None:
    """Whoever goes away leaves it to the others; one that fails fails for all, and the next is another."""
    log = Log()
    end = over(log, FAR_S)
    log.may_read.clear()
    gone, *asked = (asyncio.create_task(end.now()) for _ in range(5))
    await asyncio.sleep(0)
    gone.cancel()
    log.may_read.set()
    assert await asyncio.gather(*asked) == [Ends(place(1), place(1))] * 4
    assert await end.now() == Ends(place(1), place(1))
    assert log.reads == 1
    await end.stop()
    end, log.fault = over(log), StoreUnavailable("away")
    for outcome in await asyncio.gather(*(end.now() for _ in range(3)), return_exceptions=True):
        assert isinstance(outcome, StoreUnavailable)
    log.fault = None
    assert (await end.now()).last == place(1)
    assert log.reads == 3


async def test_an_end_is_synced_once_the_log_is_on_the_disk_up_to_there() -> None:
    log = Log()
    end = over(log)
    found = []
    for number, written, synced in ((1, 10, 5), (2, 20, 9), (3, 30, 12), (4, 40, 20), (5, 50, 35), (6, 60, 60)):
        log.last, log.log = place(number), Synced(written, synced, FAR_S)
        found.append((await end.now()).synced)
    # The first end waits for byte 10, the third, which comes after it, for byte 30.
    assert found == [START, START, place(1), place(1), place(3), place(6)]


async def test_an_end_that_a_crash_undid_is_not_waited_for() -> None:
    """Its place may be another transaction's, which still runs."""
    log = Log()
    end = over(log)
    log.last, log.log = place(5), Synced(50, 40, FAR_S)
    await end.now()
    log.last, log.log = place(3), Synced(60, 55, FAR_S)
    assert await end.now() == Ends(place(3), START)
    log.log = Synced(70, 60, FAR_S)
    assert await end.now() == Ends(place(3), place(3))
    log.last = place(2)
    assert (await end.now()).synced == place(2)


async def test_an_end_is_synced_once_the_database_has_had_its_time() -> None:
    log = Log()
    log.log = Synced(10, 5, -1.0)
    assert await over(log).now() == Ends(place(1), place(1))
