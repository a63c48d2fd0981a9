"""The migration: the tables as the schema in code has them, on both databases, and stores of other versions."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from fault.table import Tally
from helpers.databases import alembic_config, connected, migrate, run_module
from sqlalchemy import Connection, inspect

from app.composition import metadata
from app.errors import StartupError
from app.extras import release
from app.store.damage import Content
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.opening import MIGRATIONS, revision_head, revision_of

T = TypeVar("T")


def on(url: str, work: Callable[[Connection], T]) -> T:
    async def done() -> T:
        async with connected(url, writes=True) as connection:
            return await connection.run_sync(work)

    return asyncio.run(done())


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def described(connection: Connection) -> dict[str, Any]:
    """All that the database knows of each table, but PostgreSQL's storage settings and what is searched there."""
    inspector = inspect(connection)
    columns = {name: inspector.get_columns(name) for name in sorted(tables(connection) - {"alembic_version"})}
    return {
        name: {
            "columns": [{**one, "type": repr(one["type"])} for one in columns[name]],
            "key": inspector.get_pk_constraint(name),
            "unique": inspector.get_unique_constraints(name),
            "indexes": {one["name"]: _index(one) for one in inspector.get_indexes(name)},
            "options": inspector.get_table_options(name) if connection.dialect.name == "sqlite" else {},
        }
        for name in columns
    }


def _index(reflected: Any) -> dict[str, Any]:
    options = {key: str(value) for key, value in reflected.get("dialect_options", {}).items()}
    return {**reflected, "dialect_options": options}


def test_the_migration_makes_the_tables_of_the_schema(empty_url: str) -> None:
    on(empty_url, metadata().create_all)
    in_code = on(empty_url, described)
    on(empty_url, metadata().drop_all)
    migrate(empty_url)
    assert on(empty_url, described) == in_code
    migrate(empty_url)
    assert on(empty_url, tables) == {*metadata().tables, "alembic_version"}


@pytest.mark.parametrize(
    ("file", "digest"),
    [("0001_first.postgresql.sql", "d3e898157e510138"), ("0001_first.sqlite.sql", "98b7626b928c8ae5")],
)
def test_what_a_release_has_made_stays(file: str, digest: str) -> None:
    """Stores have it: another schema is another migration."""
    assert hashlib.sha256((MIGRATIONS / "versions" / file).read_bytes()).hexdigest()[:16] == digest


def test_alembic_finds_no_difference_and_can_find_one(empty_url: str) -> None:
    migrate(empty_url)
    command.check(alembic_config(empty_url))
    on(empty_url, lambda connection: connection.exec_driver_sql("ALTER TABLE snapshots ADD COLUMN more INTEGER"))
    with pytest.raises(command.util.CommandError, match="New upgrade operations"):
        command.check(alembic_config(empty_url))


def test_postgresql_neither_samples_content_nor_compresses_it_again(postgres_url: str) -> None:
    found = on(
        postgres_url,
        lambda connection: {
            (row[0], row[1]): (row[2], row[3])
            for row in connection.exec_driver_sql(
                "SELECT attrelid::regclass::text, attname, attstorage::text, attstattarget FROM pg_attribute "
                "JOIN pg_class ON pg_class.oid = attrelid WHERE relkind = 'r'"
            )
        },
    )
    content = {
        (table.name, column.name)
        for table in metadata().tables.values()
        for column in table.columns
        if isinstance(column.type, Content)
    }
    plain = {("events", "data"), ("fleet_events", "data")}
    assert {place for place in content if found[place] != ("e", 0)} == plain
    assert found["events", "data"] == ("x", 0)
    texts = {("sessions", "note"), ("sessions", "tags"), ("sessions", "annotated")}
    assert {found[place][1] for place in texts} == {0}


def test_an_sqlite_file_is_set_up_for_vacuum_and_wal_and_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "var" / "turnlog.db"
    before = os.umask(0o022)
    try:
        migrate(f"sqlite+aiosqlite:///{file}")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_revisions_are_those_that_alembic_knows(empty_url: str) -> None:
    """A start reads them without it."""
    assert [revision_head()] == ScriptDirectory.from_config(alembic_config(empty_url)).get_heads()
    assert on(empty_url, revision_of) is None
    migrate(empty_url)
    assert on(empty_url, revision_of) == revision_head()


NEWER = (
    f"release 9.1.0 made it, and this is {release()}: install 9.1.0 or newer, "
    "or restore the backup from before that upgrade"
)
EARLIER = "a version from before the first release made it: export it with the checkout that made it"


def refusal(url: str) -> str:
    async def start() -> None:
        database = Database(url, points=StorePoints())
        try:
            await database.open()
        finally:
            await database.close()

    with pytest.raises(StartupError) as raised:
        asyncio.run(start())
    return str(raised.value)


@pytest.mark.fault(10, "a process meets a store of another version")
def test_a_store_of_another_version_is_refused_with_one_line_and_left_alone(database_url: str, tally: Tally) -> None:
    on(database_url, lambda connection: connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0017'"))
    before = on(database_url, described)
    for change, todo in (
        ("UPDATE store_meta SET value = '9.1.0' WHERE key = 'release'", NEWER),
        ("DELETE FROM store_meta WHERE key = 'release'", EARLIER),
    ):
        on(database_url, lambda connection: connection.exec_driver_sql(change))  # noqa: B023
        migrating = run_module("alembic", "upgrade", "head", environment=environment(database_url))
        assert migrating.returncode != 0
        [told] = turnlog_lines(migrating.stderr)
        for line in (refusal(database_url), told.removeprefix("turnlog: ")):
            assert line == f"the database is at revision 0017, this version needs {revision_head()}: {todo}"
    assert (on(database_url, described), on(database_url, revision_of)) == (before, "0017")
    tally.tried += 1


def environment(url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    return {**kept, "TURNLOG_DATABASE_URL": url}


def turnlog_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "turnlog:" in line]
