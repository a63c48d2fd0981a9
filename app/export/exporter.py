"""`/export`: every session's samples in the order of commit, as of one moment.

An export covers a window (`low`, `high`] of the commit order. Each session whose last exported event lies in it
appears once, in its state at `high`, at the position of that event. So an export running beside writes sees a
consistent prefix of each session, and the same cursor gives the same rows. A shape that takes whole groups gives a
group at the position of its last session, with all of its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from threading import Lock
from typing import cast

import msgspec

from app.domain.branches import Branches, Picker
from app.domain.cursors import require_mark
from app.domain.groups import Outcome
from app.errors import InvalidRequest, StartupError
from app.export import formats
from app.export.helpers import HelpedExport, Helpers, PartMaker, made
from app.export.pages import PART_BYTES, ExportPage, ExportPages
from app.export.parts import PartRows
from app.export.query import MAX_RUNS, Cursor, ExportQuery, decode_cursor
from app.export.row import Fields
from app.export.writing import MadePart, Rows, Threads, begun, next_rows, read_ahead, written
from app.store import feed
from app.store.database import Database
from app.store.feed import END, Position, wait_for_horizon
from app.store.sessions import newest_readable_versions


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


class Export(msgspec.Struct, frozen=True):
    """A started export: `cursor` repeats it, `next_cursor` resumes after its window, `pieces` are the bytes.

    `is_empty`: there are no rows.
    """

    cursor: str
    next_cursor: str
    media_type: str
    suffix: str
    is_empty: bool
    pieces: AsyncGenerator[bytes]


class Exporter:
    """`release` is Turnlog's version, for provenance. `counts_only`: give the counts of each row instead of the row.

    `picker` chooses the branches of a request that names none. `helpers` make large exports on several cores.
    """

    def __init__(
        self,
        database: Database,
        release: str,
        *,
        counts_only: bool = False,
        exported: ExportMetrics | None = None,
        picker: Picker | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        self._helpers = helpers
        self._threads = Threads()
        self._picker = picker
        self.exported = ExportMetrics() if exported is None else exported
        self._counts_only = counts_only
        self._database = database
        self.release = release

    async def start(self, query: ExportQuery, cursor: str | None) -> Export:
        """Fix the window. Raises InvalidRequest for an invalid cursor, or an unknown format or shape."""
        self._require(query)
        pinned, high, query = await self._opened(query, cursor)
        following = Cursor(pinned.epoch, high, mark=pinned.mark)
        parts = self._made(pinned, high, query)
        first = await begun(self._threads, parts)
        instead = self._part_rows(query, pinned).instead
        writer = await asyncio.to_thread(formats.open_writer, query, instead)
        rest = read_ahead(parts) if query.limit is None else parts
        pieces = self.exported.counted(read_ahead(written(self._threads, writer, first, rest)))
        media_type, suffix = writer.media_type, writer.suffix
        return Export(pinned.encode(), following.encode(), media_type, suffix, first is None, pieces)

    async def pages(self, query: ExportQuery, cursor: str | None) -> AsyncGenerator[Sequence[Fields]]:
        """The rows themselves instead of a file. Raises as `start`."""
        self._require(query)
        return self._pages(*await self._opened(query, cursor))

    def _require(self, query: ExportQuery) -> None:
        """Raises InvalidRequest, Unsupported."""
        formats.require(query)
        bucket = self._database.bucket
        if query.replay == "urls" and (bucket is None or bucket.is_folder):
            raise InvalidRequest("replay=urls needs a bucket: TURNLOG_PAYLOADS is not set, or names a folder")

    async def _opened(self, query: ExportQuery, cursor: str | None) -> tuple[Cursor, Position, ExportQuery]:
        """The cursor with its window fixed, the window's end, and what is asked for. Raises InvalidRequest."""
        given = None if cursor is None else decode_cursor(cursor)
        if given is not None:
            require_mark(given.mark, query.mark)
        if given is None or given.high is None:
            await wait_for_horizon(self._database)
        epoch = await self._database.read(partial(feed.cursor_epoch, run=query.run))
        horizon = await self._database.read(feed.horizon)
        given = given or Cursor(epoch, Position(0, 0), mark=query.mark)
        if given.epoch != epoch:
            raise InvalidRequest(
                f"the cursor is from epoch {given.epoch}, but the store or run was restored (now {epoch}): "
                "export again without the cursor"
            )
        if given.high is None:
            given = msgspec.structs.replace(given, high=horizon, newest=None)
        if given.newest is None and query.needs_current:
            newest = await self._database.read(
                partial(newest_readable_versions, run=query.run, evaluation=query.evaluation)
            )
            if len(newest) > MAX_RUNS:
                raise InvalidRequest(
                    f"{len(newest)} runs each have their own weight versions: give weight_version, or export one run"
                )
            given = msgspec.structs.replace(given, newest=newest)
        return given, given.high or horizon, query

    async def rows(
        self, session_ids: Sequence[str], query: ExportQuery, outcomes: Mapping[str, Outcome] | None = None
    ) -> list[Fields]:
        """The rows of these sessions as they are now, excluded ones too; meant for few sessions. `outcomes` are those
        of which advantages are made, by root; without them those that are in the log."""
        export_pages = ExportPages(self._database, END, query, self._branches(query), outcomes=outcomes)
        part = await export_pages.of(session_ids)
        part_rows = self._part_rows(query, Cursor("", Position(0, 0), END))
        read = await export_pages.read(part, part_rows.plan)
        return await asyncio.to_thread(lambda: list(part_rows.fields(part, read)))

    def _part_rows(self, query: ExportQuery, window: Cursor) -> PartRows:
        branches, warn = self._branches(query), self._database.unreadable.warn
        return PartRows(query, window, self.release, branches, warn, counts_only=self._counts_only)

    def _export_pages(self, high: Position, query: ExportQuery, part_bytes: int = PART_BYTES) -> ExportPages:
        return ExportPages(self._database, high, query, self._branches(query), part_bytes)

    def _branches(self, query: ExportQuery) -> Branches | Picker:
        return query.branches or self._picker or "kept"

    async def _made(self, window: Cursor, high: Position, query: ExportQuery) -> AsyncGenerator[Rows]:
        """The parts, made with helpers where there are any and they can: not where `limit` ends the export inside a
        part, nor where an operator's own code picks branches."""
        branches = self._branches(query)
        # Helpers know nothing of a bucket, and open the database as a server does.
        is_for_helpers = query.limit is None and not (query.replay and self._database.bucket is not None)
        if self._helpers is None or not isinstance(branches, str) or not is_for_helpers or self._database.is_read_only:
            parts: AsyncGenerator[Rows] = self._made_here(window, high, query)
        else:
            export = HelpedExport(self._database.url, query.model_dump_json(), window, high, self.release, branches)
            export_pages = self._export_pages(high, query, self._helpers.part_bytes)
            part_rows = self._part_rows(query, window)
            maker = PartMaker(export, export_pages, part_rows, self._database.unreadable.warn, self._threads)
            parts = made(self._helpers, read_ahead(self._parts(export_pages, window)), maker)
        async with contextlib.aclosing(parts):
            async for part in parts:
                if isinstance(part, MadePart):
                    self.exported.add_rows(part.rows)
                    yield part
                else:
                    yield self._counted(part)

    def _counted(self, rows: Iterator[Fields]) -> Iterator[Fields]:
        for row in rows:
            self.exported.add_rows(1)
            yield row

    async def _pages(self, window: Cursor, high: Position, query: ExportQuery) -> AsyncGenerator[Sequence[Fields]]:
        async with contextlib.aclosing(self._made_here(window, high, query)) as parts:
            async for part in parts:
                while rows := await self._threads.run(next_rows, part):
                    yield rows

    async def _made_here(self, window: Cursor, high: Position, query: ExportQuery) -> AsyncGenerator[Iterator[Fields]]:
        """What makes the rows of each part; at most as many as `limit` says, if every part is used up in its turn."""
        left = sys.maxsize if query.limit is None else query.limit
        part_rows = self._part_rows(query, window)
        export_pages = self._export_pages(high, query)

        def taken(rows: Iterator[Fields]) -> Iterator[Fields]:
            nonlocal left
            for row in islice(rows, left):
                left -= 1
                yield row

        async with contextlib.aclosing(self._parts(export_pages, window)) as parts:
            async for part in parts:
                yield taken(part_rows.fields(part, await export_pages.read(part, part_rows.plan)))
                if not left:
                    return

    async def _parts(self, export_pages: ExportPages, window: Cursor) -> AsyncGenerator[list[ExportPage]]:
        """The pages of an export, as many as are read together."""
        after: Position | None = window.place
        while after is not None:
            parts, after = await export_pages.following(after)
            for part in parts:
                yield part


def load_picker(path: str | None) -> Picker | None:
    """The function at a dotted path, `package.module.function`. Raises StartupError."""
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        picker = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartupError(
            f"TURNLOG_PICKER={path!r}: expected the dotted path of a function that can be imported: {error}"
        ) from error
    if not callable(picker):
        raise StartupError(f"TURNLOG_PICKER={path!r}: expected the dotted path of a function, which this is not")
    return cast(Picker, picker)
