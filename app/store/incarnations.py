"""Which processes are alive: one row each, renewed by one heartbeat a process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sqlalchemy import bindparam, insert, null, select, update

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
        for number, pid in tx.all(_here, {"at_host": host}):
            # A container's processes often get the same pid again: ours is not yet in the table.
            if pid == os.getpid() or not _is_running(pid):
                tx.run(_end, {"which": number})
    row = tx.one(_register, {"at_host": host, "as_pid": os.getpid()})
    assert row is not None
    return int(row[0])


def heartbeat(tx: Tx, incarnation: int) -> None:
    """Say that this process is alive, also where another took it for dead: only its fences decide what it may write."""
    tx.run(_beat, {"which": incarnation})


def end(tx: Tx, incarnation: int) -> None:
    """An orderly stop: what this process still held is void at once."""
    tx.run(_end, {"which": incarnation})


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
