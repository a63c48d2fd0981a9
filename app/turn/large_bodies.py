"""Work on large request bodies, which the event loop would wait for: on a thread instead, one at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from workers import scan

INLINE_BYTES = 512 << 10
"""A request up to this is read on the loop: a millisecond and a half, less than half a turn of this size."""

INLINE_VALUES = 8000
"""A body that may hold more is not for the loop, however small: a message of its own for every two takes 25 ms."""

BYTES_A_SECOND = 100 << 10
"""A body goes after all that come within so long after it as it has bytes by this: 16 MiB after 160 seconds' others."""

T = TypeVar("T")


def large_bytes(body: bytes) -> int:
    """A body's size where the loop must not read it itself, else 0."""
    return 0 if len(body) <= INLINE_BYTES and not scan.may_exceed(body, INLINE_VALUES) else len(body)


class LargeBodies:
    """One at a time: threads that hold the interpreter in turns would add up to one long wait of the loop.

    Shorter bodies go first: one of 12 MiB may take two seconds, which an ordinary turn does not wait for many times.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """At once and here if the size is 0."""
        if not size:
            return work()
        await self._enter(size)
        task = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(self._leave)
        # A thread cannot be stopped: where the request has gone, the next one still waits for its end.
        return await asyncio.shield(task)

    async def _enter(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + size / BYTES_A_SECOND, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._let_next_in()
            raise

    def _leave(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # whose request has gone, nobody asks for it
        self._let_next_in()

    def _let_next_in(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False
