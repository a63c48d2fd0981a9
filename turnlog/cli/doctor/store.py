"""Checks the database: can it be reached, is its revision right, has it room, and does it keep its promises?"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url

from turnlog.cli.doctor.findings import Finding, ok, problem, warning
from turnlog.cli.output import size

if TYPE_CHECKING:
    from app.domain.fleet import Fleet
    from app.settings import Settings

LITTLE, TIGHT = 256 << 20, 2 << 30
"""Free space in bytes below which the next replies may not fit, and below which it should be watched."""

LONG_LOG = 256 << 20
"""An SQLite log file has 16 to 64 MiB; a larger one means that a reader holds it."""

SLOW_SYNC_MS = 20.0
"""Each batch of commits waits for an fsync: disks take under 5 ms; a slower one is on a network or worn."""

Revision = tuple[str, str | None]
"""A database's, empty if it has none, and the release that brought it there, if one did."""

MIGRATE = "turnlog migrate, with the server stopped (turnlog serve does it at its start)"


def examine(settings: Settings) -> Generator[Finding, None, Fleet | None]:
    """Returns the state of the fleet's log, if the database can be read."""
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite":
        path = Path(url.database or "").resolve()
        yield from _folder(path)
        if path.is_dir():
            yield problem("database", f"{path} is a folder", "name a file in TURNLOG_DATABASE_URL")
            return None
        if not path.is_file():
            yield ok("database", f"{path} does not exist yet: turnlog serve creates it")
            return None
        if not (yield from _file(path)):
            return None
        found = yield from _sqlite(path)
    else:
        from turnlog.cli.doctor.postgres import look

        findings, found = asyncio.run(look(settings))
        yield from findings
    if found is None or not (yield from _revision(*found)):
        return None
    fleet, place = asyncio.run(_opened(settings.database_url))
    if place not in (None, settings.payloads):
        yield warning("database", f"replay payloads of this store are in {place}", f"set TURNLOG_PAYLOADS={place}")
    return fleet


def _revision(found: str, by: str | None) -> Generator[Finding, None, bool]:
    """`by`: the release that brought the database to the revision."""
    from app.store.opening import instead, is_known, revision_head

    head = revision_head()
    if found == head:
        yield ok("database", f"at revision {head}, as this version needs")
        return True
    todo = MIGRATE if is_known(found) else instead(by)
    yield problem("database", f"at revision {found or 'none'}, this version needs {head}", todo)
    return False


async def _opened(url: str) -> tuple[Fleet, str | None]:
    """The fleet, and the object storage that has replay payloads of this store, if any has."""
    from app.domain import fleet as domain
    from app.features.objects.rows import has_objects, url_of_objects
    from app.store import fleet as store
    from app.store.database import Database
    from app.store.dialect import StorePoints

    database = Database(url, points=StorePoints())
    try:
        fleet = domain.fold((await database.read(store.state)).events)
        return fleet, await database.read(url_of_objects) if await database.read(has_objects) else None
    finally:
        await database.close()


def _folder(path: Path) -> Iterator[Finding]:
    """The folder of the file, or of the file to be created."""
    from app.store.opening import REMOTE, file_system

    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield problem("disk", f"{folder} is not a folder", "choose another folder in TURNLOG_DATABASE_URL")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield problem("disk", f"{folder} cannot be written to by this user", "chown it, or choose another folder")
        return
    free = shutil.disk_usage(folder).free
    what = f"{size(free)} free in {folder}"
    if free < LITTLE:
        yield problem("disk", what, "free disk space: on a full disk every turn gets 507 (docs/operations.md)")
    elif free < TIGHT:
        yield warning("disk", what, "free disk space, or set TURNLOG_MAX_DB_BYTES and TURNLOG_CLOSED_TTL_S")
    else:
        yield ok("disk", what)
    kind = file_system(folder)
    if kind in REMOTE:
        yield problem(
            "disk", f"{folder} is on {kind}: SQLite's locks are not safe there", "use a local disk, or PostgreSQL"
        )
    try:
        took = _sync_ms(folder)
    except OSError as error:
        yield problem("disk", f"{folder} cannot be written to: {error.strerror}", "choose another folder")
        return
    if took > SLOW_SYNC_MS:
        yield warning("disk", f"an fsync takes {took:.1f} ms; every commit waits for one", "use a local SSD")
    else:
        yield ok("disk", f"an fsync takes {took:.1f} ms")


def _sync_ms(folder: Path) -> float:
    """The median time of a few fsyncs of one page."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            file.write(os.urandom(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def _file(path: Path) -> Generator[Finding, None, bool]:
    """Can the file be read and written, and by which other users?"""
    if not os.access(path, os.R_OK | os.W_OK):
        yield problem("database", f"{path} cannot be read and written by this user", "run as the server's user")
        return False
    if path.stat().st_mode & 0o077:
        yield warning(
            "database", f"{path} may be read by other users; it holds prompts and replies", f"chmod 600 {path}"
        )
    log = Path(f"{path}-wal")
    length = log.stat().st_size if log.exists() else 0
    if length > LONG_LOG:
        yield warning(
            "database",
            f"its WAL has {size(length)}: a reader keeps it from being truncated",
            f"find the forgotten shell, export or copy with fuser -v {path}, and end it",
        )
    yield ok("database", f"{path}: {size(path.stat().st_size)}, WAL {size(length)}")
    return True


def _sqlite(path: Path) -> Generator[Finding, None, Revision | None]:
    """Reads without taking a lock. None if the file cannot be read."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            revision = "SELECT version_num FROM alembic_version"
            row = connection.execute(revision).fetchone() if "alembic_version" in tables else None
            release = "SELECT value FROM store_meta WHERE key = 'release'"
            by = connection.execute(release).fetchone() if "store_meta" in tables else None
    except sqlite3.Error as error:
        yield problem("database", f"{path} cannot be read: {error}", "restore the last backup (docs/operations.md)")
        return None
    if row is not None and mode != "wal":
        yield problem("database", f"journal_mode is {mode}", "run PRAGMA journal_mode = WAL with sqlite3")
    yield ok("database", f"SQLite {sqlite3.sqlite_version}; a commit is synced before its reply (synchronous=FULL)")
    from app.store.opening import lock_owner

    pid = lock_owner(path) or lock_owner(Path(f"{path}.lock"))
    if pid is None:
        yield ok("database", "no process serves it")
    else:
        yield ok("database", f"process {pid} serves it: a second one would refuse to start")
    return (row[0], by and by[0]) if row is not None else ("", None)
