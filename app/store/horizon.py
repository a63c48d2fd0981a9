"""Waiting for PostgreSQL's order of commits to reach the present, so that a reader sees all that was acknowledged.

A reader stays below the oldest transaction that still runs, and with that behind what others have committed meanwhile.
On SQLite, with one writer, the order ends in the present at any time.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection, select

from app.store.dialect import next_tx, oldest_tx
from app.store.engine import Database

SETTLE_S = 1.0
"""How long is waited for transactions that run; one that takes longer hides what was committed beside it."""

PAUSE_S = 0.01


async def wait_for_horizon(database: Database) -> None:
    """Wait until the transactions that run now have ended, but no longer than SETTLE_S. Raises StoreUnavailable."""
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
