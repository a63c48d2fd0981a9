"""Compares the tables derived from the log with the log, and repairs them.

The log is the truth. `sessions` and `open_turns` exist for locks, lists and claims and can be derived again. Each
session is examined and repaired in its own transaction, so an interrupted run keeps its work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from app.errors import StartupError, StoreUnavailable
from app.store import projections as heads
from app.store.dialect import WriteConflict
from app.store.engine import Database
from app.store.projections import Examined

PAGE = 500
"""Sessions listed in one query; one session at a time is in memory."""


async def examined(database: Database) -> AsyncIterator[Examined]:
    """Every session named by the log, the heads or the open turns, ordered by id.

    The store may be in use. Raises StoreUnavailable.
    """
    after = ""
    while ids := await database.read(partial(heads.session_ids, tables=heads.DERIVED, after=after, limit=PAGE)):
        for session_id in ids:
            yield await database.read(
                partial(heads.examine, session_id=session_id),
                or_else=lambda _: Examined(session_id, unreadable="its rows are on a damaged page"),  # noqa: B023
            )
        after = ids[-1]


async def mended(database: Database, session_id: str) -> Examined:
    """Write a session's rows as its log says, durably; returns the differences. Raises StoreFull, StoreUnavailable."""
    try:
        return await database.write(lambda tx: heads.mend(tx, session_id), durable=True)
    except WriteConflict as error:
        raise StoreUnavailable(f"another process wrote to session {session_id} at the same time") from error


async def refuse_if_served(database: Database, lease_s: float) -> None:
    """Raises StartupError while a process may be serving the store, which is open.

    On SQLite the file's lock, taken when the store was opened, excludes other processes. On PostgreSQL a process is
    dead if it has ended or was silent for `lease_s` seconds. If a server starts later, the lock on each head keeps the
    two apart.
    """
    if database.is_sqlite:
        return
    alive = await database.read(lambda connection: heads.living(connection, lease_s))
    if alive:
        number, pid, _ = alive[0]
        raise StartupError(
            f"{len(alive)} processes serve this database (incarnation {number}, pid {pid}): stop them first; "
            f"one that was killed counts as serving until {lease_s:g} s after its last heartbeat"
        )
