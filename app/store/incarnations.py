"""Which processes are alive: one row each, renewed by one heartbeat per process. And leases for background work that
one of them does at a time: the work's name, who does it, and until when.

A lease only says who should work. Safety is the fence: a process that was paused past its lease may go on working, but
the next one has a higher fence, and each write of such work asks `holds_lease` in its own transaction.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

from sqlalchemy import Connection, bindparam, case, exists, insert, literal, not_, null, or_, select, update

from app.errors import StartupError
from app.extras import release
from app.store.dialect import Tx, now
from app.store.log import BaseOperation
from app.store.schema import incarnations, leases
from app.store.statements import holder_is_dead
from turnlog.amounts import amount

_register = (
    insert(incarnations)
    .values(
        host=bindparam("at_host"),
        pid=bindparam("as_pid"),
        started_at=now(),
        heartbeat_at=now(),
        release=bindparam("of_release"),
    )
    .returning(incarnations.c.id)
)
_end_all = update(incarnations).where(incarnations.c.ended_at.is_(None)).values(ended_at=now())
_here = select(incarnations.c.id, incarnations.c.pid).where(
    incarnations.c.ended_at.is_(None), incarnations.c.host == bindparam("at_host")
)
_signs = select(
    incarnations.c.host,
    incarnations.c.pid,
    incarnations.c.heartbeat_at,
    incarnations.c.ended_at,
    (incarnations.c.heartbeat_at + bindparam("lease_s") - now()).label("left"),
).where(incarnations.c.id == bindparam("which"))
_living = (
    select(incarnations.c.pid, incarnations.c.host, incarnations.c.release, incarnations.c.started_at)
    .where(not_(holder_is_dead))
    .order_by(incarnations.c.id)
)
_stop = update(incarnations).where(incarnations.c.id == bindparam("which")).values(heartbeat_at=now(), ended_at=now())
_end = update(incarnations).where(incarnations.c.id == bindparam("which")).values(ended_at=now())
_beat = update(incarnations).where(incarnations.c.id == bindparam("which")).values(heartbeat_at=now(), ended_at=null())


NAMED = 4
"""So many processes are named in one line."""

SAME_MOMENT_S = 0.001
"""Two times of the database's clock in one statement are at most so far apart."""


def host_name() -> str:
    """Host name, boot id and pid namespace: process ids are meaningful only within them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = "?"
    return f"{socket.gethostname()}/{boot}/{space}"[:255]


def register(tx: Tx, *, alone: bool) -> int:
    """Register a new incarnation; returns its id.

    Processes known to be dead are ended: all of them if this process is `alone` (it holds SQLite's lock), else those on
    this host that no longer run. The others lose their claims when their lease ends.
    """
    host = host_name()
    if alone:
        tx.run(_end_all, {})
    else:
        # In containers a new process often has its predecessor's pid; this process is not yet in the table.
        _end_gone(tx, host, lambda pid: pid != os.getpid() and _is_running(pid))
    row = tx.one(_register, {"at_host": host, "as_pid": os.getpid(), "of_release": release()})
    assert row is not None
    return int(row[0])


def end_gone(tx: Tx) -> None:
    """End processes of this host that no longer run, without waiting for their leases."""
    _end_gone(tx, host_name(), _is_running)


def _end_gone(tx: Tx, host: str, is_running: Callable[[int], bool]) -> None:
    for number, pid in tx.all(_here, {"at_host": host}):
        if not is_running(pid):
            tx.run(_end, {"which": number})


class Serving(NamedTuple):
    """A process that serves the store; `host` as `host_name` gives it, `since` in seconds since the epoch."""

    pid: int
    host: str
    release: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"{self.release} on {self.host.partition('/')[0]}, pid {self.pid}, since {since:%Y-%m-%d %H:%M:%S} UTC"


def living(connection: Connection, lease_s: float) -> list[Serving]:
    """Processes that may be serving this store: those with a heartbeat in the last `lease_s` seconds, but none of this
    host that no longer runs."""
    host = host_name()
    found = [Serving(*row) for row in connection.execute(_living, {"lease_s": lease_s})]
    return [one for one in found if one.host != host or _is_running(one.pid)]


def require_unserved(connection: Connection, lease_s: float, todo: str) -> None:
    """Raises StartupError, which ends with `todo`, while a process may be serving a PostgreSQL store."""
    alive = living(connection, lease_s)
    if not alive:
        return
    named = "; ".join([*map(str, alive[:NAMED]), *([f"{len(alive) - NAMED} more"] if len(alive) > NAMED else [])])
    raise StartupError(
        f"{amount(len(alive), 'process serves', 'processes serve')} this database ({named}){todo}; a killed "
        f"process counts until {lease_s:g} s after its last heartbeat"
    )


class IncarnationState(NamedTuple):
    """`ended`: by itself or another process. `gone`: it ran on this host and no longer does. `left`: seconds of its
    lease."""

    ended: bool
    gone: bool
    left: float


def standing(connection: Connection, incarnation: int, lease_s: float) -> IncarnationState:
    """A process's state. Of another host's only heartbeats are known."""
    row = connection.execute(_signs, {"which": incarnation, "lease_s": lease_s}).first()
    if row is None or row.ended_at is not None:
        return IncarnationState(ended=True, gone=True, left=0.0)
    return IncarnationState(ended=False, gone=row.host == host_name() and not _is_running(row.pid), left=row.left)


def died_after(connection: Connection, incarnation: int, lease_s: float) -> float | None:
    """When a process that died without an orderly stop last gave a sign of life, in seconds since the epoch.

    None if it lives, as far as the store knows, or stopped orderly (its last sign of life was its end).
    """
    row = connection.execute(_signs, {"which": incarnation, "lease_s": lease_s}).first()
    if row is None:
        return None
    is_dead = row.left < 0 if row.ended_at is None else row.ended_at - row.heartbeat_at > SAME_MOMENT_S
    return float(row.heartbeat_at) if is_dead else None


def heartbeat(tx: Tx, incarnation: int) -> None:
    """Renew this process's lease, even if another process took it for dead: its fences decide what it may write."""
    tx.run(_beat, {"which": incarnation})


def end(tx: Tx, incarnation: int) -> None:
    """A process is dead: its claims are void at once."""
    tx.run(_end, {"which": incarnation})


def stop(tx: Tx, incarnation: int) -> None:
    """As `end`, for an orderly stop of this process itself: its replies have been sent."""
    tx.run(_stop, {"which": incarnation})


def _is_running(pid: int) -> bool:
    """False also for a zombie process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"


# Leases.

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
