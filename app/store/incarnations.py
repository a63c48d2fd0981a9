"""Which processes are alive: one row each, renewed by one heartbeat a process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, insert, null, select, update

from app.store.dialect import Tx, now
from app.store.schema import incarnations

_register = (
    insert(incarnations)
    .values(host=bindparam("at_host"), pid=bindparam("as_pid"), started_at=now(), heartbeat_at=now())
    .returning(incarnations.c.id)
)
_end_all = update(incarnations).where(incarnations.c.ended_at.is_(None)).values(ended_at=now())
_here = select(incarnations.c.id, incarnations.c.pid).where(
    incarnations.c.ended_at.is_(None), incarnations.c.host == bindparam("at_host")
)
_who = select(
    incarnations.c.host,
    incarnations.c.pid,
    incarnations.c.ended_at,
    (incarnations.c.heartbeat_at + bindparam("lease_s") - now()).label("left"),
).where(incarnations.c.id == bindparam("which"))
_end = update(incarnations).where(incarnations.c.id == bindparam("which")).values(ended_at=now())
_beat = update(incarnations).where(incarnations.c.id == bindparam("which")).values(heartbeat_at=now(), ended_at=null())


def host_name() -> str:
    """This boot of this machine and this space of process ids: they mean nothing beyond it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = "?"
    return f"{socket.gethostname()}/{boot}/{space}"[:255]


def register(tx: Tx, *, alone: bool) -> int:
    """A new incarnation's id.

    Others are ended where it is certain that they are dead: all of them if this process is `alone` (it
    holds SQLite's lock), else those on this host whose process is gone. The rest fall silent and lose
    their claims with their lease.
    """
    host = host_name()
    if alone:
        tx.run(_end_all, {})
    else:
        # A container's processes often get the same pid again: ours is not yet in the table.
        _end_gone(tx, host, lambda pid: pid != os.getpid() and _is_running(pid))
    row = tx.one(_register, {"at_host": host, "as_pid": os.getpid()})
    assert row is not None
    return int(row[0])


def end_gone(tx: Tx) -> None:
    """End those on this host whose process is gone, without waiting for their leases."""
    _end_gone(tx, host_name(), _is_running)


def _end_gone(tx: Tx, host: str, lives: Callable[[int], bool]) -> None:
    for number, pid in tx.all(_here, {"at_host": host}):
        if not lives(pid):
            tx.run(_end, {"which": number})


class Standing(NamedTuple):
    """`ended`: by itself or others. `gone`: its process was on this host, and is not. `left`: seconds of its lease."""

    ended: bool
    gone: bool
    left: float


def standing(connection: Connection, incarnation: int, lease_s: float) -> Standing:
    """How a process stands. Of another host's only its heartbeats are known."""
    row = connection.execute(_who, {"which": incarnation, "lease_s": lease_s}).first()
    if row is None or row[2] is not None:
        return Standing(ended=True, gone=True, left=0.0)
    return Standing(ended=False, gone=row[0] == host_name() and not _is_running(row[1]), left=row[3])


def heartbeat(tx: Tx, incarnation: int) -> None:
    """Say that this process is alive, also where another took it for dead: only its fences decide what it may write."""
    tx.run(_beat, {"which": incarnation})


def end(tx: Tx, incarnation: int) -> None:
    """An orderly stop: what this process still held is void at once."""
    tx.run(_end, {"which": incarnation})


def _is_running(pid: int) -> bool:
    """Not one that has ended, but whose parent has not asked how."""
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
