"""Notifies the page's browsers of changes in sessions, made by any process.

    log ── polled, for all ──▶ ids ── one query ──▶ rows ──▶ each listener's pending rows, one a session ──▶ browser

A slow listener gets the newest row of each changed session, so its pending rows grow with the number of these sessions,
not of the changes, and no session is left out. Nothing is read while there are no listeners.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from sqlalchemy import Connection, select, tuple_

from app.errors import AppError, Overloaded
from app.sessions.log_end import POLL_S, LogEnd, LogPosition, decode_position
from app.sessions.session_list import SessionList
from app.store import feed
from app.store.database import Database
from app.store.dialect import oldest_tx
from app.store.feed import START, Position
from app.store.schema import events
from turnlog.replies import ListedSession

log = logging.getLogger("turnlog.watch")

BATCH = 5_000
"""Events in one read."""

MAX_BEHIND = 10_000
"""A listener that reconnects after more missed events must read the list again, which is less work for both."""

MAX_LISTENERS = 64


class Tail(NamedTuple):
    """Events after a position: their sessions (each once), the last position, and how many events.

    `holds` False: the event at the given position is gone, because a database crash undid it or it is another store.
    Earlier events may differ too.
    """

    session_ids: list[str]
    last: Position
    events: int
    holds: bool


def events_since(connection: Connection, after: Position, limit: int) -> Tail:
    """Events after `after`, at most `limit`."""
    query = (
        select(events.c.session_id, events.c.tx, events.c.position)
        .where(tuple_(events.c.tx, events.c.position) >= (after.tx, after.position), events.c.tx < oldest_tx())
        .order_by(events.c.tx, events.c.position)
        .limit(limit + (after != START))
    )
    rows = connection.execute(query).all()
    if after != START:
        if not rows or Position(rows[0][1], rows[0][2]) != after:
            return Tail([], after, 0, holds=False)
        rows = rows[1:]
    last = Position(rows[-1][1], rows[-1][2]) if rows else after
    return Tail(list(dict.fromkeys(row[0] for row in rows)), last, len(rows), holds=True)


class Listener:
    """One browser. It starts at `start_cursor`; `cursor` is after all rows that were taken or are pending. It gets the
    rows of `run`; None: all.

    `is_over`: no more rows will come.
    """

    def __init__(self, on_close: Callable[[Listener], None], run: str | None = None) -> None:
        self._run = run
        self.start_cursor = self.cursor = LogPosition("", START)
        self.is_over = False
        self._must_reset = False
        self._pending: dict[str, ListedSession] = {}
        self._woken = asyncio.Event()
        self._on_close = on_close

    @property
    def has_changes(self) -> bool:
        return self._must_reset or bool(self._pending)

    def take(self) -> list[ListedSession]:
        """The rows of sessions changed since the last call, one for each; `cursor` is after them."""
        rows = list(self._pending.values())
        self._pending = {}
        return rows

    def take_reset(self) -> bool:
        """Has the listener missed changes, so that it must read the list again? Pending rows then begin at `cursor`."""
        found, self._must_reset = self._must_reset, False
        return found

    async def wait(self, timeout_s: float) -> None:
        """Wait for changes, the end or the timeout."""
        self._woken.clear()
        if self.has_changes or self.is_over:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return

    def add(self, rows: Iterable[ListedSession], cursor: LogPosition) -> None:
        """Add pending rows. Those of one session may come in any order; the latest version is kept."""
        for row in rows:
            if self._run not in (None, row["run"]):
                continue
            known = self._pending.get(row["session_id"])
            if known is None or known["version"] <= row["version"]:
                self._pending[row["session_id"]] = row
        if self.cursor.place < cursor.place:
            self.cursor = cursor
        if self._pending:
            self._woken.set()

    def reset(self, cursor: LogPosition) -> None:
        self._must_reset = True
        self._pending = {}
        self.cursor = cursor
        self._woken.set()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """End a `wait` for another reason than a change in the log."""
        self._woken.set()

    def close(self) -> None:
        self._on_close(self)


class Watch:
    """Reads the log for all listeners of this process, while there are any."""

    def __init__(self, database: Database, sessions: SessionList, log_end: LogEnd, poll_s: float = POLL_S) -> None:
        self._database = database
        self._sessions = sessions
        self._log_end = log_end
        self._poll_s = poll_s
        self._listeners: set[Listener] = set()
        self._starting = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None
        self._position = LogPosition("", START)
        self._at_gates: frozenset[str] = frozenset()
        self._stopping = False

    @property
    def is_running(self) -> bool:
        return self._polling is not None

    async def listen(self, cursor: str | None, run: str | None = None) -> Listener:
        """A new listener for a run or for all, from now on or from the cursor of an earlier stream. The caller must
        close it.

        Raises Overloaded for too many listeners, InvalidRequest for an invalid cursor, StoreUnavailable.
        """
        resumed = None if cursor is None else decode_position(cursor, "the live stream")
        if self._stopping or len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"the server is stopping, or there are {MAX_LISTENERS} listeners already")
        listener = Listener(self._closed, run)
        self._listeners.add(listener)
        try:
            async with self._starting:
                if self._polling is None:
                    await self._start()
            listener.start_cursor = listener.cursor = self._position
            if resumed is not None:
                listener.start_cursor = resumed
                await self._catch_up(listener, resumed)
        except BaseException:
            listener.close()
            raise
        return listener

    def stop(self) -> None:
        """End all listeners, since a stopping server waits for its requests."""
        self._stopping = True
        for listener in self._listeners:
            listener.end()

    async def _start(self) -> None:
        """Start polling at the end of the log. Raises StoreUnavailable."""
        self._position = await self._present()
        self._at_gates = frozenset(self._sessions.at_gates())
        self._polling = asyncio.create_task(self._poll(), name="turnlog-watch")
        self._polling.add_done_callback(self._ended)

    async def _present(self) -> LogPosition:
        return await self._database.read(lambda c: LogPosition(feed.log_epoch(c), feed.end(c)))

    async def _catch_up(self, listener: Listener, resumed: LogPosition) -> None:
        """Add the changes since the end of an earlier stream, or reset the listener. Raises StoreUnavailable."""
        if resumed.epoch != self._position.epoch:
            return listener.reset(self._position)
        missed, rows = await self._changes(resumed.place, MAX_BEHIND + 1, self._sessions.at_gates())
        if not missed.holds or missed.events > MAX_BEHIND:
            return listener.reset(self._position)
        return listener.add(rows, LogPosition(resumed.epoch, missed.last))

    async def _changes(
        self, after: Position, limit: int, at_gates: Mapping[str, bool], others: Collection[str] = ()
    ) -> tuple[Tail, list[ListedSession]]:
        """At most so many events, and the rows of their sessions and of `others`; no rows of more than MAX_BEHIND."""

        def read(connection: Connection) -> tuple[Tail, list[ListedSession]]:
            found = events_since(connection, after, limit)
            ids = [] if found.events > MAX_BEHIND else list({*found.session_ids, *others})
            return found, self._sessions.rows(connection, ids, at_gates)

        return await self._database.read(read)

    async def _poll(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                while await self._has_changed() and await self._read_new() == BATCH:
                    pass
                failed = False
            except AppError as error:
                if not failed:
                    log.warning("the event log cannot be read, listeners of the page wait: %s", error)
                failed = True

    async def _has_changed(self) -> bool:
        """Raises StoreUnavailable."""
        end = (await self._log_end.now()).last
        return end != self._position.place or frozenset(self._sessions.at_gates()) != self._at_gates

    async def _read_new(self) -> int:
        """Read new events and notify the listeners. Returns the number of events. Raises StoreUnavailable."""
        at_gates = self._sessions.at_gates()
        came_or_went = at_gates.keys() ^ self._at_gates
        new, rows = await self._changes(self._position.place, BATCH, at_gates, came_or_went)
        if not new.holds:
            log.warning(
                "the event at %s is no longer in the log: listeners of the page reload the list", self._position
            )
            self._position = await self._present()
            for listener in self._listeners:
                listener.reset(self._position)
            return 0
        self._at_gates = frozenset(at_gates)
        self._position = LogPosition(self._position.epoch, new.last)
        for listener in self._listeners:
            listener.add(rows, self._position)
        return new.events

    def _ended(self, polling: asyncio.Task[None]) -> None:
        """The polling task has ended: cancelled without listeners, or failed, so that listeners must reconnect."""
        if polling.cancelled():
            return
        log.error("unexpected error while following the event log", exc_info=polling.exception())
        if self._polling is polling:
            self._polling = None
        for listener in self._listeners:
            listener.end()

    def _closed(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._polling is not None:
            self._polling.cancel()
            self._polling = None
