"""Backs up an SQLite store while a server writes to it: `turnlog backup PLACE` or `python -m ops.backup PLACE`.

PLACE is a file to make, or a bucket or folder that keeps many backups and gets only the blocks that it does not have
(`ops/blocks`). The copy is written under a temporary name, checked and synced; only then it is renamed, or uploaded. So
an interrupted run leaves no copy, never an incomplete one. For a PostgreSQL store the command says what to use.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.engine import make_url

from app.errors import StartupError
from app.store.broken import damage
from ops.backups import MIB, delete_old, described, fields_of
from ops.blocks.bucket import Bucket, bucket_url
from ops.blocks.pace import Pace
from ops.blocks.running import under_way
from ops.blocks.upload import upload
from ops.keeping import (
    DONE,
    CommandResult,
    Progress,
    copy_sqlite,
    is_sound,
    require_store,
    run,
    run_as_turnlog,
    settings_for,
    sqlite_path,
    sync,
)

PERCENT = 25.0
"""How much of the time a backup works, if not said otherwise."""

SPARE_BYTES = 64 * MIB
"""Room that a temporary copy leaves on its disk, beside the size of the store."""


class Options(NamedTuple):
    """`percent`: the share of the time that it works. `keep`: how many backups to keep in a bucket; None for all.
    `scratch`: the folder of the temporary copy; None: the store's."""

    percent: float = PERCENT
    keep: int | None = None
    scratch: Path | None = None


def perform(database_url: str | None, place: str, options: Options, *, as_json: bool = False) -> int:
    """Run the command and return its exit code. If `database_url` is None, it uses the store from the service's
    settings."""
    work = partial(_backup, database_url, place, options)
    return run("backup", work, interrupted="there is no copy", as_json=as_json)


def _backup(database_url: str | None, place: str, options: Options) -> CommandResult:
    url = settings_for(database_url).database_url
    source = sqlite_path(url)
    bucket = bucket_url(place)
    if source is None:
        raise StartupError(_for_postgres(url, None if bucket else place))
    require_store(url)
    if bucket is not None:
        return _to_bucket(source, bucket, options)
    if options.keep is not None or options.scratch is not None:
        raise StartupError("--keep and --scratch are for a bucket or a folder that exists")
    copy = Path(place)
    if copy.exists():
        raise StartupError(f"{copy} is there already")
    sessions, revision = backup(source, copy, percent=options.percent)
    size = copy.stat().st_size
    line = f"{copy}: {size / MIB:.1f} MiB, {sessions} sessions, revision {revision}"
    fields = {"copy": str(copy), "bytes": size, "sessions": sessions, "revision": revision}
    return CommandResult(DONE, [line], fields)


def _to_bucket(source: Path, url: str, options: Options) -> CommandResult:
    """Make a temporary copy, and upload what the bucket does not have of it. Raises StartupError."""
    bucket = Bucket(url, create=True)
    temporary = (options.scratch or source.parent) / f"{source.name}.backup.partial"
    progress = Progress("backup")
    with under_way(bucket, "backup") as this_run:
        if this_run.others("prune"):
            raise StartupError(f"another run deletes old backups in {url}: run this one again when it has ended")
        _require_room(source, temporary)
        with _temporary(temporary) as handle:
            made = _copied(source, temporary, handle, progress, percent=options.percent)
            head = upload(
                bucket,
                temporary,
                progress,
                still_valid=this_run.renew,
                percent=options.percent,
                sessions=made.sessions,
                revision=made.revision,
                incomplete=False,
            )
            temporary.unlink()
    line = f"{url}: backup {head.name}: {described(head)}"
    fields = {"place": url, **fields_of(head)}
    if options.keep is not None:
        deletion = delete_old(bucket, options.keep, progress)
        line, fields = f"{line}; {deletion.line}", {**fields, **deletion.fields}
    return CommandResult(DONE, [line], fields)


def _require_room(source: Path, temporary: Path) -> None:
    """Raises StartupError if the temporary copy could fill the disk that a running server writes to."""
    files = (source, Path(f"{source}-wal"))
    needed = sum(one.stat().st_size for one in files if one.exists()) + SPARE_BYTES
    free = shutil.disk_usage(temporary.parent).free
    if free < needed:
        raise StartupError(
            f"the temporary copy needs {needed / MIB:.0f} MiB, and {temporary.parent} has {free / MIB:.0f}: "
            "name another folder with --scratch"
        )


class Copied(NamedTuple):
    """The number of sessions in a copy, and its revision."""

    sessions: int
    revision: str


def backup(source: Path, copy: Path, *, percent: float = PERCENT) -> Copied:
    """Make the copy. Raises StartupError, also if the store is damaged, OSError, sqlite3.Error."""
    unfinished = copy.with_name(f"{copy.name}.partial")
    with _temporary(unfinished) as handle:
        made = _copied(source, unfinished, handle, Progress("backup"), percent=percent)
        os.replace(unfinished, copy)
    sync(copy.absolute().parent)
    return made


@contextmanager
def _temporary(unfinished: Path) -> Iterator[int]:
    """An empty file for this run alone, removed if the run fails; yields its descriptor.

    Raises StartupError if another run has it, OSError.
    """
    handle = os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock_temporary(handle, unfinished)
        try:
            yield handle
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)


def _copied(source: Path, unfinished: Path, handle: int, progress: Progress, *, percent: float) -> Copied:
    """Copy the store, check the copy and sync it. Raises as `backup`."""
    pace = Pace(percent)

    def step(where: str) -> None:
        progress(where)
        os.fdatasync(handle)  # A whole copy synced at once would hold up the server's own commits.
        pace.rest()

    try:
        with closing(sqlite3.connect(f"{source.as_uri()}?mode=rw", uri=True, isolation_level=None)) as read:
            copy_sqlite(read, unfinished, step)
        is_whole = is_sound(unfinished, step)
    except sqlite3.Error as error:
        if damage(error) is None:
            raise
        is_whole = False
    if not is_whole:
        raise StartupError(f"{source} is damaged: `turnlog verify` names what is lost; there is no copy")
    return Copied(*_inspect(unfinished))


def _lock_temporary(handle: int, unfinished: Path) -> None:
    """Lock the temporary file and empty it, which removes the leftovers of an earlier run.

    Raises StartupError if another run still has the lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(f"another run is writing {unfinished}") from None
    os.ftruncate(handle, 0)


def _inspect(path: Path) -> tuple[int, str]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            (count,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StartupError("this is not a Turnlog store") from error
    return int(count), str(revision)


def _for_postgres(url: str, file: str | None) -> str:
    """What to use instead; the command has no password, which comes from `~/.pgpass` or a prompt."""
    if file is None:
        return "a PostgreSQL store is backed up with PostgreSQL's own tools: docs/runbook.md#point-in-time"
    given = make_url(url)._replace(drivername="postgresql", password=None)  # `set` ignores arguments that are None
    place = given.difference_update_query(["prepared_statement_cache_size", "password"]).render_as_string(False)
    command = f"pg_dump --format=custom --file={shlex.quote(file)} --dbname={shlex.quote(place)}"
    return f"a PostgreSQL store is copied with PostgreSQL's own tools: {command} (docs/runbook.md)"


if __name__ == "__main__":
    run_as_turnlog("backup")
