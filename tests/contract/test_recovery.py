"""Who may say that another process is dead."""

from __future__ import annotations

import asyncio
import time

import pytest
from helpers.log import opened
from helpers.store import Store, add_incarnation, silence_incarnation

from app.domain.events import TurnAbandoned
from app.sessions.recovery import Recovery
from app.store.log import Appended
from app.store.log_turns import Busy, Claim, Known

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
    async with asyncio.timeout(10):
        while not isinstance((await store.log("s"))[-1].event, TurnAbandoned):
            await asyncio.sleep(LEASE_S / 8)
    assert recovery.lease_to_judge_by() == LEASE_S
    await recovery.stop()
    assert isinstance(await store.claim("s", 3, turn=1), Appended)
