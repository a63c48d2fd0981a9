"""Returns unused space and removes the last traces of erased content: `turnlog vacuum` or `python -m ops.compact`.

SQLite: free pages are returned to the file system a few at a time; a server may run. `--full` rewrites the file; no
server may run. It also removes remains of rows that SQLite left in unused parts of pages.

PostgreSQL: VACUUM; servers may run. `--full` rewrites the tables that hold content and locks each of them meanwhile;
until then the bytes of an erased row stay in its page. Then a checkpoint and a new WAL file, if the role has the right.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.errors import StartupError
from app.store.dialect import PRAGMAS
from app.store.engine import Database
from app.store.ports import LOCKED_S
from app.store.projections import require_revision
from app.store.salvage import Damage
from app.store.schema import (
    blobs,
    chunks,
    events,
    metadata,
    refused_replies,
    search_entries,
    search_metadata,
    sessions,
    snapshots,
    staged_tokens,
    turns,
)
from app.store.sqlite import CHECKPOINT_BYTES, GIVE_BACK_PAGES
from ops.keeping import (
    DONE,
    NOT_ALL_WELL,
    REST_S,
    CommandResult,
    Progress,
    check_sqlite,
    copy_mode_and_owner,
    exclusive,
    is_sound,
    merge_wal,
    require_store,
    run,
    run_as_turnlog,
    settings_for,
    silent,
    sqlite_path,
    sync,
    watch,
)
from ops.salvage import is_damage, outcome, refusal
from ops.salvage import salvage as copy_rest

MIB = 1 << 20

CONTENT: Sequence[Table] = (
    events,
    sessions,
    turns,
    blobs,
    chunks,
    refused_replies,
    staged_tokens,
    snapshots,
    search_entries,
    search_metadata,
)
"""The tables that an erasure deletes from, and those in which it rewrites rewards and notes."""

LOCK_TIMEOUT = "10s"
"""How long a rewrite waits for the lock on its table. All later users of the table wait behind it."""

SKIPPED_STATES = {
    "42501": "the role may not",
    "55P03": f"the table was in use for {LOCK_TIMEOUT}",
}
"""SQLSTATEs of statements that are skipped, and why."""


def perform(database_url: str | None, *, full: bool, salvage: bool = False, as_json: bool = False) -> int:
    """Run the command and return its exit code. If `database_url` is None, it uses the store from the service's
    settings."""
    work = partial(_compact, database_url, full=full, salvage=salvage)
    return run("compact", work, interrupted="run it again to finish", as_json=as_json)


def _compact(database_url: str | None, *, full: bool, salvage: bool) -> CommandResult:
    if salvage and not full:
        raise StartupError("--salvage needs --full, which rewrites the file")
    url = settings_for(database_url).database_url
    path = sqlite_path(url)
    if path is None:
        return asyncio.run(_vacuum(url, full=full))
    require_store(url)
    progress = Progress("compact")
    before = path.stat().st_size
    rewritten = Compacted()
    if full:
        with exclusive(url):
            rewritten = rewrite(path, progress, salvage=salvage)
    else:
        try:
            give_back(path, progress)
        except sqlite3.Error as error:
            raise (refusal(path, progress, "not all space was given back") if is_damage(error) else error) from error
    now = path.stat().st_size
    line = f"{path}: {before / MIB:.1f} MiB before, {now / MIB:.1f} MiB now"
    fields = {"store": str(path), "bytes_before": before, "bytes": now}
    if rewritten.kept is None:
        return CommandResult(DONE, [line], fields)
    line += f"; the damaged file is {rewritten.kept}: remove it when it is no longer needed"
    return outcome(line, {**fields, "kept": str(rewritten.kept)}, rewritten.missing)


def give_back(path: Path, progress: Callable[[str], None]) -> None:
    """Shorten the file by its free pages. Each step holds the write lock for some milliseconds."""
    with closing(sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)) as connection:
        for pragma in (*PRAGMAS, "PRAGMA synchronous = NORMAL"):
            connection.execute(pragma)
        free = _free_pages(connection)
        moved = 0
        while free:
            # executescript, because `execute` takes only one step of a statement without columns: one page.
            connection.executescript(f"PRAGMA incremental_vacuum({GIVE_BACK_PAGES})")
            moved += GIVE_BACK_PAGES
            left = _free_pages(connection)
            if left >= free:
                break
            free = left
            progress(f"{free} free pages left")
            if moved * connection.execute("PRAGMA page_size").fetchone()[0] > CHECKPOINT_BYTES:
                moved = 0
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            time.sleep(REST_S)
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def _free_pages(connection: sqlite3.Connection) -> int:
    count: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return count


class Compacted(NamedTuple):
    """For a damaged store: the lost content, and the path of the damaged file."""

    missing: Damage | None = None
    kept: Path | None = None


def rewrite(path: Path, progress: Callable[[str], None] = silent, *, salvage: bool = False) -> Compacted:
    """Write a new file with the live rows only, and put it in the place of the old one.

    The caller makes sure that no server runs. With `salvage`, keep the readable part of a damaged store. Raises
    StartupError, DamagedStore, sqlite3.Error; the store is then unchanged.
    """
    target = path.with_name(f"{path.name}.compacting")
    rewritten = Compacted()
    try:
        try:
            merge_wal(path)
            _create(target)
            _vacuum_into(path, target, progress)
            is_damaged = not is_sound(target, progress)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            is_damaged = True
        if is_damaged:
            if not salvage:
                raise refusal(path, progress, "the store is unchanged")
            _create(target)
            kept = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
            rewritten = Compacted(copy_rest(path, target, progress), kept)
        check_sqlite(target, progress)
        copy_mode_and_owner(target, path)
        sync(target)
        if rewritten.kept is None:
            merge_wal(path)
        else:
            _rename_damaged(path, rewritten.kept)
        os.replace(target, path)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return rewritten


def _create(target: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{target}{suffix}").unlink(missing_ok=True)
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _vacuum_into(path: Path, target: Path, progress: Callable[[str], None]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        watch(connection, progress, "rewriting the file")
        connection.execute("VACUUM INTO ?", (str(target),))
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()


def _rename_damaged(path: Path, kept: Path) -> None:
    """Rename the damaged file and its WAL, since SQLite would apply the WAL to any new file with the old name."""
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    sync(path.parent)


async def _vacuum(url: str, *, full: bool) -> CommandResult:
    """VACUUM all tables on a separate connection, since the service's connections cancel long statements."""
    database = Database(url)
    try:
        await require_revision(database)
    finally:
        await database.close()
    refused: list[str] = []
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0)
    try:
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SET statement_timeout = 0")
            await connection.exec_driver_sql(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
            progress = Progress("compact")
            for table in metadata.sorted_tables:
                progress(f"table {table.name}")
                if full and table in CONTENT:
                    await _rewrite(connection, table.name, refused)
                else:
                    await _run_if_allowed(connection, f"VACUUM {table.name}", refused)
            for statement in ("CHECKPOINT", "SELECT pg_switch_wal()", "CHECKPOINT"):
                await _run_if_allowed(connection, statement, refused)
    finally:
        await engine.dispose()
    count = len(metadata.sorted_tables)
    left = list(dict.fromkeys(refused))
    lines = [*left, f"{count} tables vacuumed{', content rewritten' if full else ''}"]
    return CommandResult(NOT_ALL_WELL if left else DONE, lines, {"tables": count, "not_done": left})


async def _rewrite(connection: AsyncConnection, name: str, refused: list[str]) -> None:
    """Rewrite a table. If another role owns it, PostgreSQL skips it with a notice only; then its file
    node is unchanged."""
    before = await _filenode(connection, name)
    if (
        await _run_if_allowed(connection, f"VACUUM (FULL, ANALYZE) {name}", refused)
        and await _filenode(connection, name) == before
    ):
        refused.append(f"not done: {name} was not rewritten, it belongs to another role")


async def _filenode(connection: AsyncConnection, name: str) -> object:
    return (await connection.exec_driver_sql(f"SELECT pg_relation_filenode(to_regclass('{name}'))")).scalar_one()


async def _run_if_allowed(connection: AsyncConnection, statement: str, refused: list[str]) -> bool:
    """Run a statement; False if it was skipped, which is added to `refused`."""
    try:
        await connection.exec_driver_sql(statement)
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state not in SKIPPED_STATES:
            raise
        refused.append(f"not done: {statement}: {SKIPPED_STATES[state]}")
        return False
    return True


if __name__ == "__main__":
    run_as_turnlog("vacuum")
