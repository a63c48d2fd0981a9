"""Prepares a store restored from a backup, so that nothing from before can be mistaken for its own.

A backup's event positions, process numbers and (on PostgreSQL) transaction ids continue from the time of the backup.
The replaced store has used the following ones for other things. Whoever still holds one of them (a cursor, a process
that was frozen) must find it invalid.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, insert, select, text, update

from app.extras import release
from app.store import feed
from app.store.dialect import next_tx, now
from app.store.incarnations import host_name
from app.store.schema import events, incarnations, sessions, snapshots, store_meta

INCARNATIONS_APART = 1_000_000
"""How far process numbers jump at a restore: more than were ever started since a backup."""

SESSIONS_AT_ONCE = 100
"""Sessions whose events are rewritten in one transaction."""


def raise_epoch(connection: Connection) -> str:
    """Invalidate every export cursor; returns the new epoch."""
    epoch = feed.next_epoch(feed.epoch(connection))
    connection.execute(update(store_meta).where(store_meta.c.key == "epoch").values(value=epoch))
    return epoch


def end_incarnations(connection: Connection) -> int:
    """End the processes that served the store when it was copied, and number later ones far from theirs.

    A process of the replaced store that wakes up again holds claims by its number and fence; were both given out a
    second time, its commit would pass for the new holder's. Returns how many had not ended.
    """
    ended = connection.execute(update(incarnations).where(incarnations.c.ended_at.is_(None)).values(ended_at=now()))
    newest: int = connection.execute(select(func.max(incarnations.c.id))).scalar_one() or 0
    number = newest + INCARNATIONS_APART
    row = {"id": number, "host": host_name(), "pid": 0, "release": release()}
    connection.execute(insert(incarnations).values(**row, started_at=now(), heartbeat_at=now(), ended_at=now()))
    if connection.dialect.name == "postgresql":
        sequence = text("SELECT setval(pg_get_serial_sequence('incarnations', 'id'), :number)")
        connection.execute(sequence, {"number": number})
    return ended.rowcount


def drop_snapshots(connection: Connection) -> None:
    """They are created again when needed."""
    connection.execute(delete(snapshots))


def newest_tx(connection: Connection) -> tuple[int, bool]:
    """The newest transaction that an event names, and whether it lies ahead of the server.

    That is so of a dump that was restored into another server, which counts transactions from a lower number: exports,
    which stay below what may still commit, would not give those events. SQLite does not count transactions.
    """
    newest = max(
        connection.execute(select(func.coalesce(func.max(events.c.tx), 0))).scalar_one(),
        feed.last_forgotten(connection).tx,
    )
    if connection.dialect.name == "sqlite":
        return newest, False
    return newest, newest >= connection.execute(select(next_tx())).scalar_one()


def rebase(connection: Connection, after: str) -> str | None:
    """Move events, of the next sessions behind `after`, in front of every transaction of this server.

    They, and the last place that was forgotten, keep their positions, which within a session grow with it. Returns the
    last of the sessions, None at the end.
    """
    if not after and (gone := feed.last_forgotten(connection)) != feed.START:
        forgotten = update(store_meta).where(store_meta.c.key == feed.FORGOTTEN)
        connection.execute(forgotten.values(value=f"0.{gone.position}"))
    page = select(sessions.c.session_id).where(sessions.c.session_id > after).order_by(sessions.c.session_id)
    ids = list(connection.execute(page.limit(SESSIONS_AT_ONCE)).scalars())
    if not ids:
        return None
    connection.execute(update(events).where(events.c.session_id.in_(ids), events.c.tx != 0).values(tx=0))
    last: str = ids[-1]
    return last
