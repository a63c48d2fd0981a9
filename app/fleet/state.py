"""What this process knows of the fleet, which all processes share through its log."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

import msgspec

from app.domain import fleet as domain
from app.domain.fleet import Fleet, FleetEvent, Gate, Placed
from app.errors import AppError, StoreUnavailable
from app.store import fleet as store
from app.store.ports import Database, Writer
from app.tasks import cancelled

log = logging.getLogger("turnlog.fleet")

POLL_S = 0.05
"""Where there are other processes, how often their events are looked for: a pause is seen within twice that."""

STALE_S = 0.1
"""What was read longer ago is read again before a turn goes by it: a busy or frozen process may have polled late."""

SLOW_READS = 3
"""So many reads in a row that take longer than that, and the database is slow: what it answers is believed for longer,
or no turn would ever go."""

APPEND_TRIES = 32
"""How often an event is decided anew because others wrote first."""

Listener = Callable[[Fleet, Fleet], None]
"""Takes the state before, and the one after."""


class FleetState:
    """Read at the start; then kept up to date by what this process writes and, on PostgreSQL, by polling."""

    def __init__(self, database: Database, writer: Writer, poll_s: float = POLL_S) -> None:
        self.fleet = Fleet()
        self.stale_s = STALE_S
        self._took_s = deque([0.0] * SLOW_READS, SLOW_READS)
        self._poll_s = poll_s
        self._newest: Placed | None = None
        self._database = database
        self._writer = writer
        self._listeners: list[Listener] = []
        self._clock_ahead = 0.0
        self._read_at = -math.inf
        self._reading = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None

    @property
    def is_alone(self) -> bool:
        """Is there no other process that writes?"""
        return self._database.is_sqlite

    @property
    def is_fresh(self) -> bool:
        """Is `fleet` what it was in the database at most `stale_s` ago?"""
        return self._polling is None or asyncio.get_running_loop().time() - self._read_at <= self.stale_s

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each new state, in order, from the next on."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Raises StoreUnavailable."""
        self._read_at = asyncio.get_running_loop().time()
        self._start_over(await self._database.read(store.state))
        if not self.is_alone:
            self._polling = asyncio.create_task(self._poll(), name="turnlog-fleet")

    async def stop(self) -> None:
        await cancelled(self._polling)

    def left(self, gate: Gate) -> float:
        """Seconds until the gate opens by itself, by the database's clock; 0.0 for one that is open."""
        if gate.until is None:
            return 0.0
        return max(0.0, gate.until - asyncio.get_running_loop().time() - self._clock_ahead)

    async def read_clock(self) -> None:
        """Have `left` go by the database's clock as it is now: it may have been set. Raises StoreUnavailable."""
        self._is_now(await self._database.read(store.clock))

    async def refresh(self) -> Fleet:
        """The state as it is now. Raises StoreUnavailable."""
        if self.is_alone:
            return self.fleet
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            # What somebody else began to read after this was asked will do.
            if self._read_at < asked_at:
                await self._read()
        return self.fleet

    async def append(
        self, decide: Callable[[Fleet], FleetEvent | None], *, lease_s: float | None = None
    ) -> Placed | None:
        """Write what `decide` makes of the newest state; it is asked again where another process came first.

        None where there was nothing to write. Raises StoreUnavailable, StoreFull.
        """
        for _ in range(APPEND_TRIES):
            # What another process wrote a moment ago counts also where nothing is to be written then.
            event = decide(await self.refresh())
            if event is None:
                return None
            placed = await self._writer.submit(store.AppendFleet(self.fleet.version, event, lease_s))
            if placed is not None:
                await self._caught_up(placed)
                return placed
            # It may have been this process, where the answer to a commit was lost.
            async with self._reading:
                await self._read()
        raise StoreUnavailable("other processes wrote to the fleet's log all the time")

    async def _caught_up(self, placed: Placed) -> None:
        """Take in what this process has just written, unless the poll did already."""
        async with self._reading:
            if self.is_alone:
                self._is_now(placed.at)
            if placed.seq == self.fleet.version + 1:
                self._apply(placed)

    async def _read(self) -> None:
        """The newest event is read again: a crash of PostgreSQL, or a restored backup, may have taken it back."""
        began_at = asyncio.get_running_loop().time()
        known = self._newest
        after = 0 if known is None else known.seq
        seen = store.seen(await self._database.read_autocommit(store.SINCE, {"known": after}))
        if known is not None and (not seen.events or seen.events[0] != known):
            log.warning("the fleet's log has lost event %d, which this process knew: read it anew", known.seq)
            self._start_over(await self._database.read(store.state))
        else:
            self._is_now(seen.now)
            for placed in seen.events:
                if placed.seq > self.fleet.version:
                    self._apply(placed)
        self._read_at = began_at
        self._took_s.append(asyncio.get_running_loop().time() - began_at)
        self.stale_s = max(STALE_S, 2 * min(self._took_s))

    def _is_now(self, clock: float) -> None:
        self._clock_ahead = clock - asyncio.get_running_loop().time()

    def _start_over(self, seen: store.Seen) -> None:
        self._is_now(seen.now)
        self._newest = seen.events[-1] if seen.events else None
        self._become(domain.fold(seen.events))

    def _apply(self, placed: Placed) -> None:
        log.info("fleet event %d: %s %s", placed.seq, type(placed.event).__name__, msgspec.to_builtins(placed.event))
        self._newest = placed
        self._become(domain.apply(self.fleet, placed))

    def _become(self, fleet: Fleet) -> None:
        before, self.fleet = self.fleet, fleet
        for listener in self._listeners:
            listener(before, fleet)

    async def _poll(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
                failed = False
            except AppError as error:
                if not failed:
                    log.warning("the fleet's log cannot be read, gates stay as they are: %s", error)
                failed = True
            except Exception:
                if not failed:
                    log.exception("an unexpected fault in reading the fleet's log")
                failed = True
