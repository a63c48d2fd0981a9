"""Holds turns back while a gate is shut, in the order of their arrival."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from app.domain.fleet import Closings, Fleet
from app.errors import Overloaded
from app.fleet.state import POLL_S, STALE_S, FleetState

Lane = tuple[str, str | None]
"""Turns that wait at the same gates: their run, and their adapter."""

AT_ONCE, REST_S = 16, 0.005
"""A gate that opens lets AT_ONCE turns pass every REST_S seconds. A thousand at once would block the event loop for a
second and finish no sooner."""


class Passage(msgspec.Struct):
    """What gates keep of a turn. `ticket` is its place in the order; `closings` are those of the moment when its
    request was sent."""

    ticket: int
    closings: Closings = (0, 0, 0, 0)


GATES = "gates"
"""The name of a turn's `Passage` in `InFlightTurn.features`."""


class GatedTurn(Protocol):
    """What gates know of a turn. One that `has_claim` goes on while others drain."""

    @property
    def features(self) -> dict[str, Any]: ...

    @property
    def run(self) -> str: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def has_claim(self) -> bool: ...


Wait = Callable[[GatedTurn], Awaitable[None]]
"""`Gates.wait`, for a turn that must."""


class _HeldTurn(msgspec.Struct, eq=False):
    ticket: int
    turn: GatedTurn
    opened: asyncio.Future[None]

    def release(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)


class Gates:
    """The gates as this process knows them. A turn keeps its place in the line if a gate shuts again."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self._line: list[_HeldTurn] = []
        self._held: Counter[Lane] = Counter()
        self._next_release: asyncio.TimerHandle | None = None
        self._open_events: dict[tuple[str | None, str], asyncio.Event] = {}
        self._tickets = itertools.count(1)
        self._stopping = False
        fleet.listen(self._changed)

    def held(self) -> Counter[Lane]:
        """How many turns wait in this process, by run and adapter."""
        return +self._held

    def shut_s(self) -> dict[str, list[float]]:
        """For how many seconds each shut gate has been shut, the fleet's and those of adapters, of all runs and of
        single ones."""
        fleet = self._fleet.fleet
        each = [fleet.gates, *fleet.runs.values()]
        by_scope = {
            "fleet": [gates.fleet for gates in each],
            "adapter": [gate for gates in each for gate in gates.adapters.values()],
        }
        return {
            scope: [time.time() - (gate.since or 0.0) for gate in gates if gate.is_shut]
            for scope, gates in by_scope.items()
        }

    @property
    def settled_s(self) -> float:
        """Seconds after which no process uses a state from before a gate was shut; 0 for a process that is alone."""
        return 0.0 if self._fleet.is_alone else max(STALE_S + 2 * POLL_S, 2 * self._fleet.stale_s)

    def arrive(self, turn: GatedTurn) -> Wait | None:
        """Give an arriving turn its place in the order, which it keeps if it waits more than once; None if it may pass
        at once, which it may not while earlier turns are being let through."""
        turn.features[GATES] = Passage(next(self._tickets))
        if self._fleet.is_calm and self._next_release is None:
            return None
        if self.is_open(turn) and not self._is_line_moving(turn):
            return None
        return self.wait

    def pass_again(self, turn: GatedTurn) -> Wait | None:
        """None if a turn that has arrived may go on at once."""
        return None if self._fleet.is_calm or self.is_open(turn) else self.wait

    def is_open(self, turn: GatedTurn) -> bool:
        """May a turn go to an engine? False also if the state is stale: `wait` refreshes it."""
        return self._fleet.is_fresh and not self._is_shut(turn)

    def _is_shut(self, turn: GatedTurn) -> bool:
        return self._fleet.fleet.is_shut(turn.run, turn.adapter, has_claim=turn.has_claim)

    def try_pass(self, turn: GatedTurn) -> bool:
        """May the request be sent now? If so, later closings are counted from here."""
        state = self._fleet
        if not (state.is_calm or self.is_open(turn)):
            return False
        turn.features[GATES].closings = state.fleet.closings(turn.run, turn.adapter)
        return True

    async def was_shut(self, turn: GatedTurn) -> bool:
        """Was a gate shut since the turn's request was sent, by any process?

        Raises StoreUnavailable.
        """
        sent: Closings = turn.features[GATES].closings
        if self._fleet.fleet.closings(turn.run, turn.adapter) != sent:
            return True
        return (await self._fleet.refresh()).closings(turn.run, turn.adapter) != sent

    def _is_line_moving(self, turn: GatedTurn) -> bool:
        """Are turns that arrived earlier being let through?"""
        return self._next_release is not None and self._held[turn.run, turn.adapter] > 0

    async def wait(self, turn: GatedTurn) -> None:
        """Wait until a turn may pass; one that has its claim goes on while others drain.

        Raises Overloaded if the server stops, StoreUnavailable if the gates' state cannot be read.
        """
        may_try = not self._is_line_moving(turn)
        while not (may_try and self.is_open(turn)):
            if may_try and not self._is_shut(turn):
                await self._fleet.refresh()
                continue
            if self._stopping:
                raise Overloaded("the server is stopping; the gate is shut")
            await self._wait_in_line(turn, turn.features[GATES].ticket)
            may_try = True

    async def _wait_in_line(self, turn: GatedTurn, ticket: int) -> None:
        waiter = _HeldTurn(ticket, turn, asyncio.get_running_loop().create_future())
        bisect.insort(self._line, waiter, key=lambda held: held.ticket)
        lane = turn.run, turn.adapter
        self._held[lane] += 1
        try:
            await waiter.opened
        finally:
            self._held[lane] -= 1
            index = bisect.bisect_left(self._line, ticket, key=lambda held: held.ticket)
            if self._line[index : index + 1] == [waiter]:
                del self._line[index]

    async def opens(self, run: str | None, name: str, timeout_s: float) -> bool:
        """Is an adapter's own gate open, that of all runs and that of `run` if one is named, now or within `timeout_s`?
        A stopping server answers at once."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_own_shut(run, name) and not self._stopping:
                    await self._open_events.setdefault((run, name), asyncio.Event()).wait()
        except TimeoutError:
            return False
        return not self._is_own_shut(run, name)

    def _is_own_shut(self, run: str | None, name: str) -> bool:
        fleet = self._fleet.fleet
        return fleet.gates.adapter(name).is_shut or fleet.gates_of(run).adapter(name).is_shut

    def stop(self) -> None:
        """Release all waiting turns, since a stopping server waits for its requests."""
        self._stopping = True
        for waiter in self._line:
            waiter.release()
        self._line = []
        for event in self._open_events.values():
            event.set()

    def _changed(self, before: Fleet, now: Fleet) -> None:
        if self._next_release is None:
            self._release_some()
        for key in [key for key in self._open_events if not self._is_own_shut(*key)]:
            self._open_events.pop(key).set()

    def _release_some(self) -> None:
        """Release the next AT_ONCE turns whose gates are open, and the others a little later."""
        self._next_release = None
        open_to = (held for held in self._line if not self._is_shut(held.turn))
        passing = itertools.islice(open_to, AT_ONCE + 1)
        for number, waiter in enumerate(list(passing)):
            if number == AT_ONCE:
                self._next_release = asyncio.get_running_loop().call_later(REST_S, self._release_some)
            else:
                self._line.remove(waiter)
                waiter.release()
