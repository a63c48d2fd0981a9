"""What a process writes down of the delivery of its replies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.domain.events import ReplyRedelivered, ReplyUndelivered
from app.turn.retries import Retries

pytestmark = pytest.mark.anyio

UNKNOWN, AGAIN = ReplyUndelivered(1, is_unknown=True), ReplyRedelivered(1)


class SlowWriter:
    """Whose first operation takes long."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.may_end = asyncio.Event()

    async def submit(self, operation: Any) -> None:
        self.begun.append(operation.event)
        await self.may_end.wait()


async def test_a_reset_is_written_behind_the_replay_that_it_cut() -> None:
    """The log says of an earlier replay that its reset is known; it would say of this one that it was delivered."""
    leaf, told = SimpleNamespace(number=1), {1: None}
    cache = SimpleNamespace(known=lambda name: SimpleNamespace(leaf=leaf, is_tree=True, deliveries=told))
    writer, none = SlowWriter(), cast(Any, None)
    retries = Retries(
        cache=cast(Any, cache),
        writer=cast(Any, writer),
        followers=none,
        clock=lambda: 0.0,
        incarnation=none,
        lease_s=none,
    )
    retries.sending("s", 1)
    retries.record_delivery("s", 1, delivered=True, is_replay=True)
    await asyncio.sleep(0)
    for _ in range(2):
        retries.record_delivery("s", 1, delivered=None, is_replay=True)
    await asyncio.sleep(0)
    assert writer.begun == [AGAIN]
    writer.may_end.set()
    await asyncio.gather(*retries._noting)
    assert writer.begun == [AGAIN, UNKNOWN]
