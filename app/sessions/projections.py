"""The head table against the log: what differs, and writing what the log says.

The log is the truth; `sessions` and `open_turns` are there to be locked, listed and claimed, and can be
derived again. Each session is looked at and mended in a transaction of its own, so a run that is cut short has
done a part of the work and the next one does the rest.
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
"""Sessions listed at a time; one at a time is in memory."""


async def examined(database: Database) -> AsyncIterator[Examined]:
    """Every session of which the log, the heads or the open turns know, in the order of their ids.

    A store that is being written may be examined. Raises StoreUnavailable.
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
    """Make a session's rows what its log says, durably; returns what was found. Raises StoreFull, StoreUnavailable."""
    try:
        return await database.write(lambda tx: heads.mend(tx, session_id), durable=True)
    except WriteConflict as error:
        raise StoreUnavailable(f"another process wrote to session {session_id} at the same time") from error


async def refuse_if_served(database: Database, lease_s: float) -> None:
    """Raises StartupError while a process may be serving the store, which has been opened.

    An SQLite file's lock, which opening took, has answered that already: incarnations that look alive there
    were killed. Elsewhere one is dead once it has ended or been silent for `lease_s` seconds. Should a server
    start later all the same, the lock on each head keeps the two apart.
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
