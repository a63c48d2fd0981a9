"""One database: reads through an async engine, writes through one connection of its own.

`read` runs a plain Core function on a pooled connection. `write` runs a batch in one transaction: on
SQLite in one hop to a thread that owns the writing connection (the group commit's single fsync holds
nobody else up), on PostgreSQL on a pooled connection.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock, Timeout
from sqlalchemy import Connection, event, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from app.errors import StartupError, StoreUnavailable
from app.store import schema
from app.store.dialect import MIN_SQLITE, PRAGMAS, AlchemyTx, SqliteTx, Tx, store_error

T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0
"""How long a write waits for a foreign holder of SQLite's lock before it is a 503."""

CHECKPOINT_TRIES = 50

READERS = 8
"""Pooled connections for reads, per process."""

_LAST_POSITION = (
    select(schema.events.c.position).order_by(schema.events.c.tx.desc(), schema.events.c.position.desc()).limit(1)
)

ROOT = Path(__file__).resolve().parents[2]


def revision_head() -> str:
    """The revision that this code was written for."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    return ScriptDirectory.from_config(config).get_current_head() or ""


def create_engine(url: str) -> AsyncEngine:
    """The engine for reads and migrations; makes the folder of an SQLite file."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_async_engine(parsed, pool_size=READERS, max_overflow=READERS, pool_pre_ping=True)
    Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(parsed, pool_size=READERS, max_overflow=0, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in PRAGMAS:
            cursor.execute(pragma)
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def sqlite_lock(url: str) -> FileLock | None:
    """The lock that says which process an SQLite file belongs to; None for PostgreSQL.

    The kernel releases it when the process dies, so whoever holds it knows that all others are dead.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    path = Path(parsed.database or "").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


class Database:
    """The store's connections. `open` before use, `close` after; raises StartupError where it cannot serve."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self.engine = create_engine(url)
        self._lock = sqlite_lock(url)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turnlog-writer")
        self._writer: sqlite3.Connection | None = None
        self._tx: SqliteTx | None = None

    async def open(self) -> None:
        if self._lock is not None:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise StartupError(
                    f"another process serves {make_url(self.url).database}: SQLite is for one API process; "
                    "stop that one, run without --workers, or set TURNLOG_DATABASE_URL to PostgreSQL"
                ) from None
        await self._check_revision()
        if self.is_sqlite:
            await self._on_thread(self._open_writer)

    async def close(self) -> None:
        if self._writer is not None:
            await self._on_thread(self._writer.close)
            self._writer = None
        self._thread.shutdown()
        await self.engine.dispose()
        if self._lock is not None:
            self._lock.release()

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run `function` on a connection. Raises StoreUnavailable where the database cannot answer."""
        try:
            async with self.engine.connect() as connection:
                return await connection.run_sync(function)
        except (DBAPIError, OSError) as error:
            raise store_error(error) or error from error

    async def write(self, function: Callable[[Tx], T], *, durable: bool) -> T:
        """Run `function` in one write transaction and commit it, to the disk's platter where `durable`.

        What is not durable survives the process, not the machine: right for claims, which mean nothing
        after either. Raises StoreFull, StoreUnavailable; nothing is written then.
        """
        try:
            if self.is_sqlite:
                return await self._on_thread(lambda: self._write_sqlite(function, durable))
            async with self.engine.begin() as connection:
                if not durable:
                    await connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                return await connection.run_sync(lambda sync: function(AlchemyTx(sync)))
        except (sqlite3.Error, DBAPIError, OSError) as error:
            raise store_error(error) or error from error

    async def empty_log_file(self) -> None:
        """Move everything out of SQLite's log file and cut it to nothing; a no-op on PostgreSQL.

        A reader may hold it for a moment. Raises StoreUnavailable where one does for long.
        """
        if self._writer is None:
            return
        for _ in range(CHECKPOINT_TRIES):
            if await self._on_thread(self._checkpoint):
                return
            await asyncio.sleep(0.1)
        raise StoreUnavailable("readers keep the database's log file from being emptied")

    def _checkpoint(self) -> bool:
        assert self._writer is not None
        (busy, _, _) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _open_writer(self) -> None:
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise StartupError(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 or newer is needed")
        path = make_url(self.url).database or ""
        writer = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for pragma in PRAGMAS:
            writer.execute(pragma)
        last = SqliteTx(writer, 1).one(_LAST_POSITION, {})
        self._writer = writer
        self._tx = SqliteTx(writer, (last[0] if last else 0) + 1)

    def _write_sqlite(self, function: Callable[[Tx], T], durable: bool) -> T:
        assert self._writer is not None
        assert self._tx is not None
        writer = self._writer
        writer.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
        writer.execute("BEGIN IMMEDIATE")
        try:
            result = function(self._tx)
            writer.execute("COMMIT")
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise
        return result

    async def _check_revision(self) -> None:
        head = revision_head()
        try:
            async with self.engine.connect() as connection:
                found = await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
        except (DBAPIError, OSError) as error:
            raise StartupError(f"the database cannot be opened: {error}".splitlines()[0]) from error
        if found != head:
            raise StartupError(
                f"the database is at revision {found or 'none'}, this version needs {head}: run `alembic upgrade head`"
            )
