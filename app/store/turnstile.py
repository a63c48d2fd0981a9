"""Many side by side, or one alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType


class Turnstile:
    """`async with` lets anybody in; `alone` waits until they have left, and has others wait meanwhile."""

    def __init__(self) -> None:
        self._inside = 0
        self._has_left = asyncio.Event()
        self._alone = asyncio.Lock()

    async def __aenter__(self) -> None:
        while self._alone.locked():
            async with self._alone:
                pass
        self._inside += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        self._has_left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._alone:
            while self._inside:
                self._has_left.clear()
                await self._has_left.wait()
            yield
