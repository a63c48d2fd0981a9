"""Proof that a database takes a write, and gives events back in the order of commits.

Exports and `GET /events` end below the oldest transaction that runs. Where events carry other transactions' ids, as of
several servers behind a sharding proxy or extension, or where a transaction's statements run apart from each other, as
behind a pooler in statement mode, they would be empty, or miss events, without an error.

    in one transaction      two events are written, read in order as a reader of all events does, and deleted again
    once it is committed    the process's lease is renewed, which is seen on another connection, and the oldest running
                            transaction has passed the first one
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import NamedTuple

from sqlalchemy import BigInteger, Connection, Double, String, bindparam, delete, exists, func, insert, select

from app.errors import StoreUnavailable
from app.store.dialect import Tx, current_tx, next_tx, now, oldest_runs, oldest_tx
from app.store.engine import Database
from app.store.incarnations import heartbeat
from app.store.schema import events, incarnations
from app.store.tail import PAUSE_S, SETTLE_S

LOOKS = 5
"""So many, at least, have to miss a write before the database is refused."""

_probe = insert(events).values(tx=current_tx())
_forget = delete(events).where(events.c.session_id == bindparam("sid", type_=String()))
_in_order = (
    select(events.c.seq, events.c.tx)
    .where(
        events.c.session_id == bindparam("sid", type_=String()), events.c.tx >= bindparam("since", type_=BigInteger())
    )
    .order_by(events.c.tx, events.c.position)
)
_begun = select(current_tx(), now())
_seen = select(
    exists().where(
        incarnations.c.id == bindparam("me", type_=BigInteger()),
        incarnations.c.heartbeat_at >= bindparam("moment", type_=Double()),
    ),
    oldest_tx(),
    next_tx(),
    oldest_runs(),
    select(func.coalesce(func.max(events.c.tx), 0)).scalar_subquery(),
)


class StoreUnordered(StoreUnavailable):
    """Events do not come back in the order of commits: no export of this database can be trusted."""

    @classmethod
    def because(cls, why: str) -> StoreUnordered:
        return cls(
            f"the database does not give events back in the order of commits: {why}; is it a sharding proxy or "
            "extension (such as Citus), a replica, or a pooler in statement mode? TURNLOG_DATABASE_URL has to name one "
            "PostgreSQL server, or a pooler in transaction or session mode before it"
        )


class Written(NamedTuple):
    """A transaction that wrote events, and a moment before its end by the database's clock."""

    tx: int
    moment: float


def write(tx: Tx, incarnation: int) -> Written:
    """Write two events, read them and delete them. Raises StoreUnordered.

    No session's id has a `~`. Nobody else ever sees the events, since their transaction deletes them.
    """
    begun = tx.one(_begun, {})
    assert begun is not None
    written = Written(*begun)
    name = f"~{incarnation}.{written.tx}"  # another each time: one whose commit still waits would hold its key
    again = tx.one(_begun, {})
    if again is None or again[0] != written.tx:  # before anything is written: there is no transaction to take it back
        raise StoreUnordered.because("two statements of one transaction ran in two")
    row = {"session_id": name, "type": "Probe", "version": 1, "at": 0.0, "data": b"{}"}
    for seq in (1, 2):
        # On SQLite the process numbers events. These take no number from others, so that a probe leaves no gap.
        tx.insert(_probe, [row | {"seq": seq} | ({} if tx.positions is None else {"position": seq - 3})])
    rows = [tuple(found) for found in tx.all(_in_order, {"sid": name, "since": written.tx})]
    tx.run(_forget, {"sid": name})
    if rows != [(1, written.tx), (2, written.tx)]:
        raise StoreUnordered.because(
            f"of two events that transaction {written.tx} wrote, {rows} are read as (number, its id)"
        )
    return written


async def prove(database: Database, incarnation: int) -> None:
    """Raises StoreUnordered, StoreUnavailable, StoreFull, WriteConflict."""
    written = await database.write(partial(write, incarnation=incarnation), durable=True)
    # Apart: a commit that waits for its standby keeps its locks, and the process would lose its lease meanwhile.
    await database.write(partial(heartbeat, incarnation=incarnation), durable=False)
    clock = asyncio.get_running_loop().time
    deadline = clock() + SETTLE_S
    for look in itertools.count(1):
        why = await database.read(partial(missing, written=written, incarnation=incarnation))
        if why is None:
            return
        # The oldest transaction may end while one look asks about it, and of a slow database there is one a second.
        if clock() >= deadline and look >= LOOKS:
            raise StoreUnordered.because(why)
        await asyncio.sleep(PAUSE_S)


def missing(connection: Connection, written: Written, incarnation: int) -> str | None:
    """What keeps a committed transaction from readers; None: nothing, or another one that still runs."""
    row = connection.execute(_seen, {"me": incarnation, "moment": written.moment}).one()
    is_seen, oldest, following, runs, newest = row
    if not is_seen:
        return "a write that was confirmed is not read on another connection"
    if following <= max(newest, written.tx):
        return (
            f"transaction {max(newest, written.tx)} has written events, and the next one has the id {following}; after "
            "a dump was loaded, run `turnlog restore`"
        )
    return None if oldest > written.tx or runs else f"the oldest transaction that runs is {oldest}, which has ended"
