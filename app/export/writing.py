"""Makes rows and writes them as the pieces of one file, on threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import msgspec

from app.export.containers.writer import PIECE, ContainerWriter, weight
from app.export.row import Fields
from app.process import cancelled
from workers.codec import describe

P = ParamSpec("P")
T = TypeVar("T")

COUNT = 2
"""One makes rows while the other writes. Each thread keeps freed memory to itself, so more would only cost memory."""


class Threads:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(COUNT, thread_name_prefix="export")

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *arguments, **named))


SLICE_BYTES = 2 << 20
"""Approximate bytes of rows that are made together: a session may have many, each with its whole prompt."""


def some_rows(made: Iterator[Fields], most: int = SLICE_BYTES) -> Iterator[Fields]:
    """The next rows, about `most` bytes of them. Each is made when it is asked for."""
    size = 0
    for row in made:
        size += sum(map(weight, row.values()))
        yield row
        if size >= most:
            return


def next_rows(made: Iterator[Fields], most: int = SLICE_BYTES) -> list[Fields]:
    """As `some_rows`, made."""
    return list(some_rows(made, most))


class MadePart(msgspec.Struct, frozen=True):
    """The first `rows` rows of a part, packed; all of them if it `is_whole`.

    `unreadable`: the sessions that cannot be read, and why. `turn_bytes`: what a turn had, None without one.
    """

    rows: int
    is_whole: bool
    packed: list[bytes]
    unreadable: list[tuple[str, str]]
    turn_bytes: int | None


describe(MadePart)

Rows = MadePart | Iterator[Fields]
"""Rows that a helper process has made, or what makes them on a thread."""


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


async def read_ahead(items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The same, with the next one made while one is used. Closes them."""

    async def following() -> T | None:  # a task takes no awaitable of another kind
        return await anext(items, None)

    async with contextlib.aclosing(items):
        task = asyncio.create_task(following())
        try:
            while (item := await task) is not None:
                task = asyncio.create_task(following())
                yield item
        finally:
            await cancelled(task)


async def begun(threads: Threads, parts: AsyncGenerator[Rows]) -> Rows | None:
    """The first part that has rows; None if none has."""
    async for rows in parts:
        if isinstance(rows, MadePart):
            if rows.rows:
                return rows
        elif (first := await threads.run(next, rows, None)) is not None:
            return chain([first], rows)
    return None


async def written(
    threads: Threads, writer: ContainerWriter, first: Rows | None, rest: AsyncGenerator[Rows]
) -> AsyncGenerator[bytes]:
    """The parts as pieces of one file."""
    with contextlib.closing(_Worker(threads, writer)) as worker:
        async with contextlib.aclosing(rest):
            part = first
            while part is not None:
                pieces, is_whole = await worker.do(_next_pieces, writer, part)
                for piece in pieces:
                    for at in range(0, len(piece), PIECE):  # a long row would be copied at once on the event loop
                        yield piece[at : at + PIECE] if len(piece) > PIECE else piece
                if is_whole:
                    part = await anext(rest, None)
        last = writer.finish()
        while piece := await worker.do(next, last, b""):
            yield piece


def _next_pieces(writer: ContainerWriter, part: Rows) -> tuple[list[bytes], bool]:
    """The pieces of the next rows of a part, and whether these were its last.

    A row is written as soon as it is made, while it is in the processor's cache.
    """
    if isinstance(part, MadePart):
        return [piece for packed in part.packed for piece in writer.add(packed)], True
    following = next(part, None)
    if following is None:
        return [], True
    return list(writer.write(some_rows(chain([following], part)))), False
