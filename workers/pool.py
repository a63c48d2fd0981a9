"""Worker processes that judge large replies, so that the event loop need not.

One channel a child: a child that dies harms only its own job, which is tried once more on another. Errors:

    PoolError
    ├── Crashed     two workers ended over the job
    ├── QueueFull   too many jobs wait already
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

from workers.channel import START_S, Child, Ended, Reason, Settings
from workers.child import Outcome
from workers.parse import PromptDiffers, Rejected

log = logging.getLogger("turnlog.workers")

ATTEMPTS = 2
MAX_WAITING = 1000

BACKOFF_S = 0.05, 5.0
"""First and longest wait before a place is filled again whose child ended without having had a job."""


class PoolError(Exception):
    """The pool has no answer to a job."""


class Crashed(PoolError):
    """Two different workers ended over one job; `reasons` has one each, in order."""

    def __init__(self, reasons: list[Reason], deadline_s: float) -> None:
        self.reasons = reasons
        super().__init__("; then ".join(f"a worker {reason.told(deadline_s)}" for reason in reasons))


class QueueFull(PoolError):
    """More jobs wait than the pool was told to keep waiting."""


class NoWorker(PoolError):
    """No child could be started for so long that none is expected."""


class Stopped(PoolError):
    """The pool is stopping, or stopped before the job was done."""


class Counters(msgspec.Struct, frozen=True):
    """The pool for `/health`: places, children that are ready, those at work; jobs that wait; since the start, jobs
    that were answered and children that ended over one or by themselves."""

    size: int
    alive: int
    busy: int
    waiting: int
    jobs: int
    crashes: int


class Pool:
    """`size` worker processes for CPU-bound jobs, on asyncio's or uvloop's loop.

    A job goes to the child that was idle last, whose caches are warm; jobs that find none idle wait in order.
    """

    def __init__(
        self,
        size: int,
        *,
        deadline_s: float,
        memory_bytes: int,
        max_waiting: int = MAX_WAITING,
        function: str = "workers.job:run",
    ) -> None:
        """A job may take `deadline_s` seconds and, beside program and content, `memory_bytes` of address space.

        `function` is the `package.module:name` of what children run: (job, body) memoryviews in, bytes or Rejected out.
        """
        self._size = size
        self._settings = Settings(function, deadline_s, memory_bytes)
        self._max_waiting = max_waiting
        self._places: list[asyncio.Task[None]] = []
        self._children: set[Child] = set()
        self._idle: list[Child] = []
        self._waiting: deque[asyncio.Future[Child]] = deque()
        self._unfinished = 0
        self._stopping = False
        self._stopped = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._jobs = 0
        self._crashes = 0

    def start(self) -> None:
        """Start the children, in the background: jobs wait until the first is ready."""
        self._places = [asyncio.create_task(self._keep_place()) for _ in range(self._size)]

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        """The function's result for one job. Raises Rejected, Crashed, QueueFull, Stopped; OSError: no shared memory.

        `pieces` make up the body, and must not change meanwhile. The time that a job waits for a child is not limited.
        """
        if self._stopping:
            raise Stopped("the worker pool is stopping")
        if not self._idle and len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} jobs wait for a worker already")
        self._unfinished += 1
        self._drained.clear()
        try:
            return await self._attempt(job, *pieces)
        finally:
            self._unfinished -= 1
            if not self._unfinished:
                self._drained.set()

    async def stop(self, grace_s: float) -> None:
        """Take no new job, let those that run or wait end for at most `grace_s` seconds, then end every child."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._drained.wait()
        self._stopped = True
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)
        self._places = []
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(Stopped("the worker pool stopped"))
        for child in self._children.difference(self._idle):
            child.condemn(Reason.DIED)
        self._idle.clear()
        await asyncio.gather(*(child.leave() for child in self._children))
        self._children.clear()

    def counters(self) -> Counters:
        """The state of this moment."""
        alive = sum(child.is_ready and child.usable for child in self._children)
        idle = sum(child.usable for child in self._idle)
        return Counters(self._size, alive, alive - idle, len(self._waiting), self._jobs, self._crashes)

    async def _attempt(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        reasons: list[Reason] = []
        again = False
        while len(reasons) < ATTEMPTS:
            child = self._idle.pop() if self._idle else await self._next_idle(again)
            again = True
            try:
                outcome, content = await child.run(job, *pieces)
            except Ended as end:
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

    async def _next_idle(self, again: bool) -> Child:
        """Wait in line; a job that is tried again has waited already and is the next."""
        if self._stopped:
            raise Stopped("the worker pool stopped")
        waiter: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(waiter)
        try:
            while not (await asyncio.wait({waiter}, timeout=START_S))[0]:
                if not any(child.is_ready and child.usable for child in self._children):
                    self._waiting.remove(waiter)
                    raise NoWorker(f"no worker was ready for {START_S:g} s")
            return waiter.result()
        except asyncio.CancelledError:
            if not waiter.done():
                self._waiting.remove(waiter)
            elif waiter.exception() is None:
                self._now_idle(waiter.result())
            raise

    def _now_idle(self, child: Child) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(child)
                return
        self._idle.append(child)

    async def _keep_place(self) -> None:
        """Always a child in this place of the pool."""
        wait_s = 0.0
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(max(2 * wait_s, BACKOFF_S[0]), BACKOFF_S[1])
            try:
                child = Child(self._settings, self._now_idle)
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
            if child.had_job or time.monotonic() - started > BACKOFF_S[1]:
                wait_s = 0.0
            log.warning("worker %d %s; the next one starts in %.2f s", child.pid, how, wait_s)
