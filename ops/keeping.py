"""Shared code of the maintenance commands: choice of the store, progress, SQLite files, exit codes.

Exit codes: 0, done; 1, done, but with problems, one line each; 2, not done or not finished; 130, interrupted.
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
    """The result of a command: its exit code, lines to print, and the same as fields for `--json`."""

    code: int
    lines: Sequence[str]
    fields: Mapping[str, Any]


PROGRESS_S = 5.0
"""Interval in seconds at which a long run prints its progress."""


class Progress:
    """Prints the progress of a run to standard error every PROGRESS_S seconds; a short run prints nothing."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._printed_at = time.monotonic()

    def __call__(self, where: str) -> None:
        now = time.monotonic()
        if now - self._printed_at >= PROGRESS_S:
            self._printed_at = now
            print(f"{self._command}: {where}", file=sys.stderr, flush=True)


def silent(where: str) -> None:
    """Report no progress."""


def run_as_turnlog(command: str) -> None:
    """Run `python -m ops.<module>` as the `turnlog` command `command`, where the options are defined."""
    from turnlog.cli import main

    sys.argv[:1] = ["turnlog", command]
    main()


def settings_for(database_url: str | None, *names: str) -> Settings:
    """The service's settings. Only the database URL and the settings in `names` are validated.

    So an invalid value of another setting does not block a maintenance command. Raises StartupError.
    """
    if database_url is not None:
        os.environ[f"{PREFIX}DATABASE_URL"] = database_url
    return load_settings("database_url", *names)


def sqlite_path(url: str) -> Path | None:
    """The file of an SQLite store; None for PostgreSQL."""
    parsed = make_url(url)
    return Path(parsed.database or "").resolve() if parsed.get_backend_name() == "sqlite" else None


def require_store(url: str) -> None:
    """Raises StartupError if the SQLite file does not exist, since opening it would create it."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        raise StartupError(f"there is no database {path}")


@contextmanager
def exclusive(url: str) -> Iterator[None]:
    """Hold the lock of an SQLite store, so that no server can start. Raises StartupError if one runs."""
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
"""Pages copied in one step: about 8 MiB."""

REST_S = 0.01
"""Pause in seconds between two steps, so that a running server gets access to the disk."""


def copy_sqlite(read: sqlite3.Connection, target: Path, progress: Callable[[str], None]) -> None:
    """Copy a consistent state of a database, while others write to it, over the existing file `target`, and sync it.

    One read transaction stays open during the copy. Without it, SQLite restarts the copy after each commit of another
    process, and under load the copy never ends. `progress` is called after each step and may rest. Raises
    sqlite3.Error.
    """

    def report_copied(_: int, left: int, pages: int) -> None:
        progress(f"{100 * (pages - left) // max(pages, 1)} % of {pages} pages copied")

    with closing(sqlite3.connect(target, isolation_level=None)) as written:
        written.execute("PRAGMA journal_mode = OFF")
        written.execute("PRAGMA synchronous = OFF")
        read.execute("BEGIN")
        read.execute("SELECT count(*) FROM sqlite_master").fetchone()
        read.backup(written, pages=STEP_PAGES, progress=report_copied)
    sync(target)


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open a file read-only that no process writes to.

    A file without a WAL is opened as immutable, so it may be on a read-only medium.
    """
    is_without_wal = not Path(f"{path}-wal").exists()
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?{'immutable=1' if is_without_wal else 'mode=ro'}", uri=True, isolation_level=None
    )


WATCHED_STEPS = 1_000_000
"""SQLite virtual machine steps between two calls of the progress handler: some milliseconds."""


def watch(connection: sqlite3.Connection, progress: Callable[[str], None], what: str) -> None:
    """Report progress during a long statement, and let Ctrl-C interrupt it."""
    connection.set_progress_handler(lambda: progress(what), WATCHED_STEPS)


def check_sqlite(path: Path, progress: Callable[[str], None]) -> None:
    """Raises StartupError if the file is damaged."""
    try:
        verdict = _verdict(path, progress)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise
        raise StartupError(f"{path} is not an SQLite database that can be read: {error}") from error
    if verdict != "ok":
        raise StartupError(f"{path} is damaged: {verdict}".splitlines()[0])


def is_sound(path: Path, progress: Callable[[str], None]) -> bool:
    """Check the file; False if it is damaged. Raises sqlite3.Error if the check itself fails."""
    return _verdict(path, progress) == "ok"


def _verdict(path: Path, progress: Callable[[str], None]) -> str:
    with closing(open_readonly(path)) as connection:
        watch(connection, progress, f"checking {path}")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return str(verdict)


def merge_wal(path: Path) -> None:
    """Move the WAL of an SQLite file into the file and remove it. Raises StartupError if another process has the file
    open, sqlite3.Error."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if Path(f"{path}-wal").exists():
        raise StartupError(f"another program has {path} open: end it first")


def copy_mode_and_owner(new: Path, old: Path) -> None:
    """Give `new` the permissions of `old`, which it replaces, and its owner if this user may."""
    with suppress(FileNotFoundError):
        shutil.copymode(old, new)
        status = old.stat()
        with suppress(PermissionError):
            os.chown(new, status.st_uid, status.st_gid)


def sync(path: Path) -> None:
    """Fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def run(command: str, work: Callable[[], CommandResult], *, interrupted: str, as_json: bool = False) -> int:
    """Run `work`, print its result, and return the exit code. `interrupted` describes the state that an interrupted run
    leaves.

    `work` is called outside an event loop, because inside one the first Ctrl-C only cancels a task and does not stop a
    copy.
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
