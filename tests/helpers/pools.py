"""Pools of real processes for tests, and what becomes of processes."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from workers.channel import START_S
from workers.pool import Pool

MIB = 1 << 20
LOOPS = [
    ("asyncio", {"use_uvloop": False}),
    ("asyncio", {"use_uvloop": True}),
]
"""For an `anyio_backend` fixture: both loops that the pool must work on."""


@asynccontextmanager
async def running(
    size: int = 1,
    *,
    deadline_s: float = 60,
    memory_bytes: int = 512 * MIB,
    max_waiting: int = 100,
    function: str = "helpers.pool_jobs:act",
    patience_s: float = START_S,
) -> AsyncIterator[Pool]:
    """A pool that runs `helpers.pool_jobs`; stopped without grace, and none of its children stays."""
    pool = Pool(
        size,
        deadline_s=deadline_s,
        memory_bytes=memory_bytes,
        max_waiting=max_waiting,
        function=function,
        patience_s=patience_s,
    )
    before = children()
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop(0)
    assert children() == before


def children(of: int | None = None) -> set[int]:
    """Process ids of this process's worker children, or another's; a test session has other children, too."""
    parent = of or os.getpid()
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        process = Path("/proc", pid)
        try:
            ppid = (process / "stat").read_text().rpartition(")")[2].split()[1]
            is_worker = b"workers.child" in (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(ppid) == parent and is_worker:
            found.add(int(pid))
    return found


def gone(pid: int, within_s: float) -> bool:
    """Has the process ended, or does it within that time?"""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


class Gate:
    """Holds a job `hold <path>` until it is opened."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end: BinaryIO | None = None

    @property
    def job(self) -> bytes:
        return f"hold {self.path}".encode()

    async def reached(self) -> None:
        """The job has begun. Asks again and again: nothing reports it, and a thread in open() could never be ended."""
        async with asyncio.timeout(20):
            while True:
                try:
                    self._end = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK), "wb", 0)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    await asyncio.sleep(0.002)
                else:
                    return

    def open(self, result: bytes = b"") -> None:
        """Let the job end with this result."""
        assert self._end is not None
        self._end.write(result)
        self.close()

    def close(self) -> None:
        """Let go of it, whether or not it was opened."""
        if self._end is not None:
            self._end.close()


async def all_at_work(pool: Pool, folder: Path) -> None:
    """Each child of the pool is alive, because all are at work at the same moment."""
    gates = [Gate(folder / uuid.uuid4().hex) for _ in range(pool.counters().size)]
    jobs = [asyncio.create_task(pool.run(gate.job, b"")) for gate in gates]
    await asyncio.gather(*(gate.reached() for gate in gates))
    for gate in gates:
        gate.open()
    await asyncio.gather(*jobs)
