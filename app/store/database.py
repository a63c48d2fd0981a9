"""One database: pooled connections for reads, others for writes.

`read` runs a Core function on a connection, on SQLite on a thread. `write` runs a batch in one transaction: on SQLite
on the thread that owns the writing connection (so that its fsync blocks nobody else), on PostgreSQL on a separate pool,
so that reads do not delay writes.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql import Executable

from app.domain.events import UnknownEvent
from app.errors import StoreDamaged, StoreFull, StoreLost, StoreUnavailable
from app.process import uncancelled
from app.store import feed
from app.store.damage import SAVEPOINTS, BrokenRow, Unreadable, damage
from app.store.database_url import driver_arguments
from app.store.dialect import (
    Compiler,
    ConnectionLost,
    Parameters,
    Row,
    StorePoints,
    Tx,
    WriteConflict,
    is_conflict,
    store_error,
)
from app.store.opening import (
    SqliteLock,
    acquire,
    file_of,
    require_head,
    revision_head,
    revision_of,
    unopened,
    upgrade,
)
from app.store.ports import READERS, Committed
from app.store.postgres import (
    DRIVER_ERRORS,
    RECYCLE_S,
    PostgresAutocommit,
    PostgresWriter,
    Reconnect,
    answered,
    is_lost,
    require_usable,
    warn_of_weak_promises,
)
from app.store.sqlite import SqliteReads, SqliteWriter, driver_rows, engine_for_migrations, open_reads, open_reads_only
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from app.store.ports import Bucket

T = TypeVar("T")

LANES = 3
"""Open PostgreSQL transactions of one process: while one waits for the disk, the next is filled. One costs less CPU and
has a worse p99, six the reverse."""

SPARE_WRITERS = 3
"""More connections for writes: operations without a session, the heartbeat, ending dead processes."""

CONNECT_S, ANSWER_S = 5, 20
"""How long PostgreSQL may take to accept a connection, and to answer a read."""

NO_ROOM = "the disk is full: the database can only be opened for reads"

_FAULTS = (DBAPIError, PoolTimeout, OSError, sqlite3.Error, BrokenRow, *DRIVER_ERRORS)

ROOT = Path(__file__).resolve().parents[2]


def create_engine(url: str, answer_s: float | None = ANSWER_S) -> AsyncEngine:
    """The engine for migrations, which take as long as they need: `answer_s` None."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return _postgres_engine(parsed, READERS, answer_s)
    return engine_for_migrations(parsed)


def _postgres_engine(url: URL, connections: int, answer_s: float | None = ANSWER_S) -> AsyncEngine:
    """With `?prepared_statement_cache_size=0` statements have no names, as older transaction poolers require."""
    from sqlalchemy.ext.asyncio import create_async_engine  # it brings the ORM, which takes a tenth of a start

    url, arguments = driver_arguments(url, CONNECT_S)
    arguments["command_timeout"] = answer_s
    if url.query.get("prepared_statement_cache_size") == "0":
        arguments |= {"statement_cache_size": 0, "prepared_statement_name_func": str}
    return create_async_engine(
        url, pool_size=connections, max_overflow=0, pool_recycle=RECYCLE_S, connect_args=arguments
    )


async def _dispose(engine: AsyncEngine) -> None:
    """Close the pool's connections; abandon those whose server does not answer."""
    try:
        async with asyncio.timeout(CONNECT_S):
            await engine.dispose()
    except TimeoutError:
        await engine.dispose(close=False)


async def revision_without_room(url: str) -> str | None:
    """The revision of an SQLite file on a full disk; None if it cannot be read either."""
    return _revision_in_file(make_url(url), open_reads_only)


def _revision_in_file(url: URL, opening: Callable[[URL], SqliteReads]) -> str | None:
    opened = opening(url)
    try:
        return opened.read_here(revision_of)
    except (DBAPIError, OSError):
        return None
    finally:
        opened.close()


def bring_up_to_date(url: str) -> None:
    """Run the migrations, unless the database is at this code's revision. Raises StartupError."""
    lock = sqlite_lock(url)
    if lock is not None:  # the migration's own error would speak of a schema change that nobody asked for
        acquire(lock, url)
        lock.release()
    if asyncio.run(_revision(url)) != revision_head():
        upgrade(url)


async def _revision(url: str) -> str | None:
    """None also for an SQLite file that cannot be read: a migration says why. Raises StartupError."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":  # reading would make the file
        return _revision_in_file(parsed, open_reads) if file_of(parsed).exists() else None
    engine = create_engine(url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(revision_of)
    except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
        raise unopened(url, error) from error
    finally:
        await _dispose(engine)


def sqlite_lock(url: str, *, create: bool = False) -> SqliteLock | None:
    """The lock that reserves an SQLite file for one process; None for PostgreSQL.

    The kernel releases it when the process dies, so its holder knows that all others are dead. `create`: create a
    missing file.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    return SqliteLock(Path(parsed.database or ""), create=create)


def _raise_if_full(error: BaseException) -> None:
    """Raises StoreFull if the driver's error means that."""
    full = store_error(error)
    if isinstance(full, StoreFull):
        raise full from error


def _ignored(reason: str) -> None: ...


class SharedLock:
    """`async with` is shared; `alone` waits until all have left, and keeps others waiting meanwhile."""

    def __init__(self) -> None:
        self._active = 0
        self._has_left = asyncio.Event()
        self._alone = asyncio.Lock()

    async def __aenter__(self) -> None:
        while self._alone.locked():
            async with self._alone:
                pass
        self._active += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active -= 1
        self._has_left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._alone:
            while self._active:
                self._has_left.clear()
                await self._has_left.wait()
            yield


class Database:
    """The store's connections. Call `open` before use and `close` after; raises StartupError if it cannot serve.

    `committed` is called after each durable transaction. `lost` is called once, with the reason, if this process loses
    its SQLite file, or a PostgreSQL database is migrated under it: nothing is written from then on. `bucket` holds
    replay payloads. `points`: what features write with the kernel; one who changes no session may give empty ones.
    `blocking`: a read from SQLite may hold up the event loop, for a process that has nothing else to do. `lease_s`: a
    process counts as dead so long after its last heartbeat; who opens a database of another revision is told of others.
    """

    def __init__(
        self,
        url: str,
        committed: Committed = lambda seconds: None,
        lost: Callable[[str], None] = _ignored,
        bucket: Bucket | None = None,
        *,
        points: StorePoints,
        blocking: bool = False,
        lease_s: float | None = None,
    ) -> None:
        self.url = url
        self.points = points
        parsed = make_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._sqlite_reads = open_reads(parsed) if self.is_sqlite else None
        self._sqlite_compiler = Compiler(sqlite.dialect(paramstyle="qmark"))
        self._blocking = blocking
        self._lease_s = lease_s
        self.is_read_only = False
        self._readers = SharedLock()
        self._lock = sqlite_lock(url)
        self._on_lost = lost
        self._lost: str | None = None
        self._sqlite = None if self._lock is None else SqliteWriter(file_of(url), committed, self._lock, self.points)
        self._reconnect = Reconnect()
        self._reading = None if self.is_sqlite else _postgres_engine(parsed, READERS)
        self._writing = None if self.is_sqlite else _postgres_engine(parsed, LANES + SPARE_WRITERS)
        self._postgres = (
            None if self._writing is None else PostgresWriter(self._writing, self._reconnect, committed, self.points)
        )
        self._autocommit = None if self._reading is None else PostgresAutocommit(self._reading)
        self._opened = False
        self.unreadable = Unreadable()
        self.bucket = bucket

    @property
    def lanes(self) -> int:
        """How many write transactions may be open at a time."""
        return 1 if self.is_sqlite else LANES

    async def open(self) -> None:
        """Open the store. If the disk is full, an SQLite file is opened `is_read_only`; see `reopen`."""
        if self._lock is not None:
            acquire(self._lock, self.url)
        try:
            await self._open()
        except StoreFull as full:
            if not self.is_sqlite:
                raise unopened(self.url, full) from full
            await self._open_to_read()

    async def reopen(self) -> None:
        """Try to open a read-only file for writes, between two reads.

        Raises StoreFull while there is still no room, StoreLost, StartupError.
        """
        async with self._readers.alone():
            self._require_own()
            self._read_by(open_reads)
            try:
                await self._open()
            except StoreFull:
                self._read_by(open_reads_only)
                raise
            self.is_read_only = False

    async def _open_to_read(self) -> None:
        """Raises StartupError."""
        self._read_by(open_reads_only)
        self.is_read_only = True
        try:
            await self._check_revision()
        except StoreFull as full:
            raise unopened(self.url, full) from full

    def _read_by(self, opening: Callable[[URL], SqliteReads]) -> None:
        """Close all connections first: connections to one file share its memory, and one reader makes all of them
        readers."""
        assert self._sqlite_reads is not None
        self._sqlite_reads.close()
        self._sqlite_reads = opening(make_url(self.url))

    def _require_own(self) -> None:
        """Raises StoreLost."""
        reason = None if self._lock is None else self._lock.lost()
        if reason is not None:
            self._report_lost(reason)
            raise StoreLost(reason)

    def _report_lost(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._on_lost(reason)

    async def _open(self) -> None:
        """Raises StartupError, StoreFull."""
        await self._check_revision()
        if self._sqlite is not None:
            try:
                await self._sqlite.open()
            except (sqlite3.Error, OSError) as error:
                _raise_if_full(error)
                raise unopened(self.url, error) from error
        self._opened = True

    async def close(self) -> None:
        try:
            if self._sqlite is not None and self._opened:
                await self._sqlite.close()
        finally:
            if self._autocommit is not None:
                await self._autocommit.connections.close()
            if self._postgres is not None:
                await self._postgres.connections.close()
            if self._sqlite_reads is not None:
                self._sqlite_reads.close()
            for engine in filter(None, (self._reading, self._writing)):
                await _dispose(engine)
            if self._lock is not None:
                self._lock.release()

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
    ) -> T:
        """Run `function` on a connection.

        On SQLite it runs on a thread: it must not look at what the event loop changes. On PostgreSQL it may run twice:
        once more where the connection was lost, or a page is damaged.

        `one_moment`: all of its statements see the same state (on SQLite always). `session_id`: only this session is
        read. Raises StoreUnavailable if the database cannot answer; SessionUnreadable, StoreDamaged if it can, but
        `function` needs a damaged page and does not read around it (`store.damage`). SessionUnreadable also where
        `function` raises CorruptContent or UnknownEvent of the session.
        """
        try:
            return await self._answer(function, one_moment)
        except _FAULTS as error:
            raise await self._error_for(error, session_id) from error
        except (CorruptContent, UnknownEvent) as error:
            if session_id is None:
                raise
            raise self.unreadable.error(session_id, error) from error

    async def _answer(self, function: Callable[[Connection], T], one_moment: bool) -> T:
        if self._sqlite_reads is not None:
            if self._blocking:
                return self._sqlite_reads.read_here(function)
            # A read goes on when it is cancelled, and keeps the log file from being emptied.
            return await uncancelled(self._read_sqlite(function))
        assert self._reading is not None
        reading = self._reading
        return await self._reconnect.retrying(lambda: self._read(reading, function, one_moment))

    async def _error_for(self, error: BaseException, session_id: str | None = None) -> BaseException:
        """The error to raise for a driver's error.

        If the database still answers another query, a page is damaged; otherwise the file or the disk is.
        """
        why = damage(error)
        if why is None:
            return store_error(error) or error
        try:
            await self._answer(feed.epoch, one_moment=False)
        except _FAULTS:
            return StoreUnavailable(f"the database answered {why}")
        if session_id:
            return self.unreadable.error(session_id, f"the database answered {why}")
        return StoreDamaged(f"a page of the database is damaged ({why}): `turnlog verify` names what is lost")

    async def _read_sqlite(self, function: Callable[[Connection], T]) -> T:
        async with self._readers:
            assert self._sqlite_reads is not None
            return await self._sqlite_reads.read(function)

    async def _read(
        self, engine: AsyncEngine, function: Callable[[Connection], T], one_moment: bool, *, savepoints: bool = False
    ) -> T:
        """`savepoints`: this is the second try, after one that met a damaged page (`damage.attempt`)."""
        try:
            async with engine.connect() as connection:
                if one_moment:
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                if savepoints:
                    await connection.execution_options(**{SAVEPOINTS: True})
                return await answered(connection, function)
        except _FAULTS as error:
            if is_lost(error):
                raise ConnectionLost(type(error).__name__) from error
            if savepoints or damage(error) is None:
                raise
        return await self._read(engine, function, one_moment, savepoints=True)

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        """The driver's rows of one frequent statement, without a transaction. Raises as `read`.

        Values are as the driver returns them: those of bytes are to be checked by `damage.as_bytes`.
        """
        if self._autocommit is None:
            text, values = self._sqlite_compiler.bind(statement, parameters)
            return await self.read(partial(driver_rows, text=text, values=values))
        read_autocommit = self._autocommit
        try:
            return await self._reconnect.retrying(lambda: read_autocommit.all(statement, parameters))
        except _FAULTS as error:
            raise await self._error_for(error) from error

    async def write(
        self,
        function: Callable[[Tx], T],
        *,
        durable: bool,
        runs_inline: bool = False,
        size: int = 0,
        until: float | None = None,
    ) -> T:
        """Run `function` in one write transaction and commit it, synced to disk if `durable`.

        A commit that is not durable survives the process but not the machine: enough for claims, which are void after
        either. `runs_inline`: it takes less than a millisecond. `size`: about how many bytes of content it writes.
        `until` (the loop's time): how long to wait for SQLite's lock, by default LOCKED_S. Raises StoreFull,
        StoreUnavailable, StoreLocked, StoreLost, StoreDamaged (nothing is written then), and WriteConflict if a retry
        is safe.
        """
        if self._lost is not None:
            raise StoreLost(self._lost)
        if self.is_read_only:
            raise StoreFull(NO_ROOM)
        try:
            if self._sqlite is not None:
                return await self._sqlite.write(
                    function, durable=durable, runs_inline=runs_inline, size=size, until=until
                )
            assert self._postgres is not None
            return await self._postgres.write(function, durable=durable)
        except StoreLost as error:
            self._report_lost(str(error))
            raise
        except _FAULTS as error:
            if is_conflict(error):
                raise WriteConflict(str(error)) from error
            raise await self._error_for(error) from error

    def log_file_bytes(self) -> int | None:
        """Size of SQLite's log file in bytes; None on PostgreSQL, whose log is shared by all databases."""
        if not self.is_sqlite:
            return None
        try:
            return Path(f"{file_of(self.url)}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    async def empty_log_file(self) -> None:
        """Empty SQLite's log file; a no-op on PostgreSQL. Raises StoreUnavailable, StoreFull."""
        if self._sqlite is None:
            return
        if self.is_read_only:
            raise StoreFull(NO_ROOM)
        try:
            await self._sqlite.empty_log_file()
        except sqlite3.Error as error:
            raise store_error(error) or error from error

    async def give_back(self) -> None:
        """Return free pages to the file system if there are many; PostgreSQL's autovacuum does it itself."""
        if self._sqlite is None or self.is_read_only:
            return
        try:
            await self._sqlite.give_back()
        except sqlite3.Error as error:
            raise store_error(error) or error from error

    async def _check_revision(self) -> None:
        try:
            if self._sqlite_reads is not None:
                await self._sqlite_reads.read(require_head)
            else:
                assert self._reading is not None
                async with self._reading.connect() as connection:
                    await require_usable(connection)
                    await connection.run_sync(require_head, self._lease_s)
                    await warn_of_weak_promises(connection)
        except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
            _raise_if_full(error)
            raise unopened(self.url, error) from error
