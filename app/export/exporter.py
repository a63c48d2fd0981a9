"""`/export`: every session's samples in the order of commit, as of one moment.

An export covers a window (`low`, `high`] of the commit order. Each session whose last exported event lies in it
appears once, in its state at `high`, at the position of that event. So an export running beside writes sees a
consistent prefix of each session, and the same cursor gives the same rows. A shape that takes whole groups gives a
group at the position of its last session, with all of its sessions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from app.domain.branches import Branches, BranchRow, Picker, turns_left_out
from app.domain.events import EXPORTED, UnknownEvent
from app.domain.samples import Inconsistent, Truncate
from app.domain.session import Session
from app.errors import InvalidRequest
from app.export import formats, links
from app.export.cursor import NO_VERSION, Cursor, decode_cursor
from app.export.metrics import ExportMetrics
from app.export.pages import ExportPage, ExportPages
from app.export.query import ExportQuery, session_excluded
from app.export.row import Fields, Row, Unfit
from app.export.rows import SessionRows, known
from app.export.writing import read_ahead, written
from app.store import group_reads, reads, survey
from app.store.bulk import StoredSession
from app.store.engine import Database
from app.store.horizon import wait_for_horizon
from app.store.reads import Position
from workers.codec import CorruptContent

UNREADABLE = (UnknownEvent, CorruptContent, Inconsistent)
"""Errors of a single session, which do not end the export."""

ERASED = "erased"

NOTHING_FITS: Mapping[Truncate, str] = {
    "turn": "no turn within max_seq_len",
    "token": "no sampled token within max_seq_len",
}

SLICE_BYTES = 4 << 20
"""Approximate bytes of rows that are made before they are written: a session may have many, each with its whole prompt.
"""


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

    `picker` chooses the branches of a request that names none.
    """

    def __init__(
        self,
        database: Database,
        release: str,
        *,
        counts_only: bool = False,
        exported: ExportMetrics | None = None,
        picker: Picker | None = None,
    ) -> None:
        self._picker = picker
        self.exported = ExportMetrics() if exported is None else exported
        self._counts_only = counts_only
        self._database = database
        self.release = release

    async def start(self, query: ExportQuery, cursor: str | None) -> Export:
        """Fix the window. Raises InvalidRequest for an invalid cursor, or an unknown format or shape."""
        self._require(query)
        pinned, high, pages = await self._opened(query, cursor)
        following = Cursor(pinned.epoch, high)
        first = await anext(pages, None)
        writer = await asyncio.to_thread(formats.open_writer, query.format, query.shape, query.explain)
        pieces = self.exported.counted(written(writer, first, read_ahead(pages)))
        media_type, suffix = writer.media_type, writer.suffix
        return Export(pinned.encode(), following.encode(), media_type, suffix, first is None, pieces)

    async def pages(self, query: ExportQuery, cursor: str | None) -> AsyncGenerator[Sequence[Fields]]:
        """The rows themselves instead of a file. Raises as `start`."""
        self._require(query)
        _, _, pages = await self._opened(query, cursor)
        return pages

    def _require(self, query: ExportQuery) -> None:
        formats.require(query.format, query.shape)
        if query.replay == "urls":
            links.require(self._database, query.format, query.shape)

    async def _opened(
        self, query: ExportQuery, cursor: str | None
    ) -> tuple[Cursor, Position, AsyncGenerator[Sequence[Fields]]]:
        """The cursor with its window fixed, the window's end, and the rows. Raises InvalidRequest."""
        pinned, high = await self._window(None if cursor is None else decode_cursor(cursor))
        return pinned, high, self._pages(pinned, high, pinned.as_of(query))

    async def _window(self, given: Cursor | None) -> tuple[Cursor, Position]:
        """The cursor with its window fixed, and the window's end. Raises InvalidRequest."""
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

    async def rows(self, session_ids: Sequence[str], query: ExportQuery) -> list[Fields]:
        """The rows of these sessions as they are now, excluded ones too; meant for few sessions."""
        export_pages = self._export_pages(reads.END, query)
        part = await export_pages.of(session_ids)
        stored = await export_pages.read(part)
        window = Cursor("", Position(0, 0), reads.END)
        return await asyncio.to_thread(lambda: list(self._fields(part, stored, window, query)))

    def _export_pages(self, high: Position, query: ExportQuery) -> ExportPages:
        grouped = formats.takes_groups(query.shape)
        advantages = query.advantage is not None
        return ExportPages(
            self._database,
            high,
            grouped=grouped,
            advantages=advantages,
            replay=query.replay,
            url_s=query.url_s,
            branches=self._branches(query),
        )

    def _branches(self, query: ExportQuery) -> Branches | Picker:
        return query.branches or self._picker or "kept"

    async def _pages(self, window: Cursor, high: Position, query: ExportQuery) -> AsyncGenerator[Sequence[Fields]]:
        left = sys.maxsize if query.limit is None else query.limit
        export_pages = self._export_pages(high, query)
        types = (*EXPORTED, "SessionCreated") if query.explain else EXPORTED
        after: Position | None = window.place
        while left and after is not None:
            parts, after = await export_pages.following(after, query.session_id, query.group_id, types)
            for part in parts:
                stored = await export_pages.read(part)
                made = self._fields(part, stored, window, query)
                while left and (rows := await asyncio.to_thread(_slice, made, left)):
                    left -= len(rows)
                    self.exported.rows += len(rows)
                    yield rows

    def _fields(
        self, part: Sequence[ExportPage], stored: Mapping[str, StoredSession], window: Cursor, query: ExportQuery
    ) -> Iterator[Fields]:
        """The pages' rows; with `explain`, exclusions are rows too. Runs on a thread."""
        for page in part:
            members = [stored[member] for member in page.members if member in stored]
            skip = window.given or 0 if page.at == window.at else 0
            if page.is_group:
                rows = iter(self._group(members, page, window, query))
            else:
                every = (row for member in members for row in self._session(member, page, window, query))
                rows = (self._shaped(row, query) for row in every)
            for row in islice(rows, skip, None):
                if query.explain or row.get(formats.EXCLUDED) is None:
                    yield row

    def _group(
        self, members: Sequence[StoredSession], page: ExportPage, window: Cursor, query: ExportQuery
    ) -> list[Fields]:
        """A whole group as one row, and what is excluded from it.

        Part of a group gives no row: only erased sessions and rolled-back turns may be missing.
        """
        found = [list(self._session(member, page, window, query)) for member in members]
        rows = [one for of_member in found for one in of_member if isinstance(one, Row)]
        left_out = [one for of_member in found for one in of_member if not isinstance(one, Row)]
        total = bool(rows) + len(left_out) if query.explain else 1
        cursors = [window.behind(page.at, number, total) for number in range(1, 2 + len(left_out))]
        if not rows:
            return [{**one, "cursor": cursor} for one, cursor in zip(left_out, cursors, strict=False)]
        rows[-1] = msgspec.structs.replace(rows[-1], cursor=cursors[0])
        missing = next(filter(None, map(_missing, members, found)), None)
        if missing is not None:
            whole = _excluded(page.session_id, cursors[0], f"a session of the group is left out: {missing}")
        else:
            whole = self._or_excluded(
                lambda: self._row_or_counts(formats.of_group(query.shape, rows), rows), page.session_id, cursors[0]
            )
        return [whole, *({**one, "cursor": cursor} for one, cursor in zip(left_out, cursors[1:], strict=True))]

    def _shaped(self, row: Row | Fields, query: ExportQuery) -> Fields:
        if not isinstance(row, Row):
            return row
        return self._or_excluded(
            lambda: self._row_or_counts(formats.of_row(query.format, query.shape, row), [row]),
            row.session.session_id,
            row.cursor,
            row.sample.segment,
        )

    def _row_or_counts(self, fields: Fields, rows: Sequence[Row]) -> Fields:
        return _counts_of(rows) if self._counts_only else fields

    def _or_excluded(
        self, make: Callable[[], Fields], session_id: str, cursor: str, segment: int | None = None
    ) -> Fields:
        """A shaped row, or why there is none: the shape cannot hold it, or its content is damaged."""
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
        self, stored: StoredSession, page: ExportPage, window: Cursor, query: ExportQuery
    ) -> Iterator[Row | Fields]:
        """A session's rows and exclusions; an unreadable session ends with its reason."""
        try:
            yield from self._readable(stored, page, window, query)
        except UNREADABLE as error:
            yield self._unreadable(stored.session_id, window.behind(page.at), error)

    def _readable(
        self, stored: StoredSession, page: ExportPage, window: Cursor, query: ExportQuery
    ) -> Iterator[Row | Fields]:
        """A row, or the reason why there is none, for each live segment, then for each turn that is not live.

        A session outside the requested group gives nothing: it is read only where damage hides its group.
        """
        session_id, at = stored.session_id, page.at
        if stored.status == "erased":
            yield _excluded(session_id, window.behind(at), ERASED)
            return
        found = known(stored)
        if query.group_id is not None and query.group_id not in found.groups:
            return
        reason = session_excluded(found, query)
        if reason is not None:
            yield _excluded(session_id, window.behind(at), reason)
            return
        made = SessionRows(
            stored,
            found,
            query.max_seq_len,
            query.truncate,
            self.release,
            branches=self._branches(query),
            loss=query.loss,
        )
        fitting = {segment.row.leaf.number: segment for segment in made.segments}
        missing = list(turns_left_out(found.session, made.rows, query.branches)) if query.explain else []
        total = len(made.rows) + len(missing)
        for nth, row in enumerate(made.rows, 1):
            cursor, segment, number = window.behind(at, nth, total), fitting.get(row.leaf.number), row.leaf.segment
            if segment is None:
                reason = NOTHING_FITS[query.truncate] + _in_no_loss(found.session, row, query)
                yield _excluded(session_id, cursor, reason, segment=number)
            elif query.status not in (None, status := formats.status_of(query.format, query.shape, segment)):
                yield _excluded(
                    session_id, cursor, f"status is {status}{_in_no_loss(found.session, row, query)}", segment=number
                )
            else:
                advantage = page.advantages.get(session_id)
                yield made.row(segment, cursor, payloads=query.replay, advantage=advantage)
        for nth, (turn, reason) in enumerate(missing, len(made.rows) + 1):
            cursor = window.behind(at, nth, total)
            yield _excluded(session_id, cursor, reason, segment=turn.segment, turn=turn.number)


def _in_no_loss(session: Session, row: BranchRow, query: ExportQuery) -> str:
    """Of a row that is left out: the turns that only it has in its loss."""
    if not session.is_tree or not row.in_loss or query.loss == "every":
        return ""
    return f"; turns {', '.join(map(str, sorted(row.in_loss)))} are in no loss"


def _counts_of(rows: Sequence[Row]) -> Fields:
    """The counts of a row."""
    return {
        "sessions": sorted({row.session.session_id for row in rows}),
        "tokens": sum(len(row.sample.tokens) for row in rows),
        "sampled_tokens": sum(int(row.sample.sampled_mask.sum()) for row in rows),
        "cursor": rows[-1].cursor,
    }


def _slice(made: Iterator[Fields], limit: int) -> list[Fields]:
    """The next rows: at most `limit`, and at most as many as may be in memory together."""
    rows: list[Fields] = []
    size = 0
    for row in islice(made, limit):
        rows.append(row)
        size += sum(map(_weight, row.values()))
        if size >= SLICE_BYTES:
            break
    return rows


def _weight(value: object) -> int:
    """Approximate bytes of a field."""
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


def _missing(member: StoredSession, found: Sequence[Row | Fields]) -> str | None:
    """The exclusion of a session, because of which its group is incomplete."""
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
