"""A lock that many may share, or one may hold alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType


class Turnstile:
    """`async with` is shared; `alone` waits until all have left, and keeps others waiting meanwhile."""

    def __init__(self) -> None:
        self._active = 0
        self._has_left = asyncio.Event()
        self._alone = asyncio.Lock()

    async def __aenter__(self) -> None:
        while self._alone.locked():
            async with self._alone:
                pass
        self._active += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active -= 1
        self._has_left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._alone:
            while self._active:
                self._has_left.clear()
                await self._has_left.wait()
            yield
