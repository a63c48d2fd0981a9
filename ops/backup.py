"""Copies of a store: `turnlog backup FILE` makes one beside a running server, `turnlog restore FILE` puts it in place.

Both are for SQLite. PostgreSQL has its own tools; `turnlog restore` without a file then finishes what they loaded. A
restored store gets a new epoch, so that cursors of the replaced one are refused, and the server processes that it names
have ended (`ops/restored.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from app.errors import StartupError
from app.store.database import Database, create_engine, sqlite_lock
from app.store.dialect import StorePoints
from app.store.opening import Held, require_known
from app.store.repair import refuse_if_served, require_revision
from ops import restored
from ops.store_command import DONE, CommandResult, Progress, require_store, run, settings_for, sqlite_path

MIB = 1 << 20

STEP_PAGES = 2000
"""Pages copied in one step: about 8 MiB."""

POSTGRES = "a PostgreSQL store is copied with PostgreSQL's own tools, such as pg_dump: docs/operations.md#point-in-time"


def backup(database_url: str | None, copy: Path, *, as_json: bool = False) -> int:
    """Run `turnlog backup` and return its exit code. `database_url`: None for the store of the service's settings."""
    return run("backup", partial(_back_up, database_url, copy), interrupted="there is no copy", as_json=as_json)


def restore(database_url: str | None, copy: Path | None, *, as_json: bool = False) -> int:
    """Run `turnlog restore` and return its exit code. `copy`: None for PostgreSQL."""
    again = "run it again before a server starts"
    return run("restore", partial(_restore, database_url, copy), interrupted=again, as_json=as_json)


def _back_up(database_url: str | None, copy: Path) -> CommandResult:
    url = settings_for(database_url).database_url
    source = sqlite_path(url)
    if source is None:
        raise StartupError(POSTGRES)
    require_store(url)
    if copy.exists():
        raise StartupError(f"{copy} already exists")
    sessions = copy_store(source, copy, Progress("backup"), mode="mode=rw")
    size = copy.stat().st_size
    return CommandResult(
        DONE,
        [f"{copy}: {size / MIB:.1f} MiB, {sessions} sessions"],
        {"copy": str(copy), "bytes": size, "sessions": sessions},
    )


def copy_store(source: Path, copy: Path, progress: Callable[[str], None], *, mode: str) -> int:
    """Copy a store as of one moment, while a server may write to it; returns the number of its sessions.

    The copy is checked and on disk before it gets its name: a killed run leaves only `<copy>.partial`, which the next
    one replaces. `mode` is that of the source's SQLite URI. Raises StartupError if it is damaged or no store,
    sqlite3.Error, OSError.
    """
    unfinished = copy.with_name(f"{copy.name}.partial")
    _create(unfinished)
    try:
        _copy_pages(f"{source.resolve().as_uri()}?{mode}", unfinished, progress)
        sessions = _check(unfinished)
        os.replace(unfinished, copy)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(copy.absolute().parent)
    return sessions


def _create(path: Path) -> None:
    """An empty file that only its owner may read, in place of what an earlier run left."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _copy_pages(source: str, target: Path, progress: Callable[[str], None]) -> None:
    handle = os.open(target, os.O_RDWR)
    stepped_at = time.monotonic()

    def step(_: int, left: int, pages: int) -> None:
        """Work half of the time, and never sync a whole copy at once: both would hold up the server's commits."""
        nonlocal stepped_at
        os.fdatasync(handle)
        time.sleep(time.monotonic() - stepped_at)
        stepped_at = time.monotonic()
        progress(f"{100 * (pages - left) // max(pages, 1)} % of {pages} pages copied")

    try:
        with (
            closing(sqlite3.connect(source, uri=True, isolation_level=None)) as read,
            closing(sqlite3.connect(target, isolation_level=None)) as written,
        ):
            written.execute("PRAGMA journal_mode = OFF")
            written.execute("PRAGMA synchronous = OFF")
            # Without an open transaction SQLite begins anew after each commit of the server, and under load never ends.
            read.execute("BEGIN")
            read.execute("SELECT count(*) FROM sqlite_master").fetchone()
            read.backup(written, pages=STEP_PAGES, progress=step)
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(path: Path) -> int:
    """The number of sessions. Raises StartupError if the file is damaged, no store, or of a newer version."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
        try:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise StartupError(f"the store is damaged: {verdict}".splitlines()[0])
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            by = connection.execute("SELECT value FROM store_meta WHERE key = 'release'").fetchone()
            (sessions,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        except sqlite3.Error as error:
            raise StartupError(f"this is not a readable Turnlog store: {error}") from error
    require_known(revision, by and by[0])
    return int(sessions)


def _restore(database_url: str | None, copy: Path | None) -> CommandResult:
    settings = settings_for(database_url, "lease_s")
    path = sqlite_path(settings.database_url)
    if path is None:
        if copy is not None:
            raise StartupError("load a PostgreSQL copy with pg_restore first, then run this without a file")
        return asyncio.run(_finish_postgres(settings.database_url, settings.lease_s))
    if copy is None:
        raise StartupError("name the copy to restore")
    if not copy.is_file():
        raise StartupError(f"{copy} does not exist")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A missing file is made, so that neither a server nor another restore begins meanwhile.
    lock = sqlite_lock(settings.database_url, create=True)
    assert lock is not None
    try:
        lock.acquire()
    except Held as held:
        raise StartupError(f"a server or another restore uses {path} ({held}): stop it first") from None
    try:
        return _put_in_place(copy, path)
    finally:
        if path.exists() and not _is_store(path):
            path.unlink()
        lock.release()


def _is_store(path: Path) -> bool:
    """Not only the empty file that the lock makes."""
    return path.exists() and path.stat().st_size > 0


def _put_in_place(copy: Path, path: Path) -> CommandResult:
    """Replace the store at `path`, which is kept under another name. If the copy is no store, nothing is changed."""
    staged = path.with_name(f"{path.name}.restoring")
    # Immutable, if it has no WAL: so it may be on a medium that is read-only.
    mode = "mode=ro" if Path(f"{copy}-wal").exists() else "immutable=1"
    copy_store(copy, staged, Progress("restore"), mode=mode)
    epoch = asyncio.run(_start_epoch(f"sqlite+aiosqlite:///{staged}"))
    _merge_wal(staged)
    with suppress(FileNotFoundError):
        shutil.copymode(path, staged)
        with suppress(PermissionError):
            shutil.chown(staged, path.stat().st_uid, path.stat().st_gid)
    _sync(staged)
    kept = path.with_name(f"{path.name}.replaced-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    was_there = _is_store(path)
    with suppress(sqlite3.Error):
        if was_there:
            _merge_wal(path)
    # The old store goes first, with its WAL: SQLite would apply that to any new file of the name.
    for suffix in ("", "-wal") if was_there else ("-wal",):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    _sync(path.parent)
    os.rename(staged, path)
    _sync(path.parent)
    lines = [f"{path} is now {copy}, in epoch {epoch}: older export cursors are refused"]
    if was_there:
        lines.append(f"the replaced store is {kept}: remove it when it is no longer needed")
    return CommandResult(DONE, lines, {"store": str(path), "epoch": epoch, "kept": str(kept) if was_there else None})


def _merge_wal(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


async def _start_epoch(url: str) -> str:
    """Start a new epoch, end the old processes and drop the snapshots, in one transaction; returns the new epoch."""

    def start_epoch(connection: Connection) -> str:
        restored.end_incarnations(connection)
        restored.drop_snapshots(connection)
        return restored.raise_epoch(connection)

    engine = create_engine(url)
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(start_epoch)
    finally:
        await engine.dispose()


async def _finish_postgres(url: str, lease_s: float) -> CommandResult:
    """Finish the restore of a PostgreSQL store that was loaded from a dump or recovered to an earlier time."""
    progress = Progress("restore")
    database, engine = Database(url, points=StorePoints()), create_engine(url)
    try:
        await require_revision(database)
        await refuse_if_served(database, lease_s)
        epoch = await _start_epoch(url)
        newest, ahead = await database.read(restored.newest_tx)
        after: str | None = "" if ahead else None
        while after is not None:
            async with engine.begin() as connection:
                after = await connection.run_sync(partial(restored.rebase, after=after))
            progress(f"events up to session {after} have new positions")
    finally:
        await engine.dispose()
        await database.close()
    name = make_url(url).database
    lines = [f"{name} is in epoch {epoch}: older export cursors are refused"]
    if ahead:
        lines.append(
            f"its events have transactions of another server, up to {newest}; they now come before this server's"
        )
    return CommandResult(DONE, lines, {"store": name, "epoch": epoch, "rebased": bool(ahead)})


def _sync(path: Path) -> None:
    """Fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
