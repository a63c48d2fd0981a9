"""Figures of a store as a whole, for operators."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, func, select

from app.store import reads
from app.store.schema import open_turns, sessions

_by_status = select(sessions.c.status, func.count()).group_by(sessions.c.status)
_open_turns = select(func.count()).select_from(open_turns)


class Figures(msgspec.Struct, frozen=True):
    """Sessions by status, turns with a claim, and the database's size in bytes without free pages."""

    sessions: dict[str, int]
    open_turns: int
    bytes: int


def figures(connection: Connection) -> Figures:
    """Reads every session's head: a second for some millions."""
    by_status = {row[0]: row[1] for row in connection.execute(_by_status)}
    return Figures(
        {"open": 0, "closed": 0, "erased": 0, "undone": 0} | by_status,
        connection.execute(_open_turns).scalar_one(),
        reads.database_bytes(connection),
    )
