"""The fleet's state in this process; all processes share it through the fleet's log."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

import msgspec

from app.domain import fleet as domain
from app.domain.fleet import Fleet, FleetEvent, Gate, Placed, PublicUrlSet
from app.errors import AppError, StoreUnavailable
from app.process import cancelled
from app.store import fleet as store
from app.store.ports import Database, Writer

log = logging.getLogger("turnlog.fleet")

POLL_S = 0.05
"""Interval at which other processes' events are read: a pause is seen within twice that."""

STALE_S = 0.1
"""State older than this is read again before a turn relies on it: a busy process may poll late."""

SLOW_READS = 3
"""After so many slow reads in a row the limit is raised: otherwise no turn would ever pass."""

APPEND_TRIES = 32
"""Attempts to append an event while other processes write first."""

Listener = Callable[[Fleet, Fleet], None]
"""Called with the state before and the state after."""


class FleetState:
    """The state is read at the start, then kept up to date by this process's writes and, on PostgreSQL, by polling.

    `is_calm`: nothing is shut, and no other process could have shut something since. So a turn of a process that is
    alone asks no more than this.
    """

    def __init__(self, database: Database, writer: Writer, poll_s: float = POLL_S) -> None:
        self.fleet = Fleet()
        self.is_calm = False
        self.stale_s = STALE_S
        self._read_times_s = deque([0.0] * SLOW_READS, SLOW_READS)
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
        """Is this the only process that writes?"""
        return self._database.is_sqlite

    @property
    def is_fresh(self) -> bool:
        """Was `fleet` read from the database at most `stale_s` ago?"""
        return self._polling is None or asyncio.get_running_loop().time() - self._read_at <= self.stale_s

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each new state, in order, from now on."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Raises StoreUnavailable."""
        self._read_at = asyncio.get_running_loop().time()
        self._reset(await self._database.read(store.state))
        if not self.is_alone:
            self._polling = asyncio.create_task(self._poll(), name="turnlog-fleet")

    async def stop(self) -> None:
        await cancelled(self._polling)

    def left(self, leased: Gate | PublicUrlSet) -> float:
        """Seconds until the lease ends, by the database's clock; 0.0 of an open gate."""
        if leased.until is None:
            return 0.0
        return max(0.0, leased.until - asyncio.get_running_loop().time() - self._clock_ahead)

    async def read_clock(self) -> None:
        """Read the database's clock again, which `left` uses: it may have been changed. Raises StoreUnavailable."""
        self._set_clock(await self._database.read(store.clock))

    async def refresh(self) -> Fleet:
        """Read and return the current state. Raises StoreUnavailable."""
        if self.is_alone:
            return self.fleet
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            # A read that began after this call is fresh enough.
            if self._read_at < asked_at:
                await self._read()
        return self.fleet

    async def append(
        self, decide: Callable[[Fleet], FleetEvent | None], *, lease_s: float | None = None
    ) -> Placed | None:
        """Append the event that `decide` returns for the newest state; it is called again if another process wrote
        first.

        None if there was nothing to write. Raises StoreUnavailable, StoreFull.
        """
        for _ in range(APPEND_TRIES):
            # Refresh even if nothing is to be written: another process may have written a moment ago.
            event = decide(await self.refresh())
            if event is None:
                return None
            placed = await self._writer.submit(store.AppendFleet(self.fleet.version, event, lease_s))
            if placed is not None:
                await self._apply_own(placed)
                return placed
            # The newer event may be this process's own, if the answer to its commit was lost.
            async with self._reading:
                await self._read()
        raise StoreUnavailable("too many processes write to the fleet's log at the same time")

    async def _apply_own(self, placed: Placed) -> None:
        """Apply the event that this process has just written, unless the poll has already."""
        async with self._reading:
            if self.is_alone:
                self._set_clock(placed.at)
            if placed.seq == self.fleet.version + 1:
                self._apply(placed)

    async def _read(self) -> None:
        """The newest known event is read again: a PostgreSQL crash or a restored backup may have lost it."""
        began_at = asyncio.get_running_loop().time()
        known = self._newest
        after = 0 if known is None else known.seq
        seen = store.seen(await self._database.read_autocommit(store.SINCE, {"known": after}))
        if known is not None and (not seen.events or seen.events[0] != known):
            log.warning("event %d is no longer in the fleet's log: reading the log again", known.seq)
            self._reset(await self._database.read(store.state))
        else:
            self._set_clock(seen.now)
            for placed in seen.events:
                if placed.seq > self.fleet.version:
                    self._apply(placed)
        self._read_at = began_at
        self._read_times_s.append(asyncio.get_running_loop().time() - began_at)
        self.stale_s = max(STALE_S, 2 * min(self._read_times_s))

    def _set_clock(self, clock: float) -> None:
        self._clock_ahead = clock - asyncio.get_running_loop().time()

    def _reset(self, seen: store.FleetRead) -> None:
        self._set_clock(seen.now)
        self._newest = seen.events[-1] if seen.events else None
        self._set_state(domain.fold(seen.events))

    def _apply(self, placed: Placed) -> None:
        log.info("fleet event %d: %s %s", placed.seq, type(placed.event).__name__, msgspec.to_builtins(placed.event))
        self._newest = placed
        self._set_state(domain.apply(self.fleet, placed))

    def _set_state(self, fleet: Fleet) -> None:
        before, self.fleet = self.fleet, fleet
        self.is_calm = self.is_alone and not fleet.shut_gates and not fleet.held
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
                    log.exception("unexpected error while reading the fleet's log")
                failed = True
