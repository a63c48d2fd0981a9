"""The one connection that writes to an SQLite file, and the thread that owns it.

A durable batch runs on the thread, where its fsync holds nobody up. A small batch that needs no fsync (claims) runs on
the event loop while the thread is idle: it takes tens of microseconds, less than handing it over and back. So does the
commit of a turn that is alone in flight, as long as the disk is quick. The log file is checkpointed between batches,
not inside a commit that somebody waits for.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import literal_column, select

from app.errors import StartupError, StoreLocked, StoreLost, StoreUnavailable
from app.store.broken import damage
from app.store.dialect import MIN_SQLITE, PRAGMAS, SqliteTx, Tx, is_busy
from app.store.lock import SqliteLock
from app.store.ports import LOCKED_S, Committed
from app.store.schema import events

T = TypeVar("T")

log = logging.getLogger("turnlog.sqlite")

BUSY_POLL_S = 0.005
"""How often a lock that somebody else holds is asked for. The thread has other things to do in between."""

QUICK_S, QUICK_SYNCS = 0.0005, 16
"""A durable transaction of the only turn in flight runs on the event loop where the last so many took less."""

CHECKPOINT_BYTES = 32 << 20
"""Bytes in the log file, roughly, after which it is moved into the database."""

ROW_BYTES = 4096
"""What a changed row costs the log file beside its content: about a page."""

RESERVED_LOG_BYTES = 32 + 4062 * (24 + 4096)
"""What the first segment of SQLite's shared memory indexes: a header, and as many frames of a page.

A frame more on a full disk would be in the file, but could be in no index: the next process would not have the room to
open the file (`SQLITE_IOERR_SHMSIZE`).
"""

LONG_LOG_BYTES = 64 << 20
"""A log file begins anew only while nobody reads from it. Where readers follow upon each other it grows past this, and
the next write is kept waiting until those who read have ended."""

READERS_END_MS = 100
"""How long: reads take milliseconds. A backup takes longer, and does not hold up writes more than that."""

EMPTY_TRIES = 50

FREE_BYTES = 64 << 20
"""Free space kept in the file for what is written next; more than this and a quarter of the file is given back."""

GIVE_BACK_PAGES = 1000
"""In one step: some milliseconds."""

_LAST_IN_ORDER = select(events.c.position).order_by(events.c.tx.desc(), events.c.position.desc()).limit(1)
_LAST_WRITTEN = select(events.c.position).order_by(literal_column("events.rowid").desc()).limit(1)

NEVER_REACHED = 1 << 40
"""The first position where a damaged file does not say which was the last: places must not be given out twice."""


class SqliteWriter:
    """Write transactions on the file at `path`, one at a time. `committed` is told of durable ones.

    None is begun on a file that `lock` has lost.
    """

    def __init__(self, path: Path, committed: Committed, lock: SqliteLock) -> None:
        self._path = path
        self._lock = lock
        self._committed = committed
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="turnlog-writer", daemon=True)
        self._on_thread = 0
        self._durable: bool | None = None
        self._synced_s = deque([math.inf] * QUICK_SYNCS, QUICK_SYNCS)
        self._checkpointed_at = 0
        self._content_bytes = 0
        self._checkpointing: asyncio.Task[None] | None = None
        self.connection: sqlite3.Connection
        self._tx: SqliteTx

    async def open(self) -> None:
        """Raises StartupError where SQLite is too old, sqlite3.Error; it may be tried again then."""
        if not self._thread.is_alive():
            self._thread.start()
        await self._hop(self._open)

    async def close(self) -> None:
        if self._checkpointing is not None:
            await self._checkpointing
        await self._hop(self.connection.close)
        self._jobs.put(None)
        self._thread.join()

    async def write(
        self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool, size: int, until: float | None
    ) -> T:
        """Run `function`, which writes about `size` bytes, in one transaction.

        Raises StoreLocked where somebody else holds the lock `until` then, in the loop's time, by default for LOCKED_S;
        sqlite3.Error, OSError, StoreLost. Nothing is written then.
        """
        if runs_inline and not self._on_thread and (not durable or self._is_disk_quick):
            try:
                result = self._transact(function, durable)
            except StoreLocked:
                result = await self._patiently(lambda: self._transact(function, durable), until)
            if not durable:
                return result
        else:
            result = await self._patiently(lambda: self._transact(function, durable), until)
        self._content_bytes += size
        rows = self.connection.total_changes - self._checkpointed_at
        if self._content_bytes + rows * ROW_BYTES > CHECKPOINT_BYTES:
            self._checkpointed_at, self._content_bytes = self.connection.total_changes, 0
            self._checkpointing = asyncio.ensure_future(self._checkpoint_beside())
        return result

    @property
    def _is_disk_quick(self) -> bool:
        """Did each of the last commits reach the disk sooner than a thread would have been woken for it?"""
        return max(self._synced_s) < QUICK_S

    async def _patiently(self, transact: Callable[[], T], until: float | None) -> T:
        clock = asyncio.get_running_loop().time
        until = clock() + LOCKED_S if until is None else until
        while True:
            try:
                return await self._hop(transact)
            except StoreLocked:
                if clock() >= until:
                    raise
            await asyncio.sleep(BUSY_POLL_S)

    async def _checkpoint_beside(self) -> None:
        try:
            await self._hop(self._move_log)
        except (sqlite3.Error, OSError) as error:
            log.warning("the log file was not moved into the database, and grows: %s", error)

    async def empty_log_file(self) -> None:
        """Move everything out of the log file and cut it to nothing.

        A reader may hold it for a moment. Raises StoreUnavailable where one does for long.
        """
        for _ in range(EMPTY_TRIES):
            if await self._hop(lambda: self._checkpoint("TRUNCATE")):
                return
            await asyncio.sleep(0.1)
        raise StoreUnavailable("readers keep the database's log file from being emptied")

    async def give_back(self) -> None:
        """Shorten the file by its free pages, beyond those that will be needed again, a few at a time."""
        more = True
        while more:
            more = await self._hop(self._vacuum)
            await asyncio.sleep(0.01)

    def _vacuum(self) -> bool:
        """Is there more to give back?"""
        pages, free, size = (
            self.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        surplus = free - max(pages // 4, FREE_BYTES // size)
        if surplus <= 0:
            return False
        # As a script, which is stepped to its end: `execute` steps once, and that frees one page.
        self.connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, GIVE_BACK_PAGES)})")
        return bool(surplus > GIVE_BACK_PAGES)

    async def _hop(self, function: Callable[[], T]) -> T:
        """Run on the thread; until it has ended, awaited or not, the connection is the thread's alone."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._on_thread += 1
        self._jobs.put((function, outcome))
        return await outcome

    def _work(self) -> None:
        """The thread: one job after the other, until None. Its plain queue costs less than an executor's futures."""
        while (job := self._jobs.get()) is not None:
            function, outcome = job
            result: Any = None
            fault: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed over to whoever waits for it
                fault = error
            outcome.get_loop().call_soon_threadsafe(self._settle, outcome, result, fault)

    def _settle(self, outcome: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
        self._on_thread -= 1
        if outcome.cancelled():
            return
        if fault is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(fault)

    def _open(self) -> None:
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise StartupError(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 or newer is needed")
        connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in PRAGMAS:
                connection.execute(pragma)
            last = _last_position(connection)
        except sqlite3.Error:
            connection.close()
            raise
        try:
            # What a predecessor erased, and died before it was out of the log file.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the log file could not be emptied, and with it what has been erased: %s", error)
        self._reserve_log()
        self.connection = connection
        self._tx = SqliteTx(connection, last + 1)

    def _reserve_log(self) -> None:
        """Make the log file as long as it will be: an fsync of a file that grows takes half as long again.

        SQLite takes what stands behind the last valid frame for nothing, zeros as well as old frames. Where there is no
        room it stays as it is.
        """
        with open(f"{self._path}-wal", "r+b", buffering=0) as file:
            end = at = file.seek(0, os.SEEK_END)
            try:
                while at < RESERVED_LOG_BYTES:
                    at += file.write(bytes(RESERVED_LOG_BYTES - at))
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(end)
                log.warning("the log file could not be made as long as it will be, its commits are slower: %s", error)

    def _transact(self, function: Callable[[Tx], T], durable: bool) -> T:
        connection = self.connection
        if durable != self._durable:
            connection.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            self._durable = durable
        self._begin()
        try:
            self._require_own()
            result = function(self._tx)
            began = time.perf_counter()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if durable:
            took_s = time.perf_counter() - began
            self._synced_s.append(took_s)
            self._committed(took_s)
        return result

    def _require_own(self) -> None:
        """What is written to a file without its name is lost with this process. Raises StoreLost, OSError."""
        reason = self._lock.lost()
        if reason is not None:
            raise StoreLost(reason)

    def _begin(self) -> None:
        """Raises StoreLocked."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if is_busy(error):
                raise StoreLocked(f"the database answered {error.sqlite_errorname}: its lock is held") from error
            raise

    def _move_log(self) -> None:
        self._checkpoint("PASSIVE")
        if os.path.getsize(f"{self._path}-wal") <= LONG_LOG_BYTES:
            return
        self.connection.execute(f"PRAGMA busy_timeout = {READERS_END_MS}")
        try:
            self._checkpoint("RESTART")
        finally:
            self.connection.execute("PRAGMA busy_timeout = 0")

    def _checkpoint(self, mode: str) -> bool:
        """Was all of the log file moved?"""
        (busy, _, _) = self.connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        return not busy


def _last_position(connection: sqlite3.Connection) -> int:
    """The largest that was given out. The order's index and the rows are both asked, for either may be damaged."""
    tx = SqliteTx(connection, 1)
    found: list[int] = []
    for statement in (_LAST_IN_ORDER, _LAST_WRITTEN):
        try:
            row = tx.one(statement, {})
        except sqlite3.Error as error:
            why = damage(error)
            if why is None:
                raise
            log.warning("the end of the events cannot be read (%s): run ops.verify", why)
            continue
        found += [place for place in row or (0,) if isinstance(place, int)]
    return max(found, default=NEVER_REACHED)
