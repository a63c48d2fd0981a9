"""Recognises damaged database pages, by drivers' errors and by values that no version ever wrote, and logs them."""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.exc import DBAPIError

from app.errors import SessionUnreadable

log = logging.getLogger("turnlog.unreadable")

MOST = 10_000
"""How many unreadable sessions are remembered; one that was forgotten is logged again."""


class BrokenRow(Exception):
    """A row holds a value that no version ever wrote: its page is damaged."""


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


class Unreadable:
    """Sessions that this process has found unreadable: each is logged once, however often it is read."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def warn(self, session_id: str, why: object) -> None:
        """Log a warning, unless there was one for this session."""
        if self._is_new(session_id):
            log.warning("session %s cannot be read: %s", session_id, why, extra={"session_id": session_id})

    def warn_of_group(self, group_id: str, why: object) -> None:
        """Log a warning for a group with an unreadable head."""
        if self._is_new(f"group {group_id}"):
            log.warning("group %s is left as it was: %s", group_id, why)

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
