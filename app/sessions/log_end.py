"""Positions in the log of all sessions, and where it ends: polled once for all that follow it in this process."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from app.domain import cursors
from app.process import cancelled
from app.store import feed
from app.store.database import Database
from app.store.feed import START, Position, Synced, wait_for_horizon
from app.store.ports import Connection

POLL_S = 0.25
"""Minimum interval in seconds between two reads."""

PAUSE_S = 0.02
"""Interval in seconds at which a request looks whether the log is on the disk."""


class Ends(NamedTuple):
    """Below `last` no event can appear any more; up to `synced` none can disappear either, if the database crashes.

    On SQLite both are the same: only a power cut undoes its last claims, and there the order of events is that of its
    log file, so that an event on the disk has all earlier ones before it.
    """

    last: Position
    synced: Position


class LogPosition(msgspec.Struct, frozen=True, array_like=True):
    """The place of an event in the order of commits, in the log with this epoch.

    `at` is when the event was written, in seconds since the epoch: after a crash of the database another event may
    have its place. None: not known.
    """

    epoch: str
    place: Position
    at: float | None = None

    def encode(self) -> str:
        return cursors.encode(self)


def decode_position(text: str, giver: str, name: str = "cursor") -> LogPosition:
    """The position in parameter `name`. Raises InvalidRequest if it is not one that `giver` gave."""
    position: LogPosition = cursors.decode(text, LogPosition, giver, name)
    return position


class _Unsynced(NamedTuple):
    """An end that is on the disk once the database's log is up to `written`, or at the loop's time `until`."""

    last: Position
    written: int
    until: float


class LogEnd:
    """Read while somebody asks; a failed read fails for all who wait for it."""

    def __init__(self, database: Database, poll_s: float = POLL_S) -> None:
        self._database = database
        self._poll_s = poll_s
        self._ends = Ends(START, START)
        self._unsynced: _Unsynced | None = None
        self._due_at = 0.0
        self._reading: asyncio.Task[Ends] | None = None

    async def now(self) -> Ends:
        """The ends, at most `poll_s` old. Raises StoreUnavailable."""
        if self._reading is None and asyncio.get_running_loop().time() >= self._due_at:
            self._reading = asyncio.create_task(self._read(), name="turnlog-log-end")
            self._reading.add_done_callback(self._done)
        if self._reading is None:
            return self._ends
        return await asyncio.shield(self._reading)

    async def present(self) -> Position:
        """The end with all that has been committed, once it is on the disk; for a request that begins.

        Transactions that run for more than a second hide what was committed meanwhile. Raises StoreUnavailable.
        """
        await wait_for_horizon(self._database)
        last, log = await self._database.read(_look)
        wanted = _unsynced(last, log)
        while not _is_synced(wanted, log):
            await asyncio.sleep(PAUSE_S)
            log = await self._database.read(feed.synced)
        return last

    async def stop(self) -> None:
        await cancelled(self._reading)

    async def _read(self) -> Ends:
        last, log = await self._database.read(_look)
        newest, waiting, synced = _unsynced(last, log), self._unsynced, self._ends.synced
        if waiting is None or last < waiting.last or _is_synced(newest, log):
            waiting = newest  # where the log is shorter, a crash undid what was waited for
        if _is_synced(waiting, log):
            synced, waiting = waiting.last, None if waiting is newest else newest
        self._unsynced = waiting
        self._ends = Ends(last, min(synced, last))
        return self._ends

    def _done(self, reading: asyncio.Task[Ends]) -> None:
        self._reading = None
        self._due_at = asyncio.get_running_loop().time() + self._poll_s
        if not reading.cancelled():
            reading.exception()  # whoever waits has it


def _look(connection: Connection) -> tuple[Position, Synced]:
    return feed.end(connection), feed.synced(connection)


def _unsynced(last: Position, log: Synced) -> _Unsynced:
    return _Unsynced(last, log.written, asyncio.get_running_loop().time() + log.delay_s)


def _is_synced(unsynced: _Unsynced, log: Synced) -> bool:
    return log.synced >= unsynced.written or asyncio.get_running_loop().time() > unsynced.until
