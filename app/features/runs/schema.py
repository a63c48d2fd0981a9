"""The table of what runs were given and how they ended, and what it says where a session is created."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from sqlalchemy import (
    BigInteger,
    Column,
    MetaData,
    String,
    Table,
    bindparam,
    func,
    literal_column,
    select,
)

from app.errors import RunClosed, RunOverBudget
from app.store.damage import Content
from app.store.dialect import ForEach, NoRoom, StorePoints, Tx
from app.store.schema import NAMING, SESSION_ID, sessions

metadata = MetaData(naming_convention=NAMING)

runs = Table(
    "runs",
    metadata,
    Column("run", SESSION_ID, primary_key=True),
    Column("status", String(16), nullable=False),
    Column("max_live", BigInteger),
    Column("max_tokens", BigInteger),
    Column("used_tokens", BigInteger, server_default="0", nullable=False),
    Column("metadata", Content),
    Column("note", Content),
)
"""Runs that were given something, or have ended.

`status`: `open`, `closed`; `erasing` while its sessions are being erased, then the row is gone. `max_live` and
`max_tokens` are its limits; null: none. `used_tokens` is what one process has counted last in the log, so that all know
of it. `metadata` is JSON.
"""

_limits = ForEach(
    lambda given: select(runs.c.run, runs.c.status, runs.c.max_live, runs.c.max_tokens, runs.c.used_tokens).where(
        runs.c.run == given.named
    ),
    named=String,
)
_locked = (
    select(runs.c.status, runs.c.max_live, runs.c.max_tokens, runs.c.used_tokens)
    .where(runs.c.run == bindparam("named"))
    .with_for_update()
)
_live = select(func.count()).where(sessions.c.run == bindparam("named"), sessions.c.status == literal_column("'open'"))


def room(tx: Tx, wanted: Mapping[str, int]) -> dict[str, NoRoom]:
    """How many new sessions these runs take, of those that do not take all.

    A run with a limit on live sessions is locked before they are counted, in the order of names: another process that
    creates one in it waits for this transaction.
    """
    rooms = {}
    for run, *known in sorted(tx.each(_limits, [{"named": run} for run in wanted]), key=itemgetter(0)):
        row = known if known[1] is None else tx.one(_locked, {"named": run})
        if row is None:  # erased meanwhile
            continue
        status, max_live, max_tokens, used_tokens = row
        if status in ("closed", "erasing"):
            rooms[run] = NoRoom(0, RunClosed.of(run, status))
        elif max_tokens is not None and used_tokens >= max_tokens:
            rooms[run] = NoRoom(0, RunOverBudget.of(run, "tokens", used_tokens, max_tokens))
        elif max_live is not None:
            counted = tx.one(_live, {"named": run})
            live = 0 if counted is None else counted[0]
            if live + wanted[run] > max_live:
                rooms[run] = NoRoom(
                    max(max_live - live, 0), RunOverBudget.of(run, "live sessions", max(live, max_live), max_live)
                )
    return rooms


def join(points: StorePoints) -> None:
    points.creating.append(room)
