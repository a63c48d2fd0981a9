"""Up, down, up again, with and without data, on both databases; and an application that looks before it serves."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from helpers.databases import alembic_config, connected, database_at, migrate, run_module
from helpers.store import Store
from sqlalchemy import inspect, select
from sqlalchemy.engine import make_url

from app.domain.fold import fold
from app.domain.session import Session
from app.errors import StartupError
from app.store import reads
from app.store.engine import Database, create_engine, sqlite_lock
from app.store.revision import revision_head, revision_of
from app.store.schema import metadata, sessions

TABLES = set(metadata.tables)


def tables(url: str) -> set[str]:
    async def look() -> set[str]:
        async with connected(url) as connection:
            names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        return {name for name in names if not re.fullmatch(r"\w+_p\d+", name)}

    return asyncio.run(look())


async def _write_and_read(url: str) -> Session | None:
    async with database_at(url) as database, Store.over(database) as store:
        if await store.head("s") is None:
            await store.create("s")
        await store.take_turn("s")
        return fold("s", await database.read(lambda c: reads.load_events(c, "s")))


def test_upgrade_makes_the_tables_and_upgrading_again_changes_nothing(empty_url: str) -> None:
    migrate(empty_url)
    assert tables(empty_url) == TABLES | {"alembic_version"}
    migrate(empty_url)
    assert tables(empty_url) == TABLES | {"alembic_version"}


def test_an_sqlite_file_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        migrate(f"sqlite+aiosqlite:///{tmp_path / 'var' / 'turnlog.db'}")
    finally:
        os.umask(before)
    assert (tmp_path / "var" / "turnlog.db").stat().st_mode & 0o777 == 0o600


def test_downgrade_with_data_leaves_nothing_and_upgrade_works_again(empty_url: str) -> None:
    migrate(empty_url)
    assert asyncio.run(_write_and_read(empty_url)) is not None
    command.downgrade(alembic_config(empty_url), "base")
    assert tables(empty_url) == {"alembic_version"}
    migrate(empty_url)
    session = asyncio.run(_write_and_read(empty_url))
    assert session is not None
    assert session.version == 3, "the data of before is gone"


def test_upgrade_with_data_keeps_it(empty_url: str) -> None:
    migrate(empty_url)
    first = asyncio.run(_write_and_read(empty_url))
    migrate(empty_url)
    second = asyncio.run(_write_and_read(empty_url))
    assert first is not None
    assert second is not None
    assert list(second.turns)[: len(first.turns)] == list(first.turns)
    assert len(second.turns) == 2


async def _close_as_the_first_revision_did(url: str) -> None:
    """A session with a turn, closed, its events under the versions that the first revision wrote."""
    async with database_at(url) as database, Store.over(database) as store:
        await store.create("old")
        await store.take_turn("old")
        await store.close("old")
    async with connected(url, writes=True) as connection:
        await connection.exec_driver_sql("UPDATE events SET version = 1")


async def _session_and_times(url: str) -> tuple[Session | None, float | None, float]:
    async with database_at(url) as database:
        rows = await database.read(lambda c: c.execute(select(sessions.c.closed_at, sessions.c.updated_at)).one())
        return fold("old", await database.read(lambda c: reads.load_events(c, "old"))), rows[0], rows[1]


def test_a_database_of_the_first_revision_is_taken_over(empty_url: str) -> None:
    migrate(empty_url)
    asyncio.run(_close_as_the_first_revision_did(empty_url))
    command.downgrade(alembic_config(empty_url), "0001")
    assert not {"chunks", "refused_replies"} & tables(empty_url)
    migrate(empty_url)
    session, closed_at, updated_at = asyncio.run(_session_and_times(empty_url))
    assert session is not None
    assert (session.status, len(session.turns), session.payloads) == ("closed", 1, {})
    assert closed_at == updated_at


def test_the_schema_in_code_and_in_migrations_are_one(database_url: str) -> None:
    """It raises where they differ; the next test sees it do so."""
    command.check(alembic_config(database_url))


def test_alembic_check_can_fail(empty_url: str) -> None:
    migrate(empty_url)

    async def change() -> None:
        async with connected(empty_url, writes=True) as connection:
            await connection.exec_driver_sql("ALTER TABLE snapshots ADD COLUMN more INTEGER")

    asyncio.run(change())
    with pytest.raises(command.util.CommandError, match="New upgrade operations"):
        command.check(alembic_config(empty_url))


def test_the_revisions_are_those_that_alembic_knows(empty_url: str) -> None:
    """A start reads them without it."""
    assert [revision_head()] == ScriptDirectory.from_config(alembic_config(empty_url)).get_heads()

    async def look() -> str | None:
        engine = create_engine(empty_url)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(revision_of)
        finally:
            await engine.dispose()

    assert asyncio.run(look()) is None
    migrate(empty_url)
    assert asyncio.run(look()) == revision_head()


def test_postgres_columns_of_compressed_content_are_not_compressed_again(postgres_url: str) -> None:
    async def look() -> dict[str, str]:
        async with connected(postgres_url) as connection:
            rows = await connection.exec_driver_sql(
                "SELECT c.relname || '.' || a.attname, a.attstorage::text FROM pg_attribute a "
                "JOIN pg_class c ON c.oid = a.attrelid WHERE c.relname IN "
                "('turns', 'blobs', 'snapshots', 'chunks', 'refused_replies')"
            )
            return {row[0]: row[1] for row in rows}

    storage = asyncio.run(look())
    compressed = ("turns.facts", "turns.wire", "blobs.data", "snapshots.data", "chunks.data", "refused_replies.data")
    for column in compressed:
        assert storage[column] in ("e", b"e"), column


def test_sqlite_is_set_up_for_vacuum_and_wal(sqlite_url: str) -> None:
    connection = sqlite3.connect(make_url(sqlite_url).database or "")
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.anyio
async def test_an_unmigrated_database_is_refused_with_one_line(empty_url: str) -> None:
    database = Database(empty_url)
    with pytest.raises(StartupError, match="alembic upgrade head") as raised:
        await database.open()
    assert "\n" not in str(raised.value)
    await database.close()


def environment(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    return {**kept, "TURNLOG_DATABASE_URL": url}


def turnlog_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "turnlog:" in line]


def serve(url: str) -> tuple[int, str]:
    done = run_module("uvicorn", "app.main:app", "--port", "0", environment=environment(url))
    return done.returncode, done.stdout + done.stderr


def test_the_application_refuses_an_unmigrated_database(empty_url: str) -> None:
    code, printed = serve(empty_url)
    assert code != 0
    (line,) = turnlog_lines(printed)
    assert "alembic upgrade head" in line
    assert "Traceback" not in printed


@pytest.fixture
def held_url(sqlite_url: str) -> Iterator[str]:
    """A migrated file that a process serves: this one holds its lock."""
    lock = sqlite_lock(sqlite_url)
    assert lock is not None
    with lock:
        yield sqlite_url


def test_a_second_process_on_one_sqlite_file_is_refused(held_url: str) -> None:
    code, printed = serve(held_url)
    assert code != 0
    (line,) = turnlog_lines(printed)
    assert f"another process (pid {os.getpid()}) serves" in line
    assert "Traceback" not in printed


def test_a_migration_under_a_running_server_is_refused(held_url: str) -> None:
    done = run_module("alembic", "upgrade", "head", environment=environment(held_url))
    assert done.returncode != 0
    (line,) = turnlog_lines(done.stderr)
    assert "stop it" in line


def test_the_documented_command_migrates(empty_url: str) -> None:
    done = run_module("alembic", "upgrade", "head", environment=environment(empty_url))
    assert done.returncode == 0, done.stderr
    assert tables(empty_url) == TABLES | {"alembic_version"}
