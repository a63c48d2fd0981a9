"""Work on a request's body that the event loop would wait for: on a thread instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from workers import scan

INLINE_BYTES = 512 << 10
"""A request up to this is read on the loop: a millisecond and a half, less than half a turn of this size."""

INLINE_VALUES = 8000
"""A body that may hold more is not for the loop, however small: a message of its own for every two takes 25 ms."""

T = TypeVar("T")


def is_brief(body: bytes) -> bool:
    """May the loop read this request itself?"""
    return len(body) <= INLINE_BYTES and not scan.may_exceed(body, INLINE_VALUES)


async def beside(is_brief: bool, work: Callable[[], T]) -> T:
    return work() if is_brief else await asyncio.to_thread(work)


class Queue:
    """As `beside`, one after the other: threads that hold the interpreter in turns would add up to one long wait."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def run(self, is_brief: bool, work: Callable[[], T]) -> T:
        if is_brief:
            return work()
        async with self._free:
            return await asyncio.to_thread(work)
