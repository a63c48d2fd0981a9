"""Leases for background work that one process at a time does: the work's name, who does it, and until when.

The lease only says who should work. Safety is the fence: a process that was paused past its lease may go on working,
but the next one has a higher fence, and each write of such work asks `holds_lease` in its own transaction.
"""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import bindparam, case, exists, insert, literal, not_, null, or_, select, update

from app.store.dialect import Tx, now
from app.store.log import BaseOperation
from app.store.schema import incarnations, leases
from app.store.statements import holder_is_dead

_of_lease = leases.c.name == bindparam("lease")
_is_own = leases.c.holder == bindparam("taker")
_holder_lives = exists().where(incarnations.c.id == leases.c.holder, not_(holder_is_dead))
_take = (
    update(leases)
    .where(_of_lease, or_(_is_own, leases.c.holder.is_(None), leases.c.until < now(), not_(_holder_lives)))
    .values(
        holder=bindparam("taker"),
        fence=leases.c.fence + case((_is_own, 0), else_=1),
        until=now() + bindparam("for_s"),
    )
    .returning(leases.c.fence)
)
_exists = select(leases.c.fence).where(_of_lease)
_first = insert(leases).values(
    name=bindparam("lease"), holder=bindparam("taker"), fence=literal(1), until=now() + bindparam("for_s")
)
_held = _of_lease & leases.c.holder.is_not(None) & (leases.c.fence == bindparam("fenced"))
# On PostgreSQL the shared lock keeps another process from taking the lease before the write has committed.
_holds = select(leases.c.fence).where(_held).with_for_update(read=True)
_release = update(leases).where(_held).values(holder=null())


class TakeLease(BaseOperation, frozen=True):
    """Take the lease, or renew it, for `for_s` seconds of the database's clock. Returns its fence.

    None: another process has it, whose time has not ended and which lives, as far as the store knows (`lease_s`:
    seconds without a heartbeat after which a process is dead). The holder keeps its fence, also where it comes late;
    every other process gets the next one.
    """

    durable: ClassVar[bool] = False
    name: str
    incarnation: int
    for_s: float
    lease_s: float

    def apply(self, tx: Tx) -> int | None:
        taken = {"lease": self.name, "taker": self.incarnation, "for_s": self.for_s}
        if row := tx.one(_take, {**taken, "lease_s": self.lease_s}):
            return int(row[0])
        if tx.one(_exists, taken) is not None:
            return None
        tx.run(_first, taken)  # two processes at once: one fails on the key, is tried again, and finds the row
        return 1


class ReleaseLease(BaseOperation, frozen=True):
    """End the lease at once; without effect where another process has taken it since."""

    durable: ClassVar[bool] = False
    name: str
    fence: int

    def apply(self, tx: Tx) -> None:
        tx.run(_release, {"lease": self.name, "fenced": self.fence})


def holds_lease(tx: Tx, name: str, fence: int) -> bool:
    """Is this still the lease's fence? Nobody can take the lease before the transaction has ended."""
    return tx.one(_holds, {"lease": name, "fenced": fence}) is not None
