"""Who may say that another process is dead."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from helpers.log import opened
from helpers.store import Store, add_incarnation, end_incarnation, silence_incarnation

from app.domain.events import TurnAbandoned
from app.errors import StoreDamaged
from app.sessions.recovery import Recovery
from app.store.log import Appended
from app.store.log_turns import Busy, Claim, Known
from app.store.writer import Writer

pytestmark = pytest.mark.anyio

LEASE_S = 0.4


async def test_who_was_silent_himself_does_not_judge_others(store: Store) -> None:
    """A failover that takes longer than a lease must not end the turns of all who came through it."""
    recovery = Recovery(store.database, store.writer, lambda: store.me, LEASE_S, LEASE_S / 4, time.time)
    assert recovery.lease_to_judge_by() == LEASE_S
    other = await add_incarnation(store.database)
    await store.create("s", at=1.0)
    await store.claim("s", 1, incarnation=other)
    await silence_incarnation(store.database, other, 2 * LEASE_S)
    await asyncio.sleep(LEASE_S)
    claim = Claim("s", Known(2, 2.0, 0), 4.0, opened(1, 0, store.me), recovery.lease_to_judge_by())
    assert isinstance(await store.submit(claim), Busy)
    recovery.start()
    async with asyncio.timeout(60):
        while not isinstance((await store.log("s"))[-1].event, TurnAbandoned):
            await asyncio.sleep(LEASE_S / 8)
        while recovery.lease_to_judge_by() != LEASE_S:
            await asyncio.sleep(LEASE_S / 8)
    await recovery.stop()
    assert isinstance(await store.claim("s", 3, turn=1), Appended)


class Damaged:
    """A writer over a store with a damaged page in session a, which is the first."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def submit(self, operation: Any) -> Any:
        if operation.after < "a":
            raise StoreDamaged("a page")
        return await self._writer.submit(operation)


async def test_a_damaged_session_is_passed_over(store: Store) -> None:
    dead = await add_incarnation(store.database)
    for name in ("a", "b"):
        await store.create(name)
        await store.claim(name, 1, incarnation=dead)
    await end_incarnation(store.database, dead)
    damaged = cast(Writer, Damaged(store.writer))
    assert await Recovery(store.database, damaged, lambda: store.me, LEASE_S, LEASE_S, time.time)._sweep()
    assert [len(await store.open_turns(name)) for name in ("a", "b")] == [1, 0]
