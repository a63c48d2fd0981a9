"""What a helper process of an export does: it reads a part of it, and packs the rows for the writer of the file.

It reads the store itself: to hand over what was read would cost as much as to read it. The bytes of a job are a
`PartJob`, those of its result a `MadePart`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys

import msgspec

from app.domain.branches import Branches
from app.errors import AppError
from app.export import formats
from app.export.containers.writer import PIECE
from app.export.cursor import Cursor
from app.export.pages import ExportPage, ExportPages
from app.export.parts import PartRows
from app.export.query import ExportQuery
from app.export.slices import next_rows
from app.store.engine import Database
from app.store.reads import Position
from workers.codec import describe
from workers.parse import Rejected

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


class MadePart(msgspec.Struct, frozen=True):
    """The first `rows` rows of a part, packed; all of them if it `is_whole`.

    `unreadable`: the sessions that cannot be read, and why. `turn_bytes`: what a turn had, None without one.
    """

    rows: int
    is_whole: bool
    packed: list[bytes]
    unreadable: list[tuple[str, str]]
    turn_bytes: int | None


describe(HelpedExport, PartJob, MadePart)


def run(_: memoryview, body: memoryview) -> bytes:
    """Raises Rejected where the store cannot be read: then the server tries, and says why."""
    job = msgspec.msgpack.decode(body, type=PartJob)
    part = _part_of(job.export)
    try:
        stored = _loop().run_until_complete(part.pages.read(job.pages))
    except AppError as error:
        raise Rejected(type(error).__name__) from error
    part.unreadable.clear()
    made = part.rows.fields(job.pages, stored)
    packed: list[bytes] = []
    count = 0
    query = part.query
    with contextlib.closing(formats.open_writer(query.format, query.shape, query.explain, part.rows.instead)) as writer:
        while rows := next_rows(made, sys.maxsize, PIECE):
            count += len(rows)
            packed.append(writer.pack(rows))
            if sum(map(len, packed)) >= MAX_BYTES:
                break
    is_whole = next(made, None) is None
    return msgspec.msgpack.encode(MadePart(count, is_whole, packed, part.unreadable, part.pages.turn_bytes))


class _Export:
    """What a helper keeps of an export between its jobs."""

    def __init__(self, export: HelpedExport) -> None:
        self.query = ExportQuery.model_validate_json(export.query)
        self.pages = ExportPages.of_query(_database(export.url), export.high, self.query, export.branches)
        self.unreadable: list[tuple[str, str]] = []
        self.rows = PartRows(self.query, export.window, export.release, export.branches, self._warn)

    def _warn(self, session_id: str, why: object) -> None:
        self.unreadable.append((session_id, str(why)))


@functools.lru_cache(maxsize=4)
def _part_of(export: bytes) -> _Export:
    return _Export(msgspec.msgpack.decode(export, type=HelpedExport))


@functools.cache
def _database(url: str) -> Database:
    return Database(url, blocking=True)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Not an `asyncio.Runner`: in the main thread it has all that a task returned written out as text, to see whether
    its own handler of signals is still there."""
    return asyncio.new_event_loop()
