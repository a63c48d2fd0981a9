"""What the commands that keep a store have in common: which store, progress, exit codes.

Exit code 0: done; 1: done, but not all is well, a line each says what; 2: it could not be done, or not to its end;
130: interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from app.errors import AppError, StartupError
from app.setting_names import PREFIX
from app.settings import Settings, load_settings
from app.store.dialect import store_error
from app.store.engine import sqlite_lock
from app.store.lock import Held

DONE, NOT_ALL_WELL, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130


class CommandResult(NamedTuple):
    """What a command did: its exit code, the lines for people, and the same for machines."""

    code: int
    lines: Sequence[str]
    fields: Mapping[str, Any]


PROGRESS_S = 5.0
"""How often a long run says where it is."""


class Progress:
    """Says on standard error where a long run is, every few seconds; a short one says nothing."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._told = time.monotonic()

    def __call__(self, where: str) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            print(f"{self._command}: {where}", file=sys.stderr, flush=True)


def silent(where: str) -> None:
    """The progress of a run that nobody watches."""


def as_turnlog(command: str) -> None:
    """Run `python -m ops.<module>` as the command of `turnlog` that it is, which alone knows the options."""
    from turnlog.cli import main

    sys.argv[:1] = ["turnlog", command]
    main()


def settings_for(database_url: str | None, *names: str) -> Settings:
    """The service's settings, of which only the store and those of these names count.

    A mistake in another one is not in the way of an operator. Raises StartupError.
    """
    if database_url is not None:
        os.environ[f"{PREFIX}DATABASE_URL"] = database_url
    return load_settings("database_url", *names)


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite store; None for PostgreSQL."""
    parsed = make_url(url)
    return Path(parsed.database or "").resolve() if parsed.get_backend_name() == "sqlite" else None


def require_store(url: str) -> None:
    """Raises StartupError where an SQLite file is not there: opening it would make one."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        raise StartupError(f"there is no database {path}")


@contextmanager
def stopped(url: str) -> Iterator[None]:
    """Keep servers off an SQLite store meanwhile. Raises StartupError where one runs."""
    lock = sqlite_lock(url)
    if lock is None:
        yield
        return
    try:
        lock.acquire()
    except Held as held:
        raise StartupError(f"a server runs on {sqlite_path(url)}: {held} has it; stop it first") from None
    try:
        yield
    finally:
        lock.release()


STEP_PAGES = 2000
"""Copied in one step: about 8 MiB."""

REST_S = 0.01
"""Between two steps, so that a server beside gets at the disk."""


def copy_sqlite(read: sqlite3.Connection, target: Path, tell: Callable[[str], None], *, rest_s: float) -> None:
    """Copy a database as of one moment, while others write to it, into a file that is there and may be overwritten.

    One read transaction is open all the time: without it SQLite begins anew with each commit of somebody else, and
    under load never comes to an end. The copy is one file, synced. Raises sqlite3.Error.
    """

    def told(_: int, left: int, pages: int) -> None:
        tell(f"{100 * (pages - left) // max(pages, 1)} % of {pages} pages copied")
        if rest_s:
            time.sleep(rest_s)

    with closing(sqlite3.connect(target, isolation_level=None)) as written:
        written.execute("PRAGMA journal_mode = OFF")
        written.execute("PRAGMA synchronous = OFF")
        read.execute("BEGIN")
        read.execute("SELECT count(*) FROM sqlite_master").fetchone()
        read.backup(written, pages=STEP_PAGES, progress=told)
    sync(target)


def at_rest(path: Path) -> sqlite3.Connection:
    """To read a file that nobody writes to.

    One without a log of writes is read as it is, so that it may be on a medium that cannot be written to.
    """
    alone = not Path(f"{path}-wal").exists()
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?{'immutable=1' if alone else 'mode=ro'}", uri=True, isolation_level=None
    )


WATCHED_STEPS = 1_000_000
"""Of SQLite's own machine, between two looks at whether a long statement is still wanted: some milliseconds."""


def watch(connection: sqlite3.Connection, tell: Callable[[str], None], what: str) -> None:
    """Have a long statement say that it goes on, and end by Ctrl-C."""
    connection.set_progress_handler(lambda: tell(what), WATCHED_STEPS)


def check_sqlite(path: Path, tell: Callable[[str], None]) -> None:
    """Raises StartupError where the file is damaged."""
    try:
        verdict = _verdict(path, tell)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise
        raise StartupError(f"{path} is not an SQLite database that can be read: {error}") from error
    if verdict != "ok":
        raise StartupError(f"{path} is damaged: {verdict}".splitlines()[0])


def is_sound(path: Path, tell: Callable[[str], None]) -> bool:
    """Raises sqlite3.Error where the check itself cannot go on."""
    return _verdict(path, tell) == "ok"


def _verdict(path: Path, tell: Callable[[str], None]) -> str:
    with closing(at_rest(path)) as connection:
        watch(connection, tell, f"checking {path}")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return str(verdict)


def empty_log(path: Path) -> None:
    """Move an SQLite file's log of writes into it; afterwards there is none. Raises StartupError, sqlite3.Error."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if Path(f"{path}-wal").exists():
        raise StartupError(f"another program has {path} open: end it first")


def like(new: Path, old: Path) -> None:
    """Give a new file the rights of the one that it takes the place of, and as far as allowed its owner."""
    with suppress(FileNotFoundError):
        shutil.copymode(old, new)
        status = old.stat()
        with suppress(PermissionError):
            os.chown(new, status.st_uid, status.st_gid)


def sync(path: Path) -> None:
    """A file, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def run(command: str, work: Callable[[], CommandResult], *, interrupted: str, as_json: bool = False) -> int:
    """Do it, print what was done, and return the exit code. `interrupted` says what a cut-short run has left behind.

    `work` begins outside an event loop: in one, the first Ctrl-C only asks a task to end, which a copy does not hear.
    """
    try:
        outcome = work()
        for line in [json.dumps(outcome.fields)] if as_json else outcome.lines:
            print(line)
        return outcome.code
    except StartupError as error:
        print(error.under(command), file=sys.stderr)
        return IMPOSSIBLE
    except (AppError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        pass
    except (sqlite3.Error, DBAPIError) as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
            print(f"{command}: {store_error(error) or error}".splitlines()[0], file=sys.stderr)
            return IMPOSSIBLE
    print(f"{command}: interrupted; {interrupted}", file=sys.stderr)
    return INTERRUPTED
