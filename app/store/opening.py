"""Why a database cannot be opened: one line for an operator, with the remedy, and without a password."""

from __future__ import annotations

import sqlite3

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from app.errors import StartupError, StoreFull
from app.store import sqlite_engine
from app.store.lock import Held, SqliteLock

_PLACE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})


def acquire(lock: SqliteLock, url: str) -> None:
    """Raises StartupError where another process has the file, or it cannot be opened."""
    try:
        lock.acquire()
    except Held as held:
        raise StartupError(
            f"{held} serves {sqlite_engine.file_of(url)}: SQLite is for one API process; stop that one, "
            "run without --workers, or set TURNLOG_DATABASE_URL to another file or PostgreSQL"
        ) from None
    except OSError as error:
        raise unopened(url, error) from error


def unopened(url: str, error: BaseException) -> StartupError:
    """The start-up error for a driver's or the system's error."""
    parsed = make_url(url)
    cause = _cause(error)
    if parsed.get_backend_name() == "sqlite":
        place, todo = _file(parsed, cause)
    else:
        # The query may hold a password as well.
        place = parsed.set(query={}).render_as_string(hide_password=True)
        todo = "is PostgreSQL running there, and is TURNLOG_DATABASE_URL right?"
    if isinstance(cause, StoreFull):
        todo = "make room (docs/runbook.md)"
    return StartupError(f"the database cannot be opened: {place}: {_reason(cause)}; {todo}")


def _cause(error: BaseException) -> BaseException:
    """The driver's own error, without the two that SQLAlchemy and its adapter wrap around it."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return error
    return error.orig.__cause__ or error.orig


def _file(url: URL, error: BaseException) -> tuple[str, str]:
    """The file or folder concerned, and what to do."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if not isinstance(error, OSError) and code not in _PLACE:
        return str(sqlite_engine.file_of(url)), "is TURNLOG_DATABASE_URL right? (docs/runbook.md)"
    place = getattr(error, "filename", None) or sqlite_engine.file_of(url)
    return str(place), "TURNLOG_DATABASE_URL has to name a file in a folder that this user may write to"


def _reason(error: BaseException) -> str:
    """The message, without the number and file name that system errors add."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return next(iter(text.splitlines()), type(error).__name__)
