"""The events of all sessions as lines, in the order of commits, optionally followed.

Nothing is held while a line is written to a slow reader: each page is read by itself, after the one before it has been
sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from app.domain.events import UnknownEvent
from app.errors import PositionGone, StoreDamaged, StoreUnavailable
from app.sessions.event_log import event_fields
from app.sessions.log_end import POLL_S, LogEnd, LogPosition, decode_position
from app.store import feed
from app.store.content import matches
from app.store.database import Database
from app.store.feed import START, EventFilter, EventPage, PlacedRow, Position, holds, written_at
from app.store.ports import Connection
from app.store.sessions import decode_events

log = logging.getLogger("turnlog.events")

END = "end"
"""As `after`: behind all that has been committed."""

PAGE = 500
"""Events in one read."""

KNOWN = 100_000
"""Sessions of which a reader knows whether their metadata match; they do not change."""

READS = 2
"""Reads at a time, so that readers of the whole log leave connections to others."""

POSITION_S = 15.0
"""A line with the position alone is sent after so many seconds without another: a reader learns how far a filter has
looked, and a proxy does not close the connection."""


class EventQuery(msgspec.Struct, frozen=True):
    """`after`: a position of an earlier line, END, or None for the beginning. `limit`: of events."""

    after: str | None = None
    follow: bool = False
    limit: int | None = None
    wanted: EventFilter = EventFilter()
    metadata: Mapping[str, Sequence[str]] = {}


class _Reader:
    """How far one reader of the log is; `upto` is the end of the log as it knows it.

    `left`: how many events it may still get. `told`: the position that the client has.
    """

    def __init__(self, query: EventQuery, position: LogPosition, upto: Position, *, is_told: bool) -> None:
        self.wanted = query.wanted
        self.metadata = query.metadata
        self._matches: dict[str, bool] = {}
        self.follows = query.follow
        self.position = position
        self.upto = upto
        self.left = query.limit or sys.maxsize
        self._told = position if is_told else None
        self._clock = asyncio.get_running_loop().time
        self._told_at = self._clock()
        self.waits_for_store = False

    @property
    def is_at_end(self) -> bool:
        return self.position.place >= self.upto

    @property
    def nothing(self) -> EventPage:
        return EventPage([], self.position.place, self.position.at)

    def next_page(self, connection: Connection) -> EventPage:
        """The next events that match. With a filter by metadata a whole page is looked through, whatever `limit`."""
        place, most = self.position.place, min(PAGE, self.left)
        page = feed.page(connection, place, self.upto, self.wanted, PAGE if self.metadata else most)
        if not self.metadata:
            return page
        if len(self._matches) > KNOWN:
            self._matches.clear()
        unknown = {row.session_id for row in page.rows if row.session_id is not None} - self._matches.keys()
        self._matches |= dict.fromkeys(unknown, False) | matches(connection, sorted(unknown), self.metadata)
        rows = [row for row in page.rows if row.session_id is None or self._matches[row.session_id]]
        if len(rows) > most:
            return EventPage(rows[:most], rows[most - 1].place, rows[most - 1].at)
        return page._replace(rows=rows)

    def advance(self, page: EventPage) -> None:
        """The page's rows have been sent."""
        self.position = LogPosition(self.position.epoch, page.reached, page.at)
        self.left -= len(page.rows)
        if page.rows:
            self._told_at = self._clock()
            if page.rows[-1].place == page.reached:
                self._told = self.position

    def position_line(self) -> bytes:
        """The position alone, if it is due; else nothing."""
        is_late = self._clock() >= self._told_at + POSITION_S
        is_last = self.is_at_end and not self.follows and self._told != self.position
        if not (is_late or is_last or self._told is None):
            return b""
        self._told, self._told_at = self.position, self._clock()
        return msgspec.json.encode({"position": self.position.encode()}) + b"\n"


class AllEvents:
    """The readers of the log of all sessions in this process; `readers` counts them."""

    def __init__(self, database: Database, log_end: LogEnd) -> None:
        self._database = database
        self._log_end = log_end
        self._reads = asyncio.Semaphore(READS)
        self.stopping = asyncio.Event()
        self.readers = 0

    def stop(self) -> None:
        """End those who follow, since a stopping server waits for open replies."""
        self.stopping.set()

    async def start(self, query: EventQuery) -> AsyncGenerator[bytes]:
        """The lines, of which the first are read. Raises InvalidRequest for a text that is no position, PositionGone,
        StoreUnavailable."""
        given = None
        if query.after is not None and query.after != END:
            given = decode_position(query.after, "GET /events", "after")
        epoch = await self._database.read(feed.log_epoch)
        if given is not None:
            _require_epoch(given, epoch)
        upto = await self._log_end.present()
        position = given or LogPosition(epoch, START)
        if query.after == END:
            at = await self._database.read(lambda connection: written_at(connection, upto))
            position = LogPosition(epoch, upto, at)
        reader = _Reader(query, position, upto, is_told=given is not None)
        return self._counted(self._lines(reader, await self._page(reader)))

    async def _counted(self, lines: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        self.readers += 1
        try:
            async with contextlib.aclosing(lines):
                async for piece in lines:
                    yield piece
        finally:
            self.readers -= 1

    async def _lines(self, reader: _Reader, page: EventPage) -> AsyncGenerator[bytes]:
        while True:
            if page.rows:
                yield await asyncio.to_thread(self._ndjson, page.rows, reader.position.epoch)
            reader.advance(page)
            if not reader.left:
                return
            if line := reader.position_line():
                yield line
            if self.stopping.is_set() if reader.follows else reader.is_at_end:
                return
            try:
                page = await self._next(reader)
            except PositionGone as error:
                log.warning("a reader of all events must start again: %s", error)
                return

    async def _next(self, reader: _Reader) -> EventPage:
        """The next page, empty if there is nothing new.

        Raises PositionGone, StoreUnavailable; a reader that follows waits for a database that is away.
        """
        try:
            if reader.is_at_end:
                await self._wait()
                reader.upto = (await self._log_end.now()).synced
            page = reader.nothing if reader.is_at_end else await self._page(reader)
            reader.waits_for_store = False
            return page
        except StoreDamaged:
            raise
        except StoreUnavailable as error:
            if not reader.follows:
                raise
            if not reader.waits_for_store:
                log.warning("the event log cannot be read, a reader of all events waits: %s", error)
            reader.waits_for_store = True
            await self._wait()
            return reader.nothing

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self.stopping.wait()

    async def _page(self, reader: _Reader) -> EventPage:
        """Raises PositionGone, StoreUnavailable."""
        position = reader.position

        def read(connection: Connection) -> EventPage | None:
            _require_epoch(position, feed.log_epoch(connection))
            if not holds(connection, position.place, position.at):
                return None
            if reader.is_at_end:
                return reader.nothing
            return reader.next_page(connection)

        async with self._reads:
            placed = await self._database.read(read, one_moment=True)
        if placed is None:
            raise PositionGone(
                f"the event at {position.place.tx}.{position.place.position}, the last one given, is no longer "
                "in the log, because a crash of the database undid it: start again"
            )
        return placed

    def _ndjson(self, rows: Sequence[PlacedRow], epoch: str) -> bytes:
        return b"".join(msgspec.json.encode(self._line(row, epoch)) + b"\n" for row in rows)

    def _line(self, placed: PlacedRow, epoch: str) -> dict[str, Any]:
        position = LogPosition(epoch, placed.place, placed.at).encode()
        named = {"position": position, "session_id": placed.session_id}
        if placed.row is None:
            return {**named, **_NOTHING_KNOWN, "error": "it cannot be read: a page is damaged"}
        try:
            [recorded] = decode_events([placed.row])
        except UnknownEvent as error:
            self._database.unreadable.warn(placed.session_id or "", error)
            known = {name: getattr(placed.row, name) for name in _NOTHING_KNOWN}
            return {**named, **known, "error": str(error)}
        return {**named, **event_fields(recorded)}


def _require_epoch(position: LogPosition, epoch: str) -> None:
    """Raises PositionGone. A store may be restored while its servers run."""
    if position.epoch != epoch:
        raise PositionGone(
            f"the position is from epoch {position.epoch:.64}, but the store was restored (now {epoch}): start again"
        )


_NOTHING_KNOWN = {"seq": None, "type": None, "at": None}
"""Fields of a line that cannot be read."""
