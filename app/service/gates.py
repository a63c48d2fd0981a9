"""Holding turns back while a gate is shut, in the order in which they came."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter

import msgspec

from app.domain.fleet import Fleet
from app.errors import Overloaded
from app.service.fleet import FleetState

Closings = tuple[int, int]
"""How often the fleet's gate and the adapter's had been shut when a turn passed them."""


class _Waiter(msgspec.Struct, eq=False):
    ticket: int
    adapter: str | None
    opened: asyncio.Future[None]


class Gates:
    """The gates as this process knows them. A turn that waits keeps its place through openings that end too soon."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._waiting: list[_Waiter] = []
        self._tickets = itertools.count(1)
        self._stopping = False
        fleet.listen(self._changed)

    def held(self) -> Counter[str | None]:
        """How many turns wait here, by adapter."""
        return Counter(waiter.adapter for waiter in self._waiting)

    def is_shut(self, adapter: str | None) -> bool:
        return self._fleet.fleet.is_shut(adapter)

    def closings(self, adapter: str | None) -> Closings:
        return self._fleet.fleet.closings(adapter)

    def ticket(self) -> int:
        """A place in the order, for a turn that may have to wait more than once."""
        return next(self._tickets)

    async def wait(self, adapter: str | None, ticket: int) -> Closings:
        """Until both gates are open; what to compare with later. Raises Overloaded where the server stops."""
        while self.is_shut(adapter):
            if self._stopping:
                raise Overloaded("the server is stopping; the gate is shut")
            waiter = _Waiter(ticket, adapter, asyncio.get_running_loop().create_future())
            bisect.insort(self._waiting, waiter, key=lambda one: one.ticket)
            try:
                await waiter.opened
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        return self.closings(adapter)

    async def shut_since(self, adapter: str | None, passed: Closings) -> bool:
        """Was a gate shut since a turn passed it? Another process may have done so a moment ago.

        Raises StoreUnavailable.
        """
        if self.closings(adapter) != passed:
            return True
        return (await self._fleet.refresh()).closings(adapter) != passed

    def stop(self) -> None:
        """Let go of all who wait: a server that stops waits for its requests."""
        self._stopping = True
        self._release(self._waiting)

    def _changed(self, _: Fleet, fleet: Fleet) -> None:
        self._release([waiter for waiter in self._waiting if not fleet.is_shut(waiter.adapter)])

    def _release(self, waiters: list[_Waiter]) -> None:
        gone = set(map(id, waiters))
        self._waiting = [waiter for waiter in self._waiting if id(waiter) not in gone]
        for waiter in waiters:
            if not waiter.opened.done():
                waiter.opened.set_result(None)
