"""Damaged pages: how they are recognised, and reads around them.

A page is damaged where the driver says so, or where a value is one that no version ever wrote. There is one way around
it: a read of several sessions (or groups) is a function of a set of them, run by `split`, which halves a set that
cannot be read until each damaged session stands alone. Where the list of the sessions is what is damaged,
`sessions.listed` runs the same read over the ids that other pages name. Exports, the training feed, `GET /events` and
the janitor step over what is damaged in this way; lists of sessions do not, and say so.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, LargeBinary, Select, literal_column, select, table
from sqlalchemy.exc import DBAPIError

from app.domain.groups import GroupKey
from app.errors import SessionUnreadable

log = logging.getLogger("turnlog.unreadable")

K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")

MOST = 10_000
"""How many unreadable sessions are remembered; one that was forgotten is logged again."""

SPAN = 500
"""Sessions (or turns, chunks, groups) read together in one statement; SQLite takes at most some thousand parameters."""


class BrokenRow(Exception):
    """A row holds a value that no version ever wrote: its page is damaged."""


class PageDamaged(Exception):
    """The data is on a damaged page; the connection stays usable."""


class Content(LargeBinary):
    """Bytes. SQLite stores a value's type in its row, where one flipped bit turns bytes into a number or text."""

    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], bytes | None]:
        return as_bytes


def as_bytes(value: Any) -> bytes | None:
    """A value of a column of bytes. Raises BrokenRow."""
    if value is None or isinstance(value, bytes):
        return value
    raise BrokenRow("a text or a number where bytes were stored")


_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_DAMAGED_SECTOR = frozenset(
    {
        sqlite3.SQLITE_IOERR_READ,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
        sqlite3.SQLITE_IOERR_DATA,
    }
)
_DAMAGE_STATES = frozenset({"XX001", "XX002"})
"""PostgreSQL's data_corrupted (also a wrong checksum or page header) and index_corrupted."""


def damage(error: BaseException) -> str | None:
    """The database's name of the damage, if the error means that data is damaged; None for any other error.

    The error does not tell whether one page or the whole file is damaged.
    """
    if isinstance(error, BrokenRow):
        return str(error)
    if isinstance(error, DBAPIError):
        return None if error.orig is None else damage(error.orig)
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            # The driver's own error: text that is not UTF-8.
            return "a text that cannot be decoded" if isinstance(error, sqlite3.OperationalError) else None
        return (
            getattr(error, "sqlite_errorname", type(error).__name__)
            if code & 0xFF in _DAMAGE or code in _DAMAGED_SECTOR
            else None
        )
    state = getattr(error, "sqlstate", None)
    return f"SQLSTATE {state}" if state in _DAMAGE_STATES else None


SAVEPOINTS = "turnlog_savepoints"
"""The execution option of a connection to PostgreSQL on which `attempt` goes back to savepoints."""

_ANY_ROW: Select[tuple[int]] = select(literal_column("1")).select_from(table("store_meta")).limit(1)


def attempt(connection: Connection, read: Callable[[Connection], T]) -> T:
    """What `read` gives. Raises PageDamaged; the driver's error if the database answers nothing else either.

    An error ends a PostgreSQL transaction, unless there is a savepoint to go back to. That costs two statements, so a
    read has them only on its second try: the first fails with the driver's error (`Database.read`).
    """
    savepoint = None
    if connection.dialect.name == "postgresql":
        if SAVEPOINTS not in connection.get_execution_options():
            return read(connection)
        savepoint = connection.begin_nested()
    try:
        result = read(connection)
    except (DBAPIError, BrokenRow) as error:
        why = damage(error)
        if why is None:
            raise  # without the savepoint: to go back to it, a server that does not answer would be asked again
        if savepoint is not None:
            savepoint.rollback()
        connection.execute(_ANY_ROW).all()  # if this fails too, the file or the disk is damaged, not a page
        raise PageDamaged(f"the database answered {why}") from error
    if savepoint is not None:
        savepoint.commit()
    return result


def attempt_or(connection: Connection, read: Callable[[Connection], T], default: D) -> T | D:
    """`default` where the data is on a damaged page."""
    try:
        return attempt(connection, read)
    except PageDamaged:
        return default


def split(
    connection: Connection, ids: Sequence[K], read: Callable[[Connection, Sequence[K]], Mapping[K, T]]
) -> tuple[dict[K, T], dict[K, str]]:
    """What `read` gives of sessions (or groups, or places), and the reason for each that cannot be read.

    `read` is called with at most SPAN of them.
    """
    readable: dict[K, T] = {}
    lost: dict[K, str] = {}
    parts = [ids[at : at + SPAN] for at in range(0, len(ids), SPAN)]
    while parts:
        part = parts.pop()
        try:
            readable |= attempt(connection, lambda again: read(again, part))  # noqa: B023 - called at once
        except PageDamaged as error:
            if len(part) == 1:
                lost[part[0]] = str(error)
            else:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
    return readable, lost


def of_readable(
    connection: Connection, ids: Sequence[K], read: Callable[[Connection, Sequence[K]], Mapping[K, T]]
) -> dict[K, T]:
    """What `read` gives of those that can be read."""
    return split(connection, ids, read)[0]


class Unreadable:
    """Sessions that this process has found unreadable: each is logged once, however often it is read."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def warn(self, session_id: str, why: object) -> None:
        """Log a warning, unless there was one for this session."""
        if self._is_new(session_id):
            log.warning("session %s cannot be read: %s", session_id, why, extra={"session_id": session_id})

    def warn_of_group(self, key: GroupKey, why: object) -> None:
        """Log a warning for a group with an unreadable head."""
        if self._is_new(f"group {key.group_id} of run {key.run}"):
            log.warning("group %s of run %s was not changed: %s", key.group_id, key.run, why)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._logged
        self._logged[name] = None
        self._logged.move_to_end(name)
        if len(self._logged) > MOST:
            self._logged.popitem(last=False)
        return is_new

    def error(self, session_id: str, why: object) -> SessionUnreadable:
        """The error for a request for the session; also logs it."""
        self.warn(session_id, why)
        return SessionUnreadable(f"session {session_id} cannot be read: {why}")
