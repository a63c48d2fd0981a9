"""Worker processes that validate large replies, off the event loop.

Each worker has one channel. A worker that dies affects only its own job, which is retried once on another. Errors:

    PoolError
    ├── Crashed     two workers ended during the job
    ├── QueueFull   too many jobs are waiting
    ├── NoWorker    none has been ready for a while
    └── Stopped     the pool is stopping
    Rejected        (workers.parse) the job's own answer
    └── PromptDiffers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import msgspec

from workers.channel import START_S, Reason, WorkerEnded, WorkerProcess, WorkerSettings
from workers.child import Outcome
from workers.parse import PromptDiffers, Rejected

log = logging.getLogger("turnlog.workers")

ATTEMPTS = 2
MAX_WAITING = 1000

BACKOFF_S = 0.05, 5.0
"""First and longest pause before a worker is replaced that ended without a job."""


class PoolError(Exception):
    """The pool has no answer to a job."""


class Crashed(PoolError):
    """Two different workers ended during one job; `reasons` has one each, in order."""

    def __init__(self, reasons: list[Reason], deadline_s: float) -> None:
        self.reasons = reasons
        super().__init__("; then ".join(f"a worker {reason.describe(deadline_s)}" for reason in reasons))


class QueueFull(PoolError):
    """More jobs are waiting than the pool allows."""


class NoWorker(PoolError):
    """No worker was ready for so long that none is expected."""


class Stopped(PoolError):
    """The pool is stopping, or stopped before the job was done."""


class PoolCounters(msgspec.Struct, frozen=True):
    """The pool's state for `/health`: workers wanted, ready and busy; waiting jobs; since the start, answered jobs and
    workers that ended unexpectedly."""

    size: int
    alive: int
    busy: int
    waiting: int
    jobs: int
    crashes: int


class Pool:
    """`size` worker processes for CPU-bound jobs, on asyncio's or uvloop's loop.

    A job goes to the most recently idle worker, whose caches are warm; without an idle one, jobs wait in order.
    """

    def __init__(
        self,
        size: int,
        *,
        deadline_s: float,
        memory_bytes: int,
        max_waiting: int = MAX_WAITING,
        function: str = "workers.job:run",
        patience_s: float = START_S,
    ) -> None:
        """A job may take `deadline_s` seconds and, besides program and content, `memory_bytes` of address space.

        `function` is the `package.module:name` that workers run: (job, body) memoryviews in, bytes or Rejected out. A
        job waits `patience_s` while no worker is ready; with 0 it ends as soon as the last one has.
        """
        self._size = size
        self._patience_s = patience_s
        self._settings = WorkerSettings(function, deadline_s, memory_bytes)
        self._max_waiting = max_waiting
        self._keepers: list[asyncio.Task[None]] = []
        self._children: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._stopped = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._jobs = 0
        self._crashes = 0

    def start(self) -> None:
        """Start the workers in the background; jobs wait until the first is ready."""
        self._keepers = [asyncio.create_task(self._keep_worker()) for _ in range(self._size)]

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        """The function's result for one job. Raises Rejected, Crashed, QueueFull, Stopped; OSError: no shared memory.

        `pieces` make up the body and must not change meanwhile. Waiting for a worker has no time limit.
        """
        if self._stopping:
            raise Stopped("the worker pool is stopping")
        if not self._idle and len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} jobs are already waiting for a worker")
        self._unfinished += 1
        self._drained.clear()
        try:
            return await self._attempt(job, *pieces)
        finally:
            self._unfinished -= 1
            if not self._unfinished:
                self._drained.set()

    async def stop(self, grace_s: float) -> None:
        """Take no new jobs, wait at most `grace_s` seconds for the others, then end all workers."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._drained.wait()
        self._stopped = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(Stopped("the worker pool stopped"))
        for child in self._children.difference(self._idle):
            child.kill(Reason.DIED)
        self._idle.clear()
        await asyncio.gather(*(child.shut_down() for child in self._children))
        self._children.clear()

    def counters(self) -> PoolCounters:
        """The current state."""
        alive = sum(child.is_ready and child.usable for child in self._children)
        idle = sum(child.usable for child in self._idle)
        return PoolCounters(self._size, alive, alive - idle, len(self._waiting), self._jobs, self._crashes)

    async def _attempt(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        reasons: list[Reason] = []
        is_retry = False
        while len(reasons) < ATTEMPTS:
            child = self._idle.pop() if self._idle else await self._next_idle(is_retry)
            is_retry = True
            try:
                outcome, content = await child.run(job, *pieces)
            except WorkerEnded as end:
                if self._stopped:
                    raise Stopped("the worker pool stopped") from end
                if end.reason is not None:
                    reasons.append(end.reason)
                continue
            self._jobs += 1
            if outcome == Outcome.REJECTED:
                raise Rejected(content.decode())
            if outcome == Outcome.PROMPT_DIFFERS:
                raise PromptDiffers(content.decode())
            return content
        raise Crashed(reasons, self._settings.deadline_s)

    async def _next_idle(self, is_retry: bool) -> WorkerProcess:
        """Wait in order; a retried job has waited already and is next."""
        if self._stopped:
            raise Stopped("the worker pool stopped")
        if not self._patience_s and not self._has_ready:
            raise NoWorker("no worker is ready")
        waiter: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_retry else self._waiting.append)(waiter)
        try:
            while not (await asyncio.wait({waiter}, timeout=self._patience_s or None))[0]:
                if not self._has_ready:
                    self._waiting.remove(waiter)
                    raise NoWorker(f"no worker was ready for {self._patience_s:g} s")
            return waiter.result()
        except asyncio.CancelledError:
            if not waiter.done():
                self._waiting.remove(waiter)
            elif waiter.exception() is None:
                self._on_idle(waiter.result())
            raise

    @property
    def _has_ready(self) -> bool:
        return any(child.is_ready and child.usable for child in self._children)

    def _on_idle(self, child: WorkerProcess) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(child)
                return
        self._idle.append(child)

    async def _keep_worker(self) -> None:
        """Keep one worker running: replace it whenever it ends."""
        wait_s = 0.0
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(max(2 * wait_s, BACKOFF_S[0]), BACKOFF_S[1])
            try:
                child = WorkerProcess(self._settings, self._on_idle)
            except OSError as error:
                log.error("no worker could be started (%s); next try in %.2f s", error.strerror, wait_s)
                continue
            started = time.monotonic()
            self._children.add(child)
            await child.ended.wait()
            how = await child.reap()
            self._crashes += 1
            self._children.discard(child)
            if child in self._idle:
                self._idle.remove(child)
            if not self._patience_s and not self._has_ready:
                for waiter in self._waiting:
                    if not waiter.done():
                        waiter.set_exception(NoWorker("the last ready worker has ended"))
                self._waiting.clear()
            if child.had_job or time.monotonic() - started > BACKOFF_S[1]:
                wait_s = 0.0
            log.warning("worker %d %s; the next one starts in %.2f s", child.pid, how, wait_s)
