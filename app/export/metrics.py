"""Counts the exports of one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from threading import Lock

import msgspec


class ExportMetrics(msgspec.Struct):
    """Exports that run, that ended normally (`whole`), and that failed or whose client disconnected (`cut`).

    `rows` and `sent_bytes` count all of them, `seconds` those that have ended.
    """

    running: int = 0
    whole: int = 0
    cut: int = 0
    rows: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    _adding: Lock = msgspec.field(default_factory=Lock)

    def add_rows(self, count: int) -> None:
        """For any thread: those of several exports make rows at a time."""
        with self._adding:
            self.rows += count

    async def counted(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The same pieces, counted from the first one until they are closed."""
        clock = asyncio.get_running_loop().time
        began, is_whole = clock(), False
        self.running += 1
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    self.sent_bytes += len(piece)
                    yield piece
            is_whole = True
        finally:
            self.running -= 1
            self.whole += is_whole
            self.cut += not is_whole
            self.seconds += clock() - began
