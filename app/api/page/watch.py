"""Telling those who watch the list of sessions what has changed in any of them, whichever process changed it.

    log ── polled, for all ──▶ ids ── one query ──▶ rows ──▶ each listener's pending rows, one a session ──▶ browser

A listener that is slow finds the newest row of each session when it comes back: what waits for it grows with the
sessions that changed, not with how often, and none is left out. Nothing is read while nobody listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from app.domain import cursors
from app.errors import AppError, Overloaded
from app.sessions.session_list import SessionList, SessionRow
from app.store import reads, tail
from app.store.engine import Database
from app.store.reads import Connection, Position
from app.store.tail import START, Tail

log = logging.getLogger("turnlog.watch")

POLL_S = 0.25
"""How often the log is looked at, and with that how often a listener can have something new."""

BATCH = 5_000
"""Events looked at in one read."""

MAX_BEHIND = 10_000
"""A listener that comes back and has missed more events reads the list anew: that is less work for both."""

MAX_LISTENERS = 64


class LiveCursor(msgspec.Struct, frozen=True, array_like=True):
    """Everything up to `place` has been seen, in the store of this epoch."""

    epoch: str
    place: Position

    def encode(self) -> str:
        return cursors.encode(self)


def decode_cursor(text: str) -> LiveCursor:
    """Raises InvalidRequest."""
    found: LiveCursor = cursors.decode(text, LiveCursor, "the live stream")
    return found


class Listener:
    """One who watches. It `began` behind a place; `cursor` stands behind all that has been taken or is pending.

    `is_over`: nothing will come any more.
    """

    def __init__(self, on_close: Callable[[Listener], None]) -> None:
        self.began = self.cursor = LiveCursor("", START)
        self.is_over = False
        self._must_reset = False
        self._pending: dict[str, SessionRow] = {}
        self._woken = asyncio.Event()
        self._on_close = on_close

    @property
    def has_news(self) -> bool:
        return self._must_reset or bool(self._pending)

    def take(self) -> list[SessionRow]:
        """What has changed since the last time, each session once; `cursor` stands behind it."""
        rows = list(self._pending.values())
        self._pending = {}
        return rows

    def take_reset(self) -> bool:
        """Has the listener missed what cannot be told any more? What is pending begins at `cursor` then."""
        found, self._must_reset = self._must_reset, False
        return found

    async def wait(self, timeout_s: float) -> None:
        """Until there is news, or it is over, or the time is up."""
        self._woken.clear()
        if self.has_news or self.is_over:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def add(self, rows: Iterable[SessionRow], cursor: LiveCursor) -> None:
        """Rows of one session may have been read in any order: the one with the later version counts."""
        for row in rows:
            known = self._pending.get(row.session_id)
            if known is None or known.version <= row.version:
                self._pending[row.session_id] = row
        if self.cursor.place < cursor.place:
            self.cursor = cursor
        if self._pending:
            self._woken.set()

    def reset(self, cursor: LiveCursor) -> None:
        self._must_reset = True
        self._pending = {}
        self.cursor = cursor
        self._woken.set()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """End a `wait`, for a reason that is not the log's."""
        self._woken.set()

    def close(self) -> None:
        self._on_close(self)


class Watch:
    """Reads the log for all listeners of this process, from the first one's coming to the last one's going."""

    def __init__(self, database: Database, sessions: SessionList, poll_s: float = POLL_S) -> None:
        self._database = database
        self._sessions = sessions
        self._poll_s = poll_s
        self._listeners: set[Listener] = set()
        self._starting = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None
        self._seen = LiveCursor("", START)
        self._held: frozenset[str] = frozenset()
        self._stopping = False

    @property
    def is_running(self) -> bool:
        return self._polling is not None

    async def listen(self, cursor: str | None) -> Listener:
        """From now on, or from where another stream ended; close it in any case.

        Raises Overloaded where there are too many, InvalidRequest for what is no cursor, StoreUnavailable.
        """
        resumed = None if cursor is None else decode_cursor(cursor)
        if self._stopping or len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"the server is stopping, or {MAX_LISTENERS} listen already")
        listener = Listener(self._closed)
        self._listeners.add(listener)
        try:
            async with self._starting:
                if self._polling is None:
                    await self._start()
            listener.began = listener.cursor = self._seen
            if resumed is not None:
                listener.began = resumed
                await self._catch_up(listener, resumed)
        except BaseException:
            listener.close()
            raise
        return listener

    def stop(self) -> None:
        """Let go of all who listen: a server that stops waits for its requests."""
        self._stopping = True
        for listener in self._listeners:
            listener.end()

    async def _start(self) -> None:
        """Raises StoreUnavailable."""
        self._seen = await self._present()
        self._held = frozenset(self._sessions.held())
        self._polling = asyncio.create_task(self._poll(), name="turnlog-watch")
        self._polling.add_done_callback(self._ended)

    async def _present(self) -> LiveCursor:
        return await self._database.read(lambda connection: LiveCursor(reads.epoch(connection), tail.end(connection)))

    async def _catch_up(self, listener: Listener, resumed: LiveCursor) -> None:
        """What came between the end of an earlier stream and this one's beginning. Raises StoreUnavailable."""
        rows: list[SessionRow] = []
        if resumed.epoch != self._seen.epoch:
            return listener.reset(self._seen)

        def read(connection: Connection) -> Tail:
            found = tail.since(connection, resumed.place, MAX_BEHIND + 1)
            if found.events <= MAX_BEHIND:
                rows.extend(self._sessions.rows(connection, found.session_ids))
            return found

        missed = await self._database.read(read)
        if not missed.holds or missed.events > MAX_BEHIND:
            return listener.reset(self._seen)
        return listener.add(rows, LiveCursor(resumed.epoch, missed.last))

    async def _poll(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                while await self._look() == BATCH:
                    pass
                failed = False
            except AppError as error:
                if not failed:
                    log.warning("the log cannot be followed, listeners wait: %s", error)
                failed = True

    async def _look(self) -> int:
        """Tell of what is new; how many events that was. Raises StoreUnavailable."""
        held = frozenset(self._sessions.held())
        rows: list[SessionRow] = []

        def read(connection: Connection) -> Tail:
            rows.clear()
            found = tail.since(connection, self._seen.place, BATCH)
            rows.extend(self._sessions.rows(connection, list({*found.session_ids, *(held ^ self._held)})))
            return found

        def around_damage(connection: Connection) -> Tail:
            rows.clear()
            found = tail.since(connection, self._seen.place, BATCH)
            rows.extend(self._sessions.rows_of_each(connection, list({*found.session_ids, *(held ^ self._held)})))
            return found

        new = await self._database.read(read, or_else=around_damage)
        if not new.holds:
            log.warning(
                "the log has lost its event at %s, which listeners knew of: they read the list anew", self._seen
            )
            self._seen = await self._present()
            for listener in self._listeners:
                listener.reset(self._seen)
            return 0
        self._held = held
        self._seen = LiveCursor(self._seen.epoch, new.last)
        for listener in self._listeners:
            listener.add(rows, self._seen)
        return new.events

    def _ended(self, polling: asyncio.Task[None]) -> None:
        """Nobody listens any more; or there was a fault, and whoever listens is to come again."""
        if polling.cancelled():
            return
        log.error("an unexpected fault in following the log", exc_info=polling.exception())
        if self._polling is polling:
            self._polling = None
        for listener in self._listeners:
            listener.end()

    def _closed(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._polling is not None:
            self._polling.cancel()
            self._polling = None
