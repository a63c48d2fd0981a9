"""Copies an SQLite store while a server writes to it: `turnlog backup COPY` or `python -m ops.backup COPY`.

The copy is written under a temporary name, checked and synced, and then renamed. So an interrupted run leaves no copy,
never an incomplete one. For a PostgreSQL store the command prints the `pg_dump` command to use.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.engine import make_url

from app.errors import StartupError
from app.store.salvage import Damage
from ops.keeping import (
    REST_S,
    CommandResult,
    Progress,
    check_sqlite,
    copy_sqlite,
    is_sound,
    require_store,
    run,
    run_as_turnlog,
    settings_for,
    sqlite_path,
    sync,
)
from ops.salvage import is_damage, outcome, refusal
from ops.salvage import salvage as copy_rest

MIB = 1 << 20


def perform(database_url: str | None, copy: Path, *, salvage: bool = False, as_json: bool = False) -> int:
    """Run the command and return its exit code. If `database_url` is None, it uses the store from the service's
    settings."""
    work = partial(_backup, database_url, copy, salvage=salvage)
    return run("backup", work, interrupted="there is no copy", as_json=as_json)


def _backup(database_url: str | None, copy: Path, *, salvage: bool) -> CommandResult:
    url = settings_for(database_url).database_url
    source = sqlite_path(url)
    if source is None:
        raise StartupError(f"a PostgreSQL store is copied with PostgreSQL's own tools: {_pg_dump(url, copy)}")
    require_store(url)
    if copy.exists():
        raise StartupError(f"{copy} is there already")
    sessions, revision, missing = backup(source, copy, salvage=salvage)
    size = copy.stat().st_size
    line = f"{copy}: {size / MIB:.1f} MiB, {sessions} sessions, revision {revision}"
    return outcome(line, {"copy": str(copy), "bytes": size, "sessions": sessions, "revision": revision}, missing)


class Copied(NamedTuple):
    """The number of sessions in a copy, its revision, and the content that a damaged store has lost."""

    sessions: int
    revision: str
    missing: Damage | None


def backup(source: Path, copy: Path, *, salvage: bool = False) -> Copied:
    """Make the copy. With `salvage`, copy the readable part of a damaged store.

    Raises StartupError, DamagedStore, OSError, sqlite3.Error.
    """
    progress = Progress("backup")
    unfinished = copy.with_name(f"{copy.name}.partial")
    handle = os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock_temporary(handle, unfinished)
        try:
            missing = None
            if not _copy(source, unfinished, progress):
                if not salvage:
                    raise refusal(source, progress, "there is no copy")
                os.ftruncate(handle, 0)
                missing = copy_rest(source, unfinished, progress)
                check_sqlite(unfinished, progress)
                sync(unfinished)
            made = Copied(*_inspect(unfinished), missing)
            os.replace(unfinished, copy)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)
    sync(copy.absolute().parent)
    return made


def _copy(source: Path, unfinished: Path, progress: Progress) -> bool:
    """Copy the store; False if it is damaged. Raises StartupError if the file is not a database, sqlite3.Error."""
    try:
        with closing(sqlite3.connect(f"{source.as_uri()}?mode=rw", uri=True, isolation_level=None)) as read:
            copy_sqlite(read, unfinished, progress, rest_s=REST_S)
        return is_sound(unfinished, progress)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return False


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


def _pg_dump(url: str, copy: Path) -> str:
    """The `pg_dump` command without the password, which comes from `~/.pgpass` or a prompt."""
    given = make_url(url)._replace(drivername="postgresql", password=None)  # `set` ignores arguments that are None
    place = given.difference_update_query(["prepared_statement_cache_size", "password"]).render_as_string(False)
    return f"pg_dump --format=custom --file={shlex.quote(str(copy))} --dbname={shlex.quote(place)} (docs/runbook.md)"


if __name__ == "__main__":
    run_as_turnlog("backup")
