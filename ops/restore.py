"""Restores a store from a copy or a backup: `turnlog restore PLACE` or `python -m ops.restore PLACE`.

PLACE is a file, or a bucket or folder with backups (`ops/blocks`). Without PLACE, it finishes the restore of a
PostgreSQL store. No server may run. A restored store gets a new epoch, so old export cursors are refused, and the
server processes and transactions that it names are no longer current (`app/store/restored.py`). On SQLite the new store
is prepared in a temporary file, and the replaced store is kept under another name.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from app.errors import StartupError
from app.sessions.projections import refuse_if_served
from app.store import restored
from app.store.engine import ROOT, Database, create_engine
from app.store.projections import require_revision
from app.store.revision import revision_head
from ops.blocks import manifest
from ops.blocks.bucket import Bucket, bucket_url
from ops.blocks.download import download
from ops.keeping import (
    DONE,
    CommandResult,
    Progress,
    check_sqlite,
    copy_mode_and_owner,
    copy_sqlite,
    exclusive,
    merge_wal,
    open_readonly,
    run,
    run_as_turnlog,
    settings_for,
    sqlite_path,
    sync,
)


def perform(database_url: str | None, place: str | None, name: str | None, *, as_json: bool = False) -> int:
    """Run the command and return its exit code. If `database_url` is None, it uses the store from the service's
    settings. `place` is None for PostgreSQL. `name` is a bucket's backup; None for the newest."""
    work = partial(_restore, database_url, place, name)
    return run("restore", work, interrupted="run it again before a server starts", as_json=as_json)


def _restore(database_url: str | None, place: str | None, name: str | None) -> CommandResult:
    settings = settings_for(database_url, "lease_s")
    path = sqlite_path(settings.database_url)
    if path is None:
        if place is not None:
            raise StartupError("load a PostgreSQL copy with pg_restore first, then run this without a file")
        return asyncio.run(_finish_postgres(settings.database_url, settings.lease_s))
    if place is None:
        raise StartupError("name the copy to restore")
    progress = Progress("restore")
    url = bucket_url(place)
    if url is not None:
        bucket = Bucket(url)
        chosen = name or _newest(bucket)
        what, fill = f"backup {chosen} of {url}", partial(_download, bucket, chosen, progress=progress)
    else:
        if name is not None:
            raise StartupError("--at is for a bucket or a folder with backups")
        if not Path(place).is_file():
            raise StartupError(f"there is no copy {place}")
        what, fill = place, partial(_copy, Path(place), progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(settings.database_url):
        return _replace_store(fill, what, path)


def _newest(bucket: Bucket) -> str:
    """Raises StartupError if there is no backup."""
    names = manifest.names(bucket)
    if not names:
        raise StartupError(f"{bucket.url} has no backups")
    return names[-1]


def _download(bucket: Bucket, name: str, staged: Path, *, progress: Progress) -> None:
    """Raises StartupError, OSError."""
    download(bucket, name, staged, progress)
    check_sqlite(staged, progress)


def _copy(copy: Path, staged: Path, *, progress: Progress) -> None:
    """Raises StartupError, sqlite3.Error."""
    check_sqlite(copy, progress)
    with closing(open_readonly(copy)) as read:
        copy_sqlite(read, staged, progress)


def _replace_store(fill: Callable[[Path], None], what: str, path: Path) -> CommandResult:
    """Replace the store at `path` by the file that `fill` writes. Raises StartupError; the store is then unchanged."""
    staged = path.with_name(f"{path.name}.restoring")
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{staged}{suffix}").unlink(missing_ok=True)
    os.close(os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        fill(staged)
        revision, epoch = asyncio.run(_prepare(f"sqlite+aiosqlite:///{staged}"))
        merge_wal(staged)
        copy_mode_and_owner(staged, path)
        sync(staged)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    kept = _swap(staged, path)
    lines = [f"{path} is now {what}, in epoch {epoch}: older export cursors are refused"]
    if kept is not None:
        lines.append(f"the replaced store is {kept}: remove it when it is no longer needed")
    if revision != revision_head():
        lines.append(f"it is at revision {revision}: run `turnlog migrate`")
    fields = {"store": str(path), "epoch": epoch, "kept": None if kept is None else str(kept), "revision": revision}
    return CommandResult(DONE, lines, fields)


def _swap(staged: Path, path: Path) -> Path | None:
    """Put the new file in place; returns the old store's new name, or None if there was no store.

    The old file is renamed first, with its WAL, since SQLite would apply the WAL to any new file with the old name.
    """
    kept = path.with_name(f"{path.name}.replaced-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    with suppress(sqlite3.Error, StartupError):
        if path.exists():
            merge_wal(path)
    was_there = path.exists()
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{kept}{suffix}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    sync(path.parent)
    os.rename(staged, path)
    sync(path.parent)
    return kept if was_there else None


async def _prepare(url: str) -> tuple[str, str]:
    """Make a copied file ready to be served; returns its revision and its new epoch. Raises StartupError."""
    engine = create_engine(url)
    try:
        return await _revision(engine), await _start_epoch(engine)
    finally:
        await engine.dispose()


async def _revision(engine: AsyncEngine) -> str:
    """The revision of the copy. Raises StartupError if it is not a Turnlog store or is from a later version."""

    def read(connection: Connection) -> str | None:
        return MigrationContext.configure(connection).get_current_revision()

    async with engine.connect() as connection:
        found = await connection.run_sync(read)
    if found is None or found not in _known_revisions():
        raise StartupError(f"the copy is at revision {found or 'none'}, which this version does not know")
    return found


def _known_revisions() -> set[str]:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


async def _start_epoch(engine: AsyncEngine) -> str:
    """Start a new epoch, end the old processes and drop the snapshots, in one transaction; returns the new epoch."""

    def start_epoch(connection: Connection) -> str:
        restored.end_incarnations(connection)
        restored.drop_snapshots(connection)
        return restored.raise_epoch(connection)

    async with engine.begin() as connection:
        return await connection.run_sync(start_epoch)


async def _finish_postgres(url: str, lease_s: float) -> CommandResult:
    """Finish the restore of a PostgreSQL store that was loaded from a dump or recovered to an earlier time."""
    progress = Progress("restore")
    database, engine = Database(url), create_engine(url)
    try:
        await require_revision(database)
        await refuse_if_served(database, lease_s)
        epoch = await _start_epoch(engine)
        newest, ahead = await database.read(restored.newest_tx)
        after: str | None = "" if ahead else None
        while after is not None:
            place = after
            async with engine.begin() as connection:
                after = await connection.run_sync(lambda sync: restored.rebase(sync, place))  # noqa: B023
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


if __name__ == "__main__":
    run_as_turnlog("restore")
