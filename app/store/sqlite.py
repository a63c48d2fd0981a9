"""The one connection that writes to an SQLite file, and the thread that owns it.

A durable batch runs on the thread, so that its fsync blocks nobody else. A small batch without an fsync (claims) runs
on the event loop while the thread is idle: it takes tens of microseconds, less than a thread switch. So does the commit
of the only turn in flight, while the disk is quick. The log file is checkpointed between batches, never inside a commit
that a client waits for.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event, literal_column, select
from sqlalchemy.engine import URL, Engine

from app.errors import StartupError, StoreFull, StoreLocked, StoreLost, StoreUnavailable
from app.store.damage import damage
from app.store.dialect import (
    FILE_PRAGMAS,
    MIN_SQLITE,
    PRAGMAS,
    READER_CACHE,
    Row,
    StorePoints,
    Tx,
    is_busy,
    store_error,
)
from app.store.feed import forgotten_place, select_forgotten
from app.store.opening import SqliteLock, file_of
from app.store.ports import LOCKED_S, READERS, Committed
from app.store.schema import events
from app.store.sqlite_tx import SqliteTx

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

log = logging.getLogger("turnlog.sqlite")

BUSY_POLL_S = 0.005
"""Interval of retries while another program holds the lock; the thread does other work in between."""

QUICK_S, QUICK_SYNCS = 0.0005, 16
"""A durable transaction of the only turn in flight runs on the event loop if the last QUICK_SYNCS took less than
QUICK_S."""

CHECKPOINT_BYTES = 32 << 20
"""What may be in the log file before it is moved into the database."""

LOW_ROOM, SHORT_LOG_BYTES = 64 << 20, 1 << 20
"""With less free on the disk, so much may be in the log file, and it is cut to nothing afterwards: a long one would
take the room that the database needs to take its pages back, and then neither can grow."""

LOOK_COMMITS, LOOK_BYTES = 32, 1 << 20
"""Transactions, or bytes of content, between two looks at the log file. A transaction writes whole pages, so that small
turns fill it with 66 KiB each."""

MAKE_ROOM_S = 1.0
"""Interval of attempts to make room on a full disk: each may write as much as the log file has."""

LOG_MAGIC, LOG_HEADER_BYTES, FRAME_HEADER_BYTES = b"\x37\x7f\x06", 32, 24
RESERVED_LOG_BYTES = LOG_HEADER_BYTES + 4062 * (FRAME_HEADER_BYTES + 4096)
"""What the first segment of SQLite's shared memory indexes: a header and a number of page frames.

On a full disk, one more frame would be in the file but in no index, and the next process could not open the file
(`SQLITE_IOERR_SHMSIZE`).
"""

LONG_LOG_BYTES = 64 << 20
"""A log file restarts only while nobody reads from it. With constant readers it grows beyond this; then the next write
waits until current readers have ended."""

READERS_END_MS = 100
"""How long that write waits. Reads take milliseconds; a backup takes longer and does not hold up writes."""

NOT_MOVED = "the WAL could not be checkpointed, and grows: %s"

EMPTY_TRIES = 50

FREE_BYTES = 64 << 20
"""Free space kept in the file for later writes; more than this and a quarter of the file is given back."""

GIVE_BACK_PAGES = 1000
"""Pages in one step: some milliseconds."""

_LAST_IN_ORDER = select(events.c.position).order_by(events.c.tx.desc(), events.c.position.desc()).limit(1)
_LAST_WRITTEN = select(events.c.position).order_by(literal_column("events.rowid").desc()).limit(1)

NEVER_REACHED = 1 << 40
"""The first position if a damaged file does not tell the last one: positions must not be reused."""


class SqliteWriter:
    """Write transactions on the file at `path`, one at a time. `committed` is called after durable ones.

    None begins on a file that `lock` has lost.
    """

    def __init__(self, path: Path, committed: Committed, lock: SqliteLock, points: StorePoints) -> None:
        self._path = path
        self._points = points
        self._lock = lock
        self._committed = committed
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="turnlog-writer", daemon=True)
        self._thread_jobs = 0
        self._durable: bool | None = None
        self._sync_times_s = deque([math.inf] * QUICK_SYNCS, QUICK_SYNCS)
        self._commits = 0
        self._content_bytes = 0
        self._moved = (b"", 0)
        self._made_room_at = -math.inf
        self._checkpointing: asyncio.Task[None] | None = None
        self.connection: sqlite3.Connection
        self._tx: SqliteTx

    async def open(self) -> None:
        """Raises StartupError if SQLite is too old, sqlite3.Error; a retry is possible."""
        if not self._thread.is_alive():
            self._thread.start()
        await self._run_in_thread(self._open)

    async def close(self) -> None:
        if self._checkpointing is not None:
            await self._checkpointing
        await self._run_in_thread(self.connection.close)
        self._jobs.put(None)
        self._thread.join()

    async def write(
        self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool, size: int, until: float | None
    ) -> T:
        """Run `function`, which writes about `size` bytes, in one transaction.

        Raises StoreLocked if another program still holds the lock at `until` (the loop's time; by default after
        LOCKED_S), sqlite3.Error, OSError, StoreLost. Nothing is written then.
        """
        # A durable one runs on the event loop if each of the last took less time than waking a thread.
        here = runs_inline and not self._thread_jobs and (not durable or max(self._sync_times_s) < QUICK_S)
        transact = partial(self._transact, function, durable)
        try:
            result = transact() if here else await self._run_in_thread(transact)
        except StoreLocked:
            result = await self._retry_while_locked(transact, until)
        except sqlite3.Error as error:
            if not isinstance(store_error(error), StoreFull):
                raise
            self._commits, self._moved = LOOK_COMMITS, (b"", 0)  # What it holds is moved as soon as there is room.
            result = await self._run_in_thread(partial(self._make_room, transact, error))
        self._commits += 1
        self._content_bytes += size
        if self._commits >= LOOK_COMMITS or self._content_bytes >= LOOK_BYTES:
            self._commits = self._content_bytes = 0
            self._checkpointing = asyncio.ensure_future(self._checkpoint_in_background())
        return result

    def _make_room(self, transact: Callable[[], T], full: sqlite3.Error) -> T:
        """The transaction once more, after what is in the log file was moved into the database. Raises as `_transact`.

        The log file may be what fills the disk; once there is room for the database again, this is what heals it.
        """
        now = time.monotonic()
        if now < self._made_room_at + MAKE_ROOM_S:
            raise full
        self._made_room_at = now
        try:
            self._checkpoint("TRUNCATE")
        except (sqlite3.Error, OSError) as error:
            log.warning(NOT_MOVED, error)
            raise full from error
        return transact()

    async def _retry_while_locked(self, transact: Callable[[], T], until: float | None) -> T:
        clock = asyncio.get_running_loop().time
        until = clock() + LOCKED_S if until is None else until
        while True:
            await asyncio.sleep(BUSY_POLL_S)
            try:
                return await self._run_in_thread(transact)
            except StoreLocked:
                if clock() >= until:
                    raise

    async def _checkpoint_in_background(self) -> None:
        try:
            await self._run_in_thread(self._move_log)
        except (sqlite3.Error, OSError) as error:
            log.warning(NOT_MOVED, error)

    async def empty_log_file(self) -> None:
        """Move everything out of the log file and truncate it.

        Waits for readers. Raises StoreUnavailable if they take too long.
        """
        for _ in range(EMPTY_TRIES):
            if await self._run_in_thread(lambda: self._checkpoint("TRUNCATE")):
                return
            await asyncio.sleep(0.1)
        raise StoreUnavailable("readers keep the WAL from being truncated")

    async def give_back(self) -> None:
        """Return free pages to the file system, except those soon needed, a few at a time."""
        more = True
        while more:
            more = await self._run_in_thread(self._vacuum)
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
        # As a script, which runs to its end: `execute` would free one page only.
        self.connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, GIVE_BACK_PAGES)})")
        return bool(surplus > GIVE_BACK_PAGES)

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        """Run on the thread. Until it has ended, awaited or not, only the thread uses the connection."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._thread_jobs += 1
        self._jobs.put((function, outcome))
        return await outcome

    def _work(self) -> None:
        """The thread: runs jobs until None. A plain queue costs less than an executor's futures."""
        while (job := self._jobs.get()) is not None:
            function, outcome = job
            result: Any = None
            fault: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed over to whoever waits for it
                fault = error
            outcome.get_loop().call_soon_threadsafe(self._resolve, outcome, result, fault)

    def _resolve(self, outcome: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
        self._thread_jobs -= 1
        if outcome.cancelled():
            return
        if fault is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(fault)

    def _open(self) -> None:
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise StartupError(f"SQLite {sqlite3.sqlite_version} is too old: Turnlog requires 3.35 or newer")
        connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in PRAGMAS:
                connection.execute(pragma)
            last = _last_position(connection)
        except sqlite3.Error:
            connection.close()
            raise
        try:
            # A previous process may have died before what it erased left the log file.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the WAL could not be truncated, and still holds what has been erased: %s", error)
        self._reserve_log()
        self.connection = connection
        self._tx = SqliteTx(connection, last + 1, self._points)

    def _reserve_log(self) -> None:
        """Extend the log file to its final length: an fsync of a growing file takes half as long again.

        SQLite ignores what follows the last valid frame. If there is little room, the file stays as it is.
        """
        disk = os.statvfs(self._path)
        if disk.f_bavail * disk.f_frsize < LOW_ROOM + RESERVED_LOG_BYTES:
            return
        with open(f"{self._path}-wal", "r+b", buffering=0) as file:
            end = at = file.seek(0, os.SEEK_END)
            try:
                while at < RESERVED_LOG_BYTES:
                    at += file.write(bytes(RESERVED_LOG_BYTES - at))
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(end)
                log.warning("the WAL could not be preallocated, commits are slower: %s", error)

    def _transact(self, function: Callable[[Tx], T], durable: bool) -> T:
        connection = self.connection
        if durable != self._durable:
            connection.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
            self._durable = durable
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if is_busy(error):
                raise StoreLocked(f"the database answered {error.sqlite_errorname}: its lock is held") from error
            raise
        try:
            # Writes to a file that was deleted or replaced would be lost with this process.
            if (reason := self._lock.lost()) is not None:
                raise StoreLost(reason)
            result = function(self._tx)
            began = time.perf_counter()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if durable:
            took_s = time.perf_counter() - began
            self._sync_times_s.append(took_s)
            self._committed(took_s)
        return result

    def _move_log(self) -> None:
        """Move the log into the database if enough has come to it since the last time."""
        salts, used = self._log_used()
        moved = self._moved[1] if self._moved[0] == salts else 0
        disk = os.statvfs(self._path)
        is_low = disk.f_bavail * disk.f_frsize < LOW_ROOM
        if used - moved < (SHORT_LOG_BYTES if is_low else CHECKPOINT_BYTES):
            return
        self._moved = (salts, used)
        if is_low:
            self._checkpoint("TRUNCATE")
            return
        self._checkpoint("PASSIVE")
        if os.path.getsize(f"{self._path}-wal") <= LONG_LOG_BYTES:
            return
        self.connection.execute(f"PRAGMA busy_timeout = {READERS_END_MS}")
        try:
            self._checkpoint("RESTART")
        finally:
            self.connection.execute("PRAGMA busy_timeout = 0")

    def _log_used(self) -> tuple[bytes, int]:
        """The salts of the log file, other ones each time that it begins anew, and its bytes in use: the frames up to
        the first with other salts.

        Python's module does not tell them, and the file's size says nothing: it is reserved, and used again from its
        beginning. https://www.sqlite.org/fileformat.html#walformat
        """
        with open(f"{self._path}-wal", "rb", buffering=0) as file:
            header = file.read(LOG_HEADER_BYTES)
            if not header.startswith(LOG_MAGIC):
                return b"", 0  # It is empty, but for what is reserved.
            frame, salts = FRAME_HEADER_BYTES + int.from_bytes(header[8:12]), header[16:24]

            def is_used(number: int) -> bool:
                return os.pread(file.fileno(), 8, LOG_HEADER_BYTES + number * frame + 8) == salts

            frames = range((os.fstat(file.fileno()).st_size - LOG_HEADER_BYTES) // frame)
            return salts, bisect.bisect_left(frames, True, key=lambda number: not is_used(number)) * frame

    def _checkpoint(self, mode: str) -> bool:
        """Was the whole log file moved?"""
        (busy, _, _) = self.connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        return not busy


def _last_position(connection: sqlite3.Connection) -> int:
    """The largest position in use. Both the order's index and the rows are read, since either may be damaged. The
    places of sessions that were taken out of the log are not given again."""
    tx = SqliteTx(connection, 1, StorePoints())
    positions: list[int] = []
    for statement in (_LAST_IN_ORDER, _LAST_WRITTEN):
        try:
            row = tx.one(statement, {})
        except sqlite3.Error as error:
            why = damage(error)
            if why is None:
                raise
            log.warning("the end of the events cannot be read (%s): run `turnlog verify`", why)
            continue
        positions += [place for place in row or (0,) if isinstance(place, int)]
    gone = tx.one(select_forgotten, {})
    return max(max(positions, default=NEVER_REACHED), forgotten_place(None if gone is None else gone[0]).position)


# Connections for migrations, for reads, and for reads while the disk is full.


class SqliteReads:
    """Runs each read whole on a thread with a connection of its own.

    aiosqlite sends every call of the driver to a thread and back: the read of one row took 0.55 ms of CPU with it, and
    takes 0.16 ms so.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="sqlite-read")

    async def read(self, function: Callable[[Connection], T]) -> T:
        """A cancelled read goes on. Raises the driver's errors."""
        run = partial(copy_context().run, self.read_here, function)  # log lines name their request
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def read_here(self, function: Callable[[Connection], T]) -> T:
        """As `read`, on the calling thread."""
        with self._engine.connect() as connection:
            return function(connection)

    def close(self) -> None:
        """No read is running any more."""
        self._threads.shutdown()
        self._engine.dispose()


def driver_rows(connection: Connection, text: str, values: Sequence[Any]) -> Sequence[Row]:
    """The rows of a compiled statement, from the driver itself: SQLAlchemy's execution takes longer than a small
    statement."""
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    rows: Sequence[Row] = raw.execute(text, values).fetchall()
    return rows


def engine_for_migrations(url: URL) -> AsyncEngine:
    from sqlalchemy.ext.asyncio import create_async_engine  # a start needs none of it

    engine = create_async_engine(url, connect_args={"timeout": LOCKED_S})
    event.listen(engine.sync_engine, "begin", _begin)
    event.listen(engine.sync_engine, "connect", _configure)
    return engine


def open_reads(url: URL) -> SqliteReads:
    """For all reads of a server and its helpers."""
    engine = _engine(url)
    event.listen(engine, "connect", _configure)
    return SqliteReads(engine)


def _configure(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA page_count")
        is_new = cursor.fetchone()[0] == 0
        for pragma in (*(FILE_PRAGMAS if is_new else ()), *PRAGMAS, READER_CACHE):
            cursor.execute(pragma)
    except BaseException:
        # Left open, it would affect how the next connection to this file can be opened.
        connection.close()
        raise
    cursor.close()


def open_reads_only(url: URL) -> SqliteReads:
    """For a file that cannot be opened otherwise, because the disk has no room for the shared memory.

    Each connection has its own index of the log. Nobody may write to the file meanwhile; a connection for writes in
    this process would become a reader too.
    """
    file = f"file:{quote(str(file_of(url)))}"
    engine = _engine(url.set(database=file, query={"mode": "ro", "readonly_shm": "1", "uri": "true"}))

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(READER_CACHE)
        cursor.close()

    return SqliteReads(engine)


def _engine(url: URL) -> Engine:
    engine = create_engine(
        url.set(drivername="sqlite"),
        pool_size=READERS,
        max_overflow=0,
        connect_args={"timeout": LOCKED_S, "check_same_thread": False},
    )
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
