"""The end of the log of all sessions, for readers that follow it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from sqlalchemy import Connection, select, tuple_

from app.store.dialect import log_synced, log_written, next_tx, oldest_tx, sync_delay_s
from app.store.engine import Database
from app.store.reads import START, Position, last_forgotten
from app.store.schema import events

SETTLE_S = 1.0
"""How long to wait for running transactions; a longer one hides commits made meanwhile."""

PAUSE_S = 0.01


class Tail(NamedTuple):
    """Events after a position: their sessions (each once), the last position, and how many events.

    `holds` False: the event at the given position is gone, because a database crash undid it or it is another store.
    Earlier events may differ too.
    """

    session_ids: list[str]
    last: Position
    events: int
    holds: bool


def end(connection: Connection) -> Position:
    """The position of the last event below which nothing can appear any more, except after a database crash."""
    query = (
        select(events.c.tx, events.c.position)
        .where(events.c.tx < oldest_tx())
        .order_by(events.c.tx.desc(), events.c.position.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return max(START if row is None else Position(*row), last_forgotten(connection))


class Synced(NamedTuple):
    """How far PostgreSQL's log of changes is written and on the disk, in bytes, and within how many seconds of a commit
    the rest is. All 0 on SQLite."""

    written: int
    synced: int
    delay_s: float


def synced(connection: Connection) -> Synced:
    """Read it after `end`: with the log on the disk up to `written`, no crash of PostgreSQL undoes an event up to that
    end."""
    return Synced(*connection.execute(select(log_written(), log_synced(), sync_delay_s())).one())


def since(connection: Connection, after: Position, limit: int) -> Tail:
    """Events after `after`, at most `limit`."""
    query = (
        select(events.c.session_id, events.c.tx, events.c.position)
        .where(
            tuple_(events.c.tx, events.c.position) >= (after.tx, after.position),
            events.c.tx < oldest_tx(),
        )
        .order_by(events.c.tx, events.c.position)
        .limit(limit + (after != START))
    )
    rows = connection.execute(query).all()
    if after != START:
        if not rows or Position(rows[0][1], rows[0][2]) != after:
            return Tail([], after, 0, holds=False)
        rows = rows[1:]
    last = Position(rows[-1][1], rows[-1][2]) if rows else after
    return Tail(list(dict.fromkeys(row[0] for row in rows)), last, len(rows), holds=True)


async def wait_for_horizon(database: Database) -> None:
    """Wait until the order of commits has all that are acknowledged, but no longer than SETTLE_S.

    A reader stays below the oldest running transaction of PostgreSQL, so it may miss newer commits of others. SQLite
    has one writer. Raises StoreUnavailable.
    """
    if database.is_sqlite:
        return

    def look(connection: Connection) -> tuple[int, int]:
        oldest, following = connection.execute(select(oldest_tx(), next_tx())).one()
        return oldest, following

    clock = asyncio.get_running_loop().time
    deadline = clock() + SETTLE_S
    oldest, present = await database.read(look)
    while oldest < present and clock() < deadline:
        await asyncio.sleep(PAUSE_S)
        oldest, _ = await database.read(look)
