"""What this process knows of the fleet, which all processes share through its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from app.domain import fleet as domain
from app.domain.fleet import Fleet, FleetEvent, Gate, Placed
from app.errors import AppError, StoreUnavailable
from app.store import fleet as store
from app.store.ports import Database, Writer

log = logging.getLogger("turnlog.fleet")

POLL_S = 0.05
"""Where there are other processes, how often their events are looked for: a pause is seen within twice that."""

APPEND_TRIES = 32
"""How often an event is decided anew because others wrote first."""

Listener = Callable[[Fleet, Fleet], None]
"""Takes the state before, and the one after."""


class FleetState:
    """Read at the start; then kept up to date by what this process writes and, on PostgreSQL, by polling."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self.fleet = Fleet()
        self._database = database
        self._writer = writer
        self._listeners: list[Listener] = []
        self._clock_ahead = 0.0
        self._reading = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None

    @property
    def is_alone(self) -> bool:
        """Is there no other process that writes?"""
        return self._database.is_sqlite

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each new state, in order, from the next on."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Raises StoreUnavailable."""
        self._take(await self._database.read(store.state))
        if not self.is_alone:
            self._polling = asyncio.create_task(self._poll(), name="turnlog-fleet")

    async def stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    def left(self, gate: Gate) -> float:
        """Seconds until the gate opens by itself, by the database's clock; 0.0 for one that is open."""
        if gate.until is None:
            return 0.0
        return max(0.0, gate.until - asyncio.get_running_loop().time() - self._clock_ahead)

    async def refresh(self) -> Fleet:
        """The state as it is now. Raises StoreUnavailable."""
        if not self.is_alone:
            async with self._reading:
                known = self.fleet.version
                self._take(await self._database.read(lambda connection: store.after(connection, known)))
        return self.fleet

    async def append(
        self, decide: Callable[[Fleet], FleetEvent | None], *, lease_s: float | None = None
    ) -> Placed | None:
        """Write what `decide` makes of the newest state; it is asked again where another process came first.

        None where there was nothing to write. Raises StoreUnavailable, StoreFull.
        """
        for _ in range(APPEND_TRIES):
            event = decide(self.fleet)
            if event is None:
                return None
            placed = await self._writer.submit(store.AppendFleet(self.fleet.version, event, lease_s))
            if placed is not None:
                await self._caught_up(placed)
                return placed
            await self.refresh()
        raise StoreUnavailable("other processes wrote to the fleet's log all the time")

    async def _caught_up(self, placed: Placed) -> None:
        """Take in what this process has just written, unless the poll did already."""
        async with self._reading:
            if placed.seq == self.fleet.version + 1:
                self._apply(placed)

    def _take(self, seen: store.Seen) -> None:
        self._clock_ahead = seen.now - asyncio.get_running_loop().time()
        for placed in seen.events:
            if placed.seq > self.fleet.version:
                self._apply(placed)

    def _apply(self, placed: Placed) -> None:
        before, self.fleet = self.fleet, domain.apply(self.fleet, placed)
        log.info("fleet event %d: %s %s", placed.seq, type(placed.event).__name__, msgspec.to_builtins(placed.event))
        for listener in self._listeners:
            listener(before, self.fleet)

    async def _poll(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
                failed = False
            except AppError as error:
                if not failed:
                    log.warning("the fleet's log cannot be read, gates stay as they are: %s", error)
                failed = True
