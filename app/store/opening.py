"""Opening a database: its revision and the one that this code needs, or one line for an operator why it cannot be
opened, with the remedy and without a password.

Alembic knows the revisions too, but its import takes a tenth of the start-up time, and only migrations need it.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from app.errors import StartupError, StoreFull
from app.store import sqlite_engine
from app.store.lock import Held, SqliteLock

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_LINE = re.compile(r'^(down_)?revision = "(\w+)"$', re.MULTILINE)
_VERSION = table("alembic_version", column("version_num"))

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


def revision_head() -> str:
    """The revision that this code needs: the one without a successor."""
    revisions, followed = _named()
    return max(revisions - followed, default="")


def is_known(revision: str | None) -> bool:
    """Can this code serve such a database, or migrate it?"""
    return not revision or revision in _named()[0]


def require_known(revision: str | None) -> None:
    """Raises StartupError for a database of another version."""
    if not is_known(revision):
        raise StartupError(
            f"the database is at revision {revision}, this version needs {revision_head()}: another version made it, "
            "from before the first release, and this one cannot read it; export it with the checkout that made it"
        )


def require_head(revision: str | None) -> None:
    """Raises StartupError, which says how to get there, for a database at another revision than this code's."""
    require_known(revision)
    if revision != revision_head():
        raise StartupError(
            f"the database is at revision {revision or 'none'}, this version needs {revision_head()}: "
            "run `turnlog migrate` (in a checkout also `alembic upgrade head`)"
        )


def _named() -> tuple[set[str], set[str]]:
    """All revisions, and those that have a successor."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for down, revision in _LINE.findall(path.read_text("utf-8")):
            names[bool(down)].add(revision)
    return names[False], names[True]


def revision_of(connection: Connection) -> str | None:
    """The database's revision; None if it has none yet."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    return connection.execute(select(_VERSION.c.version_num)).scalar()
