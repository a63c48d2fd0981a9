"""Holding turns back while a gate is shut, in the order in which they came."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter

import msgspec

from app.domain.fleet import OPEN, Fleet
from app.errors import Overloaded
from app.fleet.state import FleetState

Closings = tuple[int, int]
"""How often the fleet's gate and the adapter's had been shut when a turn passed them."""


AT_ONCE, REST_S = 16, 0.005
"""So many turns pass a gate that opens, then others of this process have their turn: a thousand at once would keep
everything else waiting for a second, and be done no sooner."""


class _HeldTurn(msgspec.Struct, eq=False):
    ticket: int
    adapter: str | None
    opened: asyncio.Future[None]

    def let_go(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)


class Gates:
    """The gates as this process knows them. A turn that waits keeps its place through openings that end too soon."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._line: list[_HeldTurn] = []
        self._held: Counter[str | None] = Counter()
        self._letting_pass: asyncio.TimerHandle | None = None
        self._asked: dict[str, asyncio.Event] = {}
        self._tickets = itertools.count(1)
        self._stopping = False
        fleet.listen(self._changed)

    def held(self) -> Counter[str | None]:
        """How many turns wait here, by adapter."""
        return +self._held

    def arrive(self, adapter: str | None) -> GatePass:
        """A turn has come: its place in the order, which it keeps if it has to wait more than once."""
        return GatePass(self, self._fleet, adapter, next(self._tickets))

    def is_shut(self, adapter: str | None) -> bool:
        return self._fleet.fleet.is_shut(adapter)

    def may_pass(self, adapter: str | None) -> bool:
        """May a turn go to an engine? Not by what was known too long ago: `wait` looks again."""
        return self._fleet.is_fresh and not self._fleet.fleet.is_shut(adapter)

    def is_line_moving(self, adapter: str | None) -> bool:
        """Do turns pass that came before?"""
        return self._letting_pass is not None and self._held[adapter] > 0

    async def wait(self, adapter: str | None, ticket: int) -> None:
        """Until a turn may pass.

        Raises Overloaded where the server stops, StoreUnavailable where it cannot be known.
        """
        had_its_turn = not self.is_line_moving(adapter)
        while not (had_its_turn and self.may_pass(adapter)):
            if had_its_turn and not self.is_shut(adapter):
                await self._fleet.refresh()
                continue
            if self._stopping:
                raise Overloaded("the server is stopping; the gate is shut")
            await self._stand_in_line(adapter, ticket)
            had_its_turn = True

    async def _stand_in_line(self, adapter: str | None, ticket: int) -> None:
        waiter = _HeldTurn(ticket, adapter, asyncio.get_running_loop().create_future())
        bisect.insort(self._line, waiter, key=_ticket)
        self._held[adapter] += 1
        try:
            await waiter.opened
        finally:
            self._held[adapter] -= 1
            place = bisect.bisect_left(self._line, ticket, key=_ticket)
            if self._line[place : place + 1] == [waiter]:
                del self._line[place]

    async def opens(self, name: str, timeout_s: float) -> bool:
        """Is an adapter's own gate open, now or within `timeout_s`? A server that stops answers as it is."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_own_shut(name) and not self._stopping:
                    await self._asked.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return not self._is_own_shut(name)

    def _is_own_shut(self, name: str) -> bool:
        return self._fleet.fleet.adapters.get(name, OPEN).is_shut

    def stop(self) -> None:
        """Let go of all who wait: a server that stops waits for its requests."""
        self._stopping = True
        for waiter in self._line:
            waiter.let_go()
        self._line = []
        for asked in self._asked.values():
            asked.set()

    def _changed(self, before: Fleet, now: Fleet) -> None:
        if self._letting_pass is None:
            self._let_pass()
        for name in [name for name in self._asked if not self._is_own_shut(name)]:
            self._asked.pop(name).set()

    def _let_pass(self) -> None:
        """The next few of those whose gates are open, and the others a little later."""
        self._letting_pass = None
        fleet = self._fleet.fleet
        able = itertools.islice((one for one in self._line if not fleet.is_shut(one.adapter)), AT_ONCE + 1)
        for number, waiter in enumerate(list(able)):
            if number == AT_ONCE:
                self._letting_pass = asyncio.get_running_loop().call_later(REST_S, self._let_pass)
            else:
                self._line.remove(waiter)
                waiter.let_go()


class GatePass:
    """All that one turn asks the gates, which are the fleet's and its adapter's; `ticket` is its place in the order."""

    def __init__(self, gates: Gates, fleet: FleetState, adapter: str | None, ticket: int) -> None:
        self._gates = gates
        self._fleet = fleet
        self._adapter = adapter
        self.ticket = ticket
        self._closings: Closings = (0, 0)

    @property
    def admits_at_once(self) -> bool:
        """May a turn that has just come pass? Not while others pass that came before it."""
        return self.is_open and not self._gates.is_line_moving(self._adapter)

    @property
    def is_open(self) -> bool:
        """May the turn go to an engine now? Not by what was known too long ago: `wait` looks again."""
        return self._gates.may_pass(self._adapter)

    @property
    def version(self) -> str | None:
        """That of the adapter's weights, where a trainer told of it."""
        return self._fleet.fleet.gates(self._adapter)[1].version

    async def wait(self) -> None:
        """Until the gates are open. Raises Overloaded where the server stops, StoreUnavailable."""
        await self._gates.wait(self._adapter, self.ticket)

    def take(self) -> bool:
        """Right before a request is sent: may it be? If so, later closings count from here."""
        if not self.is_open:
            return False
        self._closings = self._fleet.fleet.closings(self._adapter)
        return True

    async def was_shut(self) -> bool:
        """Was a gate shut since the turn's request was sent? Another process may have done so a moment ago.

        Raises StoreUnavailable.
        """
        if self._fleet.fleet.closings(self._adapter) != self._closings:
            return True
        return (await self._fleet.refresh()).closings(self._adapter) != self._closings


def _ticket(waiter: _HeldTurn) -> int:
    return waiter.ticket
