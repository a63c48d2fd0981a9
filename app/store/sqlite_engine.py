"""Connection pools for an SQLite file: for migrations, for reads, and for reads while the disk is full."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from app.store.dialect import FILE_PRAGMAS, PRAGMAS, READER_CACHE, Row
from app.store.ports import LOCKED_S, READERS

T = TypeVar("T")


def file_of(url: URL | str) -> Path:
    """The file with links resolved: SQLite keeps its log file beside the real file."""
    return Path(make_url(url).database or "").resolve()


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


def create(url: URL) -> AsyncEngine:
    """For migrations."""
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
