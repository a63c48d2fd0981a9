"""The store's figures for operators, read seldom and cached for frequent readers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from app.errors import AppError, StoreDamaged
from app.process import cancelled
from app.store.ports import Connection, Database
from app.store.sessions import count_by_status, database_bytes

log = logging.getLogger("turnlog.figures")

FRESH_S = 1.0
"""Seconds for which figures are not read again."""

SHARE = 20
"""They are also not read again for this many times the duration of the last read: a large store is counted rarely."""

PATIENCE_S = 2.0
"""A caller waits at most this long, then gets the figures known before."""


class Figures(msgspec.Struct, frozen=True):
    """Sessions by status, turns with a claim, and the database's size in bytes without free pages."""

    sessions: dict[str, int]
    open_turns: int
    bytes: int


def _figures(connection: Connection) -> Figures:
    """Reads every session's head: a second for some millions."""
    by_status, open_turns = count_by_status(connection)
    none = dict.fromkeys(("open", "closed", "erased", "undone"), 0)
    return Figures(none | by_status, open_turns, database_bytes(connection))


class CachedFigures:
    """Figures of the store, one second old or, of a large store, more. `clock` is monotonic."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._known: Figures | None = None
        self._due_at = -float("inf")
        self._reading: asyncio.Task[None] | None = None
        self.is_up = True

    async def now(self) -> Figures | None:
        """None until they were read once. `is_up` tells whether the database answered the last read."""
        if self._reading is None and self._clock() >= self._due_at:
            self._reading = asyncio.create_task(self._read(), name="turnlog-figures")
            self._reading.add_done_callback(self._done)
        if self._reading is not None:
            done, _ = await asyncio.wait({self._reading}, timeout=PATIENCE_S)
            if not done and self._known is None:
                self.is_up = False
        return self._known

    async def _read(self) -> None:
        began = self._clock()
        try:
            self._known = await self._database.read(_figures)
            self.is_up = True
        except AppError as error:
            self.is_up = isinstance(error, StoreDamaged)
            log.warning("the store's figures cannot be read: %s", error)
        ended = self._clock()
        self._due_at = ended + max(FRESH_S, SHARE * (ended - began))

    def _done(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if not reading.cancelled():
            reading.result()

    async def stop(self) -> None:
        await cancelled(self._reading)
