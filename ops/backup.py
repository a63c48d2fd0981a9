"""`python -m ops.backup COPY`: a copy of an SQLite store, beside the server that writes to it.

The copy is made under another name, checked, synced and only then given its own, so a run that is cut short leaves no
copy rather than half a one. A PostgreSQL store has its own tools; which, the command says.
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
    as_turnlog,
    check_sqlite,
    copy_sqlite,
    is_sound,
    require_store,
    run,
    settings_for,
    sqlite_path,
    sync,
)
from ops.salvage import is_damage, outcome, refusal
from ops.salvage import salvage as copy_rest

MIB = 1 << 20


def perform(database_url: str | None, copy: Path, *, salvage: bool = False, as_json: bool = False) -> int:
    """The command; None: the store of the service's settings."""
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


class Made(NamedTuple):
    """How many sessions are in a copy, its revision, and what of a damaged store is missing in it."""

    sessions: int
    revision: str
    missing: Damage | None


def backup(source: Path, copy: Path, *, salvage: bool = False) -> Made:
    """Make the copy; with `salvage` of a damaged store too.

    Raises StartupError, DamagedStore, OSError, sqlite3.Error.
    """
    tell = Progress("backup")
    unfinished = copy.with_name(f"{copy.name}.partial")
    handle = os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _claim(handle, unfinished)
        try:
            missing = None
            if not _copied(source, unfinished, tell):
                if not salvage:
                    raise refusal(source, tell, "there is no copy")
                os.ftruncate(handle, 0)
                missing = copy_rest(source, unfinished, tell)
                check_sqlite(unfinished, tell)
                sync(unfinished)
            holds = Made(*_holds(unfinished), missing)
            os.replace(unfinished, copy)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)
    sync(copy.absolute().parent)
    return holds


def _copied(source: Path, unfinished: Path, tell: Progress) -> bool:
    """False where the store is damaged. Raises StartupError where it is no database, sqlite3.Error."""
    try:
        with closing(sqlite3.connect(f"{source.as_uri()}?mode=rw", uri=True, isolation_level=None)) as read:
            copy_sqlite(read, unfinished, tell, rest_s=REST_S)
        return is_sound(unfinished, tell)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return False


def _claim(handle: int, unfinished: Path) -> None:
    """What an earlier run left behind is overwritten, a run that still goes on is not. Raises StartupError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(f"another run is writing {unfinished}") from None
    os.ftruncate(handle, 0)


def _holds(path: Path) -> tuple[int, str]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            (count,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StartupError("this is not a store of Turnlog's") from error
    return int(count), str(revision)


def _pg_dump(url: str, copy: Path) -> str:
    """The password is left to `~/.pgpass` or the prompt."""
    given = make_url(url)._replace(drivername="postgresql", password=None)  # `set` leaves what is None as it was
    place = given.difference_update_query(["prepared_statement_cache_size", "password"]).render_as_string(False)
    return f"pg_dump --format=custom --file={shlex.quote(str(copy))} --dbname={shlex.quote(place)} (docs/runbook.md)"


if __name__ == "__main__":
    as_turnlog("backup")
