"""`/export`: every session's samples in the order of commit, as of one moment.

An export covers a window (`low`, `high`] of the commit order: each session whose last exported event
lies in it appears once, as it was at `high`, at the place of that event. So a running export sees a
consistent prefix of each session, however much is being written, and the same cursor gives the same rows.
A shape that takes whole groups gives a group at the place of its last session, with all of its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from app.domain import cursors
from app.domain.events import EXPORTED, UnknownEvent
from app.domain.samples import Inconsistent, Truncate
from app.errors import InvalidRequest
from app.export import formats
from app.export.metrics import ExportMetrics
from app.export.pages import ExportPage, ExportPages
from app.export.query import ExportFilters as ExportFilters
from app.export.query import ExportQuery as ExportQuery
from app.export.query import session_excluded
from app.export.row import Fields, Row, Unfit
from app.export.rows import SessionRows, known
from app.store import group_reads, reads, survey
from app.store.bulk import StoredSession
from app.store.engine import Database
from app.store.horizon import wait_for_horizon
from app.store.reads import Position
from workers.codec import CorruptContent

T = TypeVar("T")

UNREADABLE = (UnknownEvent, CorruptContent, Inconsistent)
"""What is wrong with one session, and no other's business."""

ERASED = "erased"

NOTHING_FITS: Mapping[Truncate, str] = {
    "turn": "no turn within max_seq_len",
    "token": "no sampled token within max_seq_len",
}

SLICE_BYTES = 4 << 20
"""Of rows that are made before they are written, about: a session may have many, each with its whole prompt."""


NO_VERSION = -1
"""Stands in a cursor where no weight version in the store is a number."""


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where an export stands. `high` None: up to the moment of asking.

    `at` is the place last given. `given`: not all of it, but so many of its rows, what is left out counted.
    `newest` is the largest weight version in the store when the window was fixed, `NO_VERSION` if none was a number:
    what is current must not change while a window is repeated. Cursors of earlier releases do not say.
    """

    epoch: str
    low: Position
    high: Position | None = None
    at: Position | None = None
    given: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    newest: Annotated[int, msgspec.Meta(ge=NO_VERSION, le=2**63 - 1)] | None = None

    def encode(self) -> str:
        return cursors.encoded(self)


def decode_cursor(text: str) -> Cursor:
    """Raises InvalidRequest."""
    found: Cursor = cursors.decoded(text, Cursor, "an export")
    return found


class Export(msgspec.Struct, frozen=True):
    """A started export: `cursor` repeats it, `next_cursor` goes on behind its window; `pieces` are the bytes.

    `is_empty` says that there are no rows.
    """

    cursor: str
    next_cursor: str
    media_type: str
    suffix: str
    is_empty: bool
    pieces: AsyncGenerator[bytes]


class Exporter:
    """`release` is this version's, for provenance. `counts_only`: what a row is made of is given instead of the row."""

    def __init__(
        self, database: Database, release: str, *, counts_only: bool = False, exported: ExportMetrics | None = None
    ) -> None:
        self.exported = ExportMetrics() if exported is None else exported
        self._counts_only = counts_only
        self._database = database
        self.release = release

    async def start(self, wish: ExportQuery, cursor: str | None) -> Export:
        """Fix the window. Raises InvalidRequest for a foreign cursor, or a format or shape that there is not."""
        formats.require(wish.format, wish.shape)
        pinned, high, pages = await self._opened(wish, cursor)
        following = Cursor(pinned.epoch, high)
        first = await anext(pages, None)
        writer = await asyncio.to_thread(formats.open_writer, wish.format, wish.shape, wish.explain)
        pieces = self.exported.counted(_written(writer, first, _ahead(pages)))
        media_type, suffix = writer.media_type, writer.suffix
        return Export(pinned.encode(), following.encode(), media_type, suffix, first is None, pieces)

    async def pages(self, wish: ExportQuery, cursor: str | None) -> AsyncGenerator[Sequence[Fields]]:
        """The rows as they are made, instead of a file. Raises as `start`."""
        formats.require(wish.format, wish.shape)
        _, _, pages = await self._opened(wish, cursor)
        return pages

    async def _opened(
        self, wish: ExportQuery, cursor: str | None
    ) -> tuple[Cursor, Position, AsyncGenerator[Sequence[Fields]]]:
        """The cursor with its window fixed, where that ends, and the rows. Raises InvalidRequest."""
        pinned, high = await self._window(None if cursor is None else decode_cursor(cursor))
        wish = msgspec.structs.replace(wish, filters=_as_of(pinned, wish.filters))
        return pinned, high, self._pages(pinned, high, wish)

    async def _window(self, given: Cursor | None) -> tuple[Cursor, Position]:
        """The cursor with the end of its window fixed, and that end. Raises InvalidRequest."""
        if given is None or given.high is None:
            await wait_for_horizon(self._database)
        epoch = await self._database.read(reads.epoch)
        horizon, newest = await self._database.read(
            lambda connection: (reads.horizon(connection), group_reads.newest_version(connection)),
            or_else=lambda connection: (survey.horizon(connection), survey.newest_version(connection)),
        )
        given = given or Cursor(epoch, Position(0, 0))
        if given.epoch != epoch:
            raise InvalidRequest(
                f"the cursor is of epoch {given.epoch}, the store is in {epoch}: it was restored; export anew"
            )
        if given.high is not None:
            return given, given.high
        known = NO_VERSION if newest is None else newest
        return msgspec.structs.replace(given, high=horizon, newest=known), horizon

    async def rows(self, session_ids: Sequence[str], wish: ExportQuery) -> list[Fields]:
        """The rows of these sessions as they are now, what is left out too; for few sessions at a time."""
        places = self._places(reads.END, wish)
        part = await places.of(session_ids)
        stored = await places.read(part)
        window = Cursor("", Position(0, 0), reads.END)
        return await asyncio.to_thread(lambda: list(self._fields(part, stored, window, wish)))

    def _places(self, high: Position, wish: ExportQuery) -> ExportPages:
        grouped = formats.takes_groups(wish.shape)
        advantages = wish.advantage is not None
        return ExportPages(self._database, high, grouped=grouped, advantages=advantages, replay=wish.replay)

    async def _pages(self, window: Cursor, high: Position, wish: ExportQuery) -> AsyncGenerator[Sequence[Fields]]:
        left = sys.maxsize if wish.limit is None else wish.limit
        places = self._places(high, wish)
        types = (*EXPORTED, "SessionCreated") if wish.explain else EXPORTED
        after: Position | None = _resume(window)
        while left and after is not None:
            parts, after = await places.following(after, wish.filters.session_id, wish.filters.group_id, types)
            for part in parts:
                stored = await places.read(part)
                made = self._fields(part, stored, window, wish)
                while left and (rows := await asyncio.to_thread(_slice, made, left)):
                    left -= len(rows)
                    self.exported.rows += len(rows)
                    yield rows

    def _fields(
        self, part: Sequence[ExportPage], stored: Mapping[str, StoredSession], window: Cursor, wish: ExportQuery
    ) -> Iterator[Fields]:
        """The places' rows; what is left out is a row too where `explain` asks for it. For a thread."""
        for place in part:
            members = [stored[member] for member in place.members if member in stored]
            skip = window.given or 0 if place.at == window.at else 0
            if place.is_group:
                rows = iter(self._group(members, place, window, wish))
            else:
                every = (row for member in members for row in self._session(member, place, window, wish))
                rows = (self._shaped(row, wish) for row in every)
            for row in islice(rows, skip, None):
                if wish.explain or row.get(formats.EXCLUDED) is None:
                    yield row

    def _group(
        self, members: Sequence[StoredSession], place: ExportPage, window: Cursor, wish: ExportQuery
    ) -> list[Fields]:
        """A whole group as one row, and what of it is left out.

        There is no row of a part of a group: only erased sessions and discarded turns may be missing.
        """
        found = [list(self._session(member, place, window, wish)) for member in members]
        rows = [one for of_member in found for one in of_member if isinstance(one, Row)]
        left_out = [one for of_member in found for one in of_member if not isinstance(one, Row)]
        total = bool(rows) + len(left_out) if wish.explain else 1
        cursors = [_behind(window, place.at, number, total) for number in range(1, 2 + len(left_out))]
        if not rows:
            return [{**one, "cursor": cursor} for one, cursor in zip(left_out, cursors, strict=False)]
        rows[-1] = msgspec.structs.replace(rows[-1], cursor=cursors[0])
        missing = next(filter(None, map(_missing, members, found)), None)
        if missing is not None:
            whole = _excluded(place.session_id, cursors[0], f"a session of the group is left out: {missing}")
        else:
            whole = self._or_excluded(
                lambda: self._given(formats.of_group(wish.shape, rows), rows), place.session_id, cursors[0]
            )
        return [whole, *({**one, "cursor": cursor} for one, cursor in zip(left_out, cursors[1:], strict=True))]

    def _shaped(self, row: Row | Fields, wish: ExportQuery) -> Fields:
        if not isinstance(row, Row):
            return row
        return self._or_excluded(
            lambda: self._given(formats.of_row(wish.format, wish.shape, row), [row]),
            row.session.session_id,
            row.cursor,
            row.sample.segment,
        )

    def _given(self, fields: Fields, rows: Sequence[Row]) -> Fields:
        return _tallied(rows) if self._counts_only else fields

    def _or_excluded(
        self, make: Callable[[], Fields], session_id: str, cursor: str, segment: int | None = None
    ) -> Fields:
        """A shaped row, or why there is none: the shape cannot hold it, or what it looked at is damaged."""
        try:
            return make()
        except Unfit as error:
            return _excluded(session_id, cursor, str(error), segment=segment)
        except UNREADABLE as error:
            return self._unreadable(session_id, cursor, error, segment)

    def _unreadable(self, session_id: str, cursor: str, error: Exception, segment: int | None = None) -> Fields:
        self._database.unreadable.warn(session_id, error)
        return _excluded(session_id, cursor, f"unreadable: {error}", segment=segment)

    def _session(
        self, stored: StoredSession, place: ExportPage, window: Cursor, wish: ExportQuery
    ) -> Iterator[Row | Fields]:
        """A session's rows and what of it is left out; an unreadable one ends with the reason."""
        try:
            yield from self._readable(stored, place, window, wish)
        except UNREADABLE as error:
            yield self._unreadable(stored.session_id, _behind(window, place.at), error)

    def _readable(
        self, stored: StoredSession, place: ExportPage, window: Cursor, wish: ExportQuery
    ) -> Iterator[Row | Fields]:
        """A row, or the reason why there is none, of each live segment, then of each turn that is not live.

        Nothing of a session that nobody asked for: it is met where damage hides which group it is of.
        """
        session_id, at = stored.session_id, place.at
        if stored.status == "erased":
            yield _excluded(session_id, _behind(window, at), ERASED)
            return
        found = known(stored)
        if wish.filters.group_id is not None and wish.filters.group_id not in found.groups:
            return
        reason = session_excluded(found, wish.filters)
        if reason is not None:
            yield _excluded(session_id, _behind(window, at), reason)
            return
        made = SessionRows(stored, found, wish.max_seq_len, wish.truncate, self.release)
        fitting = {segment.number: segment for segment in made.segments}
        live = set(found.session.path)
        discarded = [turn for turn in found.session.turns if turn.number not in live] if wish.explain else []
        total = len(made.live_segments) + len(discarded)
        for place_of, number in enumerate(made.live_segments, 1):
            cursor, segment = _behind(window, at, place_of, total), fitting.get(number)
            if segment is None:
                yield _excluded(session_id, cursor, NOTHING_FITS[wish.truncate], segment=number)
            elif wish.filters.status not in (None, status := formats.status_of(wish.format, wish.shape, segment)):
                yield _excluded(session_id, cursor, f"status is {status}", segment=number)
            else:
                advantage = place.advantages.get(session_id)
                yield made.row(segment, cursor, routing=wish.replay, advantage=advantage)
        for place_of, turn in enumerate(discarded, len(made.live_segments) + 1):
            cursor = _behind(window, at, place_of, total)
            yield _excluded(session_id, cursor, "rolled back", segment=turn.segment, turn=turn.number)


def _tallied(rows: Sequence[Row]) -> Fields:
    """What a given row is made of, in numbers."""
    return {
        "sessions": sorted({row.session.session_id for row in rows}),
        "tokens": sum(len(row.sample.tokens) for row in rows),
        "sampled_tokens": sum(int(row.sample.sampled_mask.sum()) for row in rows),
        "cursor": rows[-1].cursor,
    }


class _Worker:
    """Does a writer's work on threads. A cancellation does not stop a thread: closing leaves the end to it then."""

    def __init__(self, writer: formats.Writer) -> None:
        self._writer = writer
        self._work: asyncio.Task[Any] | None = None

    async def do(self, call: Callable[..., T], *arguments: Any) -> T:
        work = asyncio.create_task(asyncio.to_thread(call, *arguments))
        self._work = work
        return await asyncio.shield(work)

    def close(self) -> None:
        if self._work is None or self._work.done():
            self._writer.close()
        else:
            self._work.add_done_callback(lambda _: self._writer.close())


async def _ahead(pages: AsyncIterator[Sequence[Fields]]) -> AsyncGenerator[Sequence[Fields]]:
    """The same pages, of which the next is read and shaped while one is written."""

    async def following() -> Sequence[Fields] | None:
        return await anext(pages, None)

    task = asyncio.create_task(following())
    try:
        while (rows := await task) is not None:
            task = asyncio.create_task(following())
            yield rows
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _written(
    writer: formats.Writer, first: Sequence[Fields] | None, rest: AsyncGenerator[Sequence[Fields]]
) -> AsyncGenerator[bytes]:
    """The pages as pieces of one file."""
    with contextlib.closing(_Worker(writer)) as worker:
        if first is not None:
            for piece in await worker.do(_all, writer.write, first):
                yield piece
        async with contextlib.aclosing(rest):
            async for rows in rest:
                for piece in await worker.do(_all, writer.write, rows):
                    yield piece
        last = writer.finish()
        while piece := await worker.do(next, last, b""):
            yield piece


def _slice(made: Iterator[Fields], limit: int) -> list[Fields]:
    """The next rows: at most `limit`, and so many that they can be in memory at once."""
    rows: list[Fields] = []
    size = 0
    for row in islice(made, limit):
        rows.append(row)
        size += sum(map(_weight, row.values()))
        if size >= SLICE_BYTES:
            break
    return rows


def _weight(value: object) -> int:
    """About how many bytes a field takes."""
    match value:
        case np.ndarray():
            return value.nbytes
        case str() | bytes():
            return len(value)
        case msgspec.Raw():
            return len(memoryview(value))
        case list() | tuple():
            return sum(map(_weight, value))
    return 8


def _all(write: Callable[[Sequence[Fields]], Iterable[bytes]], rows: Sequence[Fields]) -> list[bytes]:
    return list(write(rows))


def _as_of(window: Cursor, filters: ExportFilters) -> ExportFilters:
    """Which weight version is current, where the client does not say. Raises InvalidRequest."""
    if filters.max_staleness is None or filters.weight_version is not None:
        return filters
    if window.newest is None:
        raise InvalidRequest("the cursor does not say which weight version was the newest: name weight_version")
    current = None if window.newest == NO_VERSION else window.newest
    return msgspec.structs.replace(filters, weight_version=current)


def _resume(window: Cursor) -> Position:
    """The place after which to go on."""
    if window.at is None:
        return window.low
    return window.at if window.given is None else Position(window.at.tx, window.at.position - 1)


def _behind(window: Cursor, at: Position, number: int = 1, total: int = 1) -> str:
    """The cursor behind the `number`th of a place's `total` rows; none where there is no export to go on with."""
    if not window.epoch:
        return ""
    return msgspec.structs.replace(window, at=at, given=number if number < total else None).encode()


def _missing(member: StoredSession, found: Sequence[Row | Fields]) -> str | None:
    """The session, and why it is not there, which keeps its group from being whole."""
    if member.status == "erased":
        return None
    if not found:
        return f"{member.session_id}: its log names another group"
    left_out = (one for one in found if not isinstance(one, Row) and one["turn"] is None)
    return next((f"{one['session_id']}: {one[formats.EXCLUDED]}" for one in left_out), None)


def _excluded(
    session_id: str, cursor: str, reason: str, *, segment: int | None = None, turn: int | None = None
) -> Fields:
    return {"session_id": session_id, "segment": segment, "turn": turn, formats.EXCLUDED: reason, "cursor": cursor}
