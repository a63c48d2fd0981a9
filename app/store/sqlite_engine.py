"""Connection pools for an SQLite file: the usual one, and a read-only one for a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine, make_url

from app.store.async_engine import AsyncEngine, create_async_engine
from app.store.dialect import FILE_PRAGMAS, PRAGMAS, READER_CACHE
from app.store.ports import LOCKED_S


def file_of(url: URL | str) -> Path:
    """The file with links resolved: SQLite keeps its log file beside the real file."""
    return Path(make_url(url).database or "").resolve()


def create(url: URL, connections: int) -> AsyncEngine:
    """For reads and migrations."""
    engine = _engine(url, connections)
    event.listen(engine.sync_engine, "connect", configure)
    return engine


def create_blocking(url: URL) -> Engine:
    """For reads by a process that does nothing else meanwhile: no statement goes to a thread and back, which takes as
    long as to read a session."""
    engine = create_engine(url.set(drivername="sqlite"), connect_args={"timeout": LOCKED_S})
    event.listen(engine, "begin", _begin)
    event.listen(engine, "connect", configure)
    return engine


def configure(connection: Any, _: Any) -> None:
    """Prepare a new connection of the driver. Closes it if that fails."""
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


def create_reader(url: URL, connections: int) -> AsyncEngine:
    """For a file that cannot be opened otherwise, because the disk has no room for the shared memory.

    Each connection has its own index of the log. Nobody may write to the file meanwhile; a connection for writes in
    this process would become a reader too.
    """
    file = f"file:{quote(str(file_of(url)))}"
    engine = _engine(url.set(database=file, query={"mode": "ro", "readonly_shm": "1", "uri": "true"}), connections)

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(READER_CACHE)
        cursor.close()

    return engine


def _engine(url: URL, connections: int) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=connections, max_overflow=0, connect_args={"timeout": LOCKED_S})
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
