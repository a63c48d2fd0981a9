"""Makes the parts of a large export on several cores, in their order.

Helper processes make parts beside a thread of this process. They run while a large export does, so that a server
without one does not hold their memory. A helper reads the store itself: to hand over what was read would cost as much
as to read it. A part that a helper did not make is made on the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import chain, islice

import msgspec

from app.domain.branches import Branches
from app.errors import AppError
from app.export import formats
from app.export.containers.writer import PIECE
from app.export.pages import ExportPage, ExportPages
from app.export.parts import PartRows, Warn
from app.export.query import Cursor, ExportQuery
from app.export.writing import MadePart, Rows, Threads, next_rows
from app.process import cancelled, uncancelled
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.feed import Position
from workers.codec import describe
from workers.parse import Rejected
from workers.pool import Pool, PoolError

MAX_BYTES = 32 << 20
"""About how many bytes of rows a job gives at most: a session may have many rows, each with its whole prompt."""


class HelpedExport(msgspec.Struct, frozen=True):
    """An export: where its store is, and what is asked for. `query` is the JSON of an ExportQuery."""

    url: str
    query: str
    window: Cursor
    high: Position
    release: str
    branches: Branches


class PartJob(msgspec.Struct, frozen=True):
    """Pages of an export. `export` is a HelpedExport, encoded, the same in all its jobs."""

    export: bytes
    pages: list[ExportPage]


describe(HelpedExport, PartJob)


def run(_: memoryview, body: memoryview) -> bytes:
    """Raises Rejected where the store cannot be read: then the server tries, and says why."""
    job = msgspec.msgpack.decode(body, type=PartJob)
    part = _part_of(job.export)
    try:
        stored = _loop().run_until_complete(part.pages.read(job.pages, part.rows.plan))
    except AppError as error:
        raise Rejected(type(error).__name__) from error
    part.unreadable.clear()
    made = part.rows.fields(job.pages, stored)
    packed: list[bytes] = []
    count = 0
    query = part.query
    with contextlib.closing(formats.open_writer(query, part.rows.instead)) as writer:
        while rows := next_rows(made, PIECE):
            count += len(rows)
            packed.append(writer.pack(rows))
            if sum(map(len, packed)) >= MAX_BYTES:
                break
    is_whole = next(made, None) is None
    return msgspec.msgpack.encode(MadePart(count, is_whole, packed, part.unreadable, part.pages.turn_bytes))


class _Export:
    """What a helper keeps of an export between its jobs."""

    def __init__(self, encoded: bytes) -> None:
        export = msgspec.msgpack.decode(encoded, type=HelpedExport)
        self.query = ExportQuery.model_validate_json(export.query)
        self.pages = ExportPages(_database(export.url), export.high, self.query, export.branches)
        self.unreadable: list[tuple[str, str]] = []
        self.rows = PartRows(
            self.query,
            export.window,
            export.release,
            export.branches,
            lambda session_id, why: self.unreadable.append((session_id, str(why))),
        )


_part_of = functools.lru_cache(maxsize=4)(_Export)


@functools.cache
def _database(url: str) -> Database:
    return Database(url, blocking=True, points=StorePoints())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Not an `asyncio.Runner`: in the main thread it has all that a task returned written out as text, to see whether
    its own handler of signals is still there."""
    return asyncio.new_event_loop()


log = logging.getLogger("turnlog.export")

Part = list[ExportPage]

MOST_HELPERS = 3
"""Helpers of a server: each has about 100 MiB, and what they leave free of the machine serves turns."""

LOCAL_PARTS = 8
"""Parts that are made without helpers: it takes half a second until they have started."""

AHEAD_BYTES = 2 << 20
"""About how many bytes of rows this process makes before their turn."""

PART_BYTES = 3 << 20
"""About how much stored content a part has: less than without helpers, since several parts are in memory."""


class Helpers:
    """`count` helper processes, while they are lent; a job may take so many seconds, and bytes of memory.

    `local_parts` of an export are made without them; a part has about `part_bytes` of stored content.
    """

    def __init__(
        self,
        count: int,
        *,
        deadline_s: float,
        memory_bytes: int,
        local_parts: int = LOCAL_PARTS,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.count = count
        self.local_parts = local_parts
        self.part_bytes = part_bytes
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._pool: Pool | None = None
        self._lent = 0

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Pool]:
        """The pool, which several exports share."""
        if self._pool is None:
            self._pool = Pool(
                self.count,
                deadline_s=self._deadline_s,
                memory_bytes=self._memory_bytes,
                function="app.export.helpers:run",
                patience_s=0,
            )
            self._pool.start()
        pool = self._pool
        self._lent += 1
        try:
            yield pool
        finally:
            self._lent -= 1
            if not self._lent:
                self._pool = None
                await uncancelled(pool.stop(0))


class PartMaker:
    """Makes parts of one export; with `pages` and `rows` it does so here."""

    def __init__(self, export: HelpedExport, pages: ExportPages, rows: PartRows, warn: Warn, threads: Threads) -> None:
        self._export = msgspec.msgpack.encode(export)
        self._pages = pages
        self._rows = rows
        self._warn = warn
        self.threads = threads
        self.pool: Pool | None = None
        self._by_helpers = self._here = 0

    @property
    def is_free(self) -> bool:
        return not self._here or self._is_helper_free

    @property
    def _is_helper_free(self) -> bool:
        return self.pool is not None and self._by_helpers < self.pool.counters().alive

    async def make(self, part: Part) -> list[Rows]:
        """The rows of a part, some made, and what makes the others."""
        if self.pool is None or not self._is_helper_free:
            return await self._make_here(part)
        self._by_helpers += 1
        try:
            return await self._make_by_helper(self.pool, part)
        except Rejected:
            pass  # it cannot read this part
        except (PoolError, OSError) as error:
            log.warning("an export helper process failed (%s); the server makes its rows", type(error).__name__)
        finally:
            self._by_helpers -= 1
        return await self._make_here(part)

    async def _make_here(self, part: Part) -> list[Rows]:
        self._here += 1
        try:
            rows = self._rows.fields(part, await self._pages.read(part, self._rows.plan))
            return [chain(await self.threads.run(next_rows, rows, AHEAD_BYTES), rows)]
        finally:
            self._here -= 1

    async def _make_by_helper(self, pool: Pool, part: Part) -> list[Rows]:
        answer = await pool.run(b"", msgspec.msgpack.encode(PartJob(self._export, part)))
        made_part = msgspec.msgpack.decode(answer, type=MadePart)
        self._pages.turn_bytes = made_part.turn_bytes or self._pages.turn_bytes
        for session_id, why in made_part.unreadable:
            self._warn(session_id, why)
        if made_part.is_whole:
            return [made_part]
        read = await self._pages.read(part, self._rows.plan)
        return [made_part, islice(self._rows.fields(part, read), made_part.rows, None)]


async def made(helpers: Helpers, parts: AsyncGenerator[Part], maker: PartMaker) -> AsyncGenerator[Rows]:
    """The rows of the parts, in their order."""
    waiting: deque[asyncio.Task[list[Rows]]] = deque()
    most = helpers.count + 2
    async with contextlib.aclosing(parts), contextlib.AsyncExitStack() as stack:
        number = 0
        try:
            async for part in parts:
                number += 1
                if number > helpers.local_parts and maker.pool is None:
                    maker.pool = await stack.enter_async_context(helpers.lent())
                while not maker.is_free or len(waiting) >= most:
                    if waiting[0].done() or len(waiting) >= most:
                        for rows in await waiting.popleft():
                            yield rows
                    else:
                        running = [task for task in waiting if not task.done()]
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                waiting.append(asyncio.create_task(maker.make(part)))
                await asyncio.sleep(0)  # the task takes its place
            while waiting:
                for rows in await waiting.popleft():
                    yield rows
        finally:
            await cancelled(*waiting)
