"""Writes pages of rows as the pieces of one file, on threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from app.export.containers.writer import ContainerWriter
from app.export.helpers import Rows
from app.export.threads import Threads
from app.export.worker import MadePart
from app.tasks import cancelled

T = TypeVar("T")


class _Worker:
    """Runs a writer on threads. A cancelled request cannot stop a thread, so closing waits for it."""

    def __init__(self, threads: Threads, writer: ContainerWriter) -> None:
        self._threads = threads
        self._writer = writer
        self._work: asyncio.Task[Any] | None = None

    async def do(self, call: Callable[..., T], *arguments: Any) -> T:
        work = asyncio.create_task(self._threads.run(call, *arguments))
        self._work = work
        return await asyncio.shield(work)

    def close(self) -> None:
        if self._work is None or self._work.done():
            self._writer.close()
        else:
            self._work.add_done_callback(lambda _: self._writer.close())


async def read_ahead(pages: AsyncIterator[T]) -> AsyncGenerator[T]:
    """The same pages, with the next one read and shaped while one is written."""

    async def following() -> T | None:
        return await anext(pages, None)

    task = asyncio.create_task(following())
    try:
        while (rows := await task) is not None:
            task = asyncio.create_task(following())
            yield rows
    finally:
        await cancelled(task)


async def written(
    threads: Threads, writer: ContainerWriter, first: Rows | None, rest: AsyncGenerator[Rows]
) -> AsyncGenerator[bytes]:
    """The pages as pieces of one file."""
    with contextlib.closing(_Worker(threads, writer)) as worker:
        if first is not None:
            for piece in await worker.do(_all, writer, first):
                yield piece
        async with contextlib.aclosing(rest):
            async for rows in rest:
                for piece in await worker.do(_all, writer, rows):
                    yield piece
        last = writer.finish()
        while piece := await worker.do(next, last, b""):
            yield piece


def _all(writer: ContainerWriter, rows: Rows) -> list[bytes]:
    if isinstance(rows, MadePart):
        return [piece for packed in rows.packed for piece in writer.add(packed)]
    return list(writer.write(rows))
