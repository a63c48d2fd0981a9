"""Waits until PostgreSQL's order of commits includes all acknowledged commits.

A reader stays below the oldest running transaction, so it may miss newer commits of others. SQLite has one writer, so
its order is always complete.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection, select

from app.store.dialect import next_tx, oldest_tx
from app.store.engine import Database

SETTLE_S = 1.0
"""How long to wait for running transactions; a longer one hides commits made meanwhile."""

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
