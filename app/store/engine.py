"""One database: reads through an async engine, writes through one connection of its own.

`read` runs a plain Core function on a pooled connection. `write` runs a batch in one transaction: on
SQLite in one hop to a thread that owns the writing connection (the group commit's single fsync holds
nobody else up), on PostgreSQL on a connection of a pool of its own, so that reads do not keep writes waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql import Executable

from app.errors import StoreDamaged, StoreFull, StoreLost, StoreUnavailable
from app.store import reads, sqlite_engine
from app.store.async_engine import AsyncEngine, create_async_engine
from app.store.broken import BrokenRow, damage
from app.store.dialect import (
    ConnectionLost,
    Parameters,
    Row,
    Tx,
    WriteConflict,
    is_conflict,
    store_error,
)
from app.store.lock import SqliteLock
from app.store.opening import acquire, unopened
from app.store.ports import Committed
from app.store.postgres import (
    DRIVER_ERRORS,
    Patience,
    PostgresAutocommit,
    PostgresWriter,
    answered,
    is_lost,
    warn_of_weak_promises,
)
from app.store.revision import require_head, revision_of
from app.store.sqlite import SqliteWriter
from app.store.turnstile import Turnstile
from app.store.unreadable import Unreadable

T = TypeVar("T")

READERS = 8
"""Pooled connections for reads, per process."""

LANES = 3
"""Transactions that one process has open on PostgreSQL at a time: while one waits for the disk, the next is filled."""

SPARE_WRITERS = 3
"""Connections for writes beside the lanes': for what is of no session in particular, the heartbeat, ends of others."""

CONNECT_S, ANSWER_S = 5, 20
"""How long PostgreSQL may take to accept a connection, and to answer a read."""

NO_ROOM = "there is no room to open the database for more than reads"

RECYCLE_S = 1800
"""Age after which a connection is made anew, so that after a failover they spread again."""

_FAULTS = (DBAPIError, PoolTimeout, OSError, sqlite3.Error, BrokenRow, *DRIVER_ERRORS)

ROOT = Path(__file__).resolve().parents[2]


def create_engine(url: str) -> AsyncEngine:
    """The engine for reads and migrations."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return _postgres_engine(parsed, READERS)
    return sqlite_engine.create(parsed, READERS)


def _postgres_engine(url: URL, connections: int) -> AsyncEngine:
    """With `?prepared_statement_cache_size=0` no statement has a name, as older poolers in transaction mode need it."""
    arguments: dict[str, Any] = {
        "timeout": CONNECT_S,
        "command_timeout": ANSWER_S,
        "server_settings": {"application_name": "turnlog"},
    }
    if url.query.get("prepared_statement_cache_size") == "0":
        arguments |= {"statement_cache_size": 0, "prepared_statement_name_func": str}
    return create_async_engine(
        url, pool_size=connections, max_overflow=0, pool_recycle=RECYCLE_S, connect_args=arguments
    )


async def _to_its_end(reading: Coroutine[Any, Any, T]) -> T:
    """The result; being cancelled is heeded when there is one.

    A read of SQLite that is cut off in the middle leaves its statement to the garbage collector, and with it a reader
    that keeps the log file from being emptied.
    """
    task = asyncio.ensure_future(reading)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise


async def _dispose(engine: AsyncEngine) -> None:
    """Close the pool's connections; those whose server does not answer the farewell are left to themselves."""
    try:
        async with asyncio.timeout(CONNECT_S):
            await engine.dispose()
    except TimeoutError:
        await engine.dispose(close=False)


async def revision_without_room(url: str) -> str | None:
    """An SQLite file's, where there is no room to open it as usual; None where it cannot be read either."""
    engine = sqlite_engine.create_reader(make_url(url), 1)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(revision_of)
    except (DBAPIError, OSError):
        return None
    finally:
        await engine.dispose()


def load_driver(url: str) -> None:
    """Import what the first connection would; opens nothing."""
    make_url(url).get_dialect().import_dbapi()


def sqlite_lock(url: str, *, create: bool = False) -> SqliteLock | None:
    """The lock that says which process an SQLite file belongs to; None for PostgreSQL.

    The kernel releases it when the process dies, so whoever holds it knows that all others are dead. `create`: the file
    is made where there is none.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    return SqliteLock(Path(parsed.database or ""), create=create)


def _raise_if_full(error: BaseException) -> None:
    """Raises StoreFull where that is what a driver's error means."""
    found = store_error(error)
    if isinstance(found, StoreFull):
        raise found from error


def _ignored(reason: str) -> None: ...


class Database:
    """The store's connections. `open` before use, `close` after; raises StartupError where it cannot serve.

    `committed` is told of each durable transaction; `lost`, once, of why the SQLite file is this process's no more:
    nothing is written from then on.
    """

    def __init__(
        self, url: str, committed: Committed = lambda seconds: None, lost: Callable[[str], None] = _ignored
    ) -> None:
        self.url = url
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self.engine = create_engine(url)
        self.is_read_only = False
        self._readers = Turnstile()
        self._lock = sqlite_lock(url)
        self._on_lost: Callable[[str], None] | None = lost
        self._sqlite = None if self._lock is None else SqliteWriter(sqlite_engine.file_of(url), committed, self._lock)
        self._patience = Patience()
        self._writing = None if self.is_sqlite else _postgres_engine(make_url(url), LANES + SPARE_WRITERS)
        self._postgres = None if self._writing is None else PostgresWriter(self._writing, self._patience, committed)
        self._autocommit = None if self.is_sqlite else PostgresAutocommit(self.engine)
        self._opened = False
        self.unreadable = Unreadable()

    @property
    def lanes(self) -> int:
        """How many transactions may be open at a time."""
        return 1 if self.is_sqlite else LANES

    async def open(self) -> None:
        """`is_read_only` afterwards: there is no room to open an SQLite file for more than reads; see `reopen`."""
        if self._lock is not None:
            acquire(self._lock, self.url)
        try:
            await self._open()
        except StoreFull as full:
            if not self.is_sqlite:
                raise unopened(self.url, full) from full
            await self._open_to_read()

    async def reopen(self) -> None:
        """Try again to open for writes what could only be opened for reads, between two reads.

        Raises StoreFull while there is still no room, StoreLost, StartupError.
        """
        async with self._readers.alone():
            self._require_own()
            await self._exchange(create_engine(self.url))
            try:
                await self._open()
            except StoreFull:
                await self._exchange(sqlite_engine.create_reader(make_url(self.url), READERS))
                raise
            self.is_read_only = False

    async def _open_to_read(self) -> None:
        """Raises StartupError."""
        await self._exchange(sqlite_engine.create_reader(make_url(self.url), READERS))
        self.is_read_only = True
        try:
            await self._check_revision()
        except StoreFull as full:
            raise unopened(self.url, full) from full

    async def _exchange(self, engine: AsyncEngine) -> None:
        """Close all connections first: those to one file share its memory, and are all readers if one is."""
        await _dispose(self.engine)
        self.engine = engine

    def _require_own(self) -> None:
        """Raises StoreLost."""
        reason = None if self._lock is None else self._lock.lost()
        if reason is not None:
            self._tell_lost(reason)
            raise StoreLost(reason)

    def _tell_lost(self, reason: str) -> None:
        if self._on_lost is not None:
            told, self._on_lost = self._on_lost, None
            told(reason)

    async def _open(self) -> None:
        """Raises StartupError, StoreFull."""
        await self._check_revision()
        if self._sqlite is not None:
            try:
                await self._sqlite.open()
            except (sqlite3.Error, OSError) as error:
                _raise_if_full(error)
                raise unopened(self.url, error) from error
        else:
            async with self.engine.connect() as connection:
                await warn_of_weak_promises(connection)
        self._opened = True

    async def close(self) -> None:
        try:
            if self._sqlite is not None and self._opened:
                await self._sqlite.close()
        finally:
            if self._autocommit is not None:
                await self._autocommit.close()
            await _dispose(self.engine)
            if self._writing is not None:
                await _dispose(self._writing)
            if self._lock is not None:
                self._lock.release()

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
        or_else: Callable[[Connection], T] | None = None,
    ) -> T:
        """Run `function` on a connection, and again where PostgreSQL went away meanwhile.

        `one_moment`: all of its statements see the same state, as they do on SQLite in any case. Where a page that it
        needs is damaged, `or_else` is run instead, which takes care not to need it. `session_id`: all that is read is
        of this session. Raises StoreUnavailable where the database cannot answer; where it does, and only what was
        asked for cannot be read: SessionUnreadable, StoreDamaged.
        """
        try:
            return await self._answer(function, one_moment)
        except _FAULTS as error:
            found = await self._meaning(error, session_id)
            if or_else is None or not isinstance(found, StoreDamaged):
                raise found from error
        return await self.read(or_else, one_moment=one_moment)

    async def _answer(self, function: Callable[[Connection], T], one_moment: bool) -> T:
        if self.is_sqlite:
            return await _to_its_end(self._read_sqlite(function))
        return await self._patience.trying(lambda: self._read(function, one_moment))

    async def _meaning(self, error: BaseException, session_id: str | None = None) -> BaseException:
        """What to raise for a driver's error.

        A page may be damaged, or the file, or the disk gone: it is the page where the database answers otherwise.
        """
        why = damage(error)
        if why is None:
            return store_error(error) or error
        try:
            await self._answer(reads.epoch, one_moment=False)
        except _FAULTS:
            return StoreUnavailable(f"the database answered {why}")
        if session_id:
            return self.unreadable.error(session_id, f"the database answered {why}")
        return StoreDamaged(f"a page of the database is damaged ({why}): run ops.verify")

    async def _read_sqlite(self, function: Callable[[Connection], T]) -> T:
        async with self._readers, self.engine.connect() as connection:
            return await connection.run_sync(function)

    async def _read(self, function: Callable[[Connection], T], one_moment: bool) -> T:
        try:
            async with self.engine.connect() as connection:
                if one_moment:
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                return await answered(connection, function)
        except _FAULTS as error:
            if is_lost(error):
                raise ConnectionLost(type(error).__name__) from error
            raise

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        """The rows of one statement that is asked many times a second. Raises as `read`."""
        if self._autocommit is None:
            return await self.read(lambda connection: connection.execute(statement, parameters).all())
        read_autocommit = self._autocommit
        try:
            return await self._patience.trying(lambda: read_autocommit.all(statement, parameters))
        except _FAULTS as error:
            raise await self._meaning(error) from error

    async def write(
        self,
        function: Callable[[Tx], T],
        *,
        durable: bool,
        runs_inline: bool = False,
        size: int = 0,
        until: float | None = None,
    ) -> T:
        """Run `function` in one write transaction and commit it, to the disk's platter where `durable`.

        What is not durable survives the process, not the machine: right for claims, which mean nothing
        after either. `runs_inline` says that it takes less than a millisecond, `size` about how many bytes of
        content it writes. `until`, in the loop's time: how long SQLite's lock is waited for, by default LOCKED_S.
        Raises StoreFull, StoreUnavailable, StoreLocked, StoreLost, StoreDamaged where it needs a damaged page; nothing
        is written then; WriteConflict where trying again is safe.
        """
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
            self._tell_lost(str(error))
            raise
        except _FAULTS as error:
            if is_conflict(error):
                raise WriteConflict(str(error)) from error
            raise await self._meaning(error) from error

    def log_file_bytes(self) -> int | None:
        """How long SQLite's log file is; None on PostgreSQL, whose log is not this database's alone."""
        if not self.is_sqlite:
            return None
        try:
            return Path(f"{sqlite_engine.file_of(self.url)}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    async def empty_log_file(self) -> None:
        """Leave nothing in SQLite's log file; a no-op on PostgreSQL. Raises StoreUnavailable, StoreFull."""
        if self._sqlite is None:
            return
        if self.is_read_only:
            raise StoreFull(NO_ROOM)
        try:
            await self._sqlite.empty_log_file()
        except sqlite3.Error as error:
            raise store_error(error) or error from error

    async def give_back(self) -> None:
        """Return free space to the file system, where there is much of it; PostgreSQL's autovacuum does it itself."""
        if self._sqlite is None or self.is_read_only:
            return
        try:
            await self._sqlite.give_back()
        except sqlite3.Error as error:
            raise store_error(error) or error from error

    async def _check_revision(self) -> None:
        try:
            async with self.engine.connect() as connection:
                found = await connection.run_sync(revision_of)
        except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
            _raise_if_full(error)
            raise unopened(self.url, error) from error
        require_head(found)
