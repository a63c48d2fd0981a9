"""What the commands that open the store share: which store, progress, results, exit codes.

Exit codes: 0, done; 1, done, but with problems, one line each; 2, not done or not finished; 130, interrupted.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from app.errors import AppError, StartupError
from app.settings import PREFIX, Settings, load_settings
from app.store.dialect import store_error

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
        raise StartupError(f"the database {path} does not exist")


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
