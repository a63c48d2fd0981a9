"""Processes large request bodies on a thread, one at a time, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from app.domain.known_body import ContinuedBody
from app.domain.request import ChatRequest, CompletionRequest
from app.domain.rules import TreeIndex
from workers import scan

INLINE_BYTES = 512 << 10
"""Requests up to this size are parsed on the loop: 1.5 ms, less than half of such a turn."""

INLINE_VALUES = 8000
"""Bodies that may hold more JSON values are parsed on a thread, however small: many tiny messages take 25 ms."""

BYTES_A_SECOND = 100 << 10
"""A body waits for smaller ones that arrive within size / BYTES_A_SECOND seconds: 160 seconds for 16 MiB."""

T = TypeVar("T")


def large_bytes(body: bytes, continued: ContinuedBody | None = None) -> int:
    """The body's size if the loop must not parse it itself, else 0. `continued`: what is known of it."""
    if len(body) <= INLINE_VALUES or (continued is not None and not continued.is_translated_anew):
        return 0
    return len(body) if _is_large(body) else 0


def large_history(body: bytes, request: ChatRequest | CompletionRequest, index: TreeIndex) -> int:
    """The body's size if the loop must not read the history of its request itself, else 0: it reads what is behind the
    newest turn that is known of it."""
    if not isinstance(request, ChatRequest):
        return 0
    prefix = request.prefix
    turn = None if prefix is None else index.turn_within(prefix.turn, prefix.messages)
    unread = [memoryview(raw) for raw in request.messages[0 if turn is None else turn.message_count - 1 :]]
    return len(body) if sum(map(len, unread)) > INLINE_BYTES or _is_large(b",".join(unread)) else 0


def _is_large(text: bytes) -> bool:
    return len(text) > INLINE_BYTES or scan.may_exceed(text, INLINE_VALUES)


class LargeBodies:
    """Runs one job at a time: several threads that hold the GIL would block the loop for long.

    Shorter bodies go first: one of 12 MiB may take two seconds, which an ordinary turn must not wait for repeatedly.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a thread in its turn; inline if `size` is 0."""
        if not size:
            return work()
        await self._enter(size)
        task = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(self._leave)
        try:
            # A thread cannot be stopped. If the request is cancelled, the next one still waits for its end.
            await asyncio.wait((task,))
            return task.result()
        finally:
            del task  # An error has this frame in its traceback, and with the task in it would hold itself, and a body.

    async def _enter(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        loop = asyncio.get_running_loop()
        admission = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + size / BYTES_A_SECOND, next(self._numbers), admission))
        try:
            await admission
        except asyncio.CancelledError:
            if admission.done() and not admission.cancelled():
                self._admit_next()
            raise

    def _leave(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # Marks it as retrieved: a cancelled request does not read it.
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting:
            admission = heapq.heappop(self._waiting)[2]
            if not admission.done():
                admission.set_result(None)
                return
        self._is_busy = False
