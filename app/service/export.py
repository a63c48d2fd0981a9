"""`/export`: every session's samples in the order of commit, as of one moment.

An export covers a window (`low`, `high`] of the commit order: each session whose last exported event
lies in it appears once, as it was at `high`, at the place of that event. So a running export sees a
consistent prefix of each session, however much is being written, and the same cursor gives the same rows.
A shape that takes whole groups gives a group at the place of its last session, with all of its sessions.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

import msgspec

from app.domain.events import EXPORTED, UnknownEvent
from app.domain.groups import grpo
from app.domain.samples import Inconsistent
from app.domain.session import Session
from app.errors import InvalidRequest
from app.export import shapes
from app.export.row import Fields, Row, Unfit
from app.service.rows import Known, SessionRows, known
from app.store import bulk, reads
from app.store.bulk import Stored
from app.store.engine import Database
from app.store.reads import Connection, Position
from workers.codec import CorruptContent

log = logging.getLogger("turnlog.export")

PAGE = 64
"""Sessions looked up at a time."""

PAGE_TURNS = 256
"""Turns read at a time, if they are of more than one session."""

REPLAY_PAGE = 2
"""Sessions read at a time with replay payloads, which are larger than all else."""

GROUPS_KEPT = 256
"""Groups whose advantages are remembered during an export: a group's sessions mostly end close together."""


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where an export stands. `high` None: up to the moment of asking.

    `at` is the place last given. `given`: not all of it, but so many of its rows, what is left out counted.
    """

    epoch: str
    low: Position
    high: Position | None = None
    at: Position | None = None
    given: int | None = None

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


def decode_cursor(text: str) -> Cursor:
    """Raises InvalidRequest."""
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=Cursor)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest("cursor is not one that an export gave") from error


class Filters(msgspec.Struct, frozen=True):
    """Which rows to give; None: any. `since` and `until` are seconds since the epoch of the last commit."""

    session_id: str | None = None
    group_id: str | None = None
    status: Literal["completed", "truncated", "aborted"] | None = None
    session_status: Literal["open", "closed", "erased"] | None = None
    since: float | None = None
    until: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None


class Wish(msgspec.Struct, frozen=True):
    """What an export shall hold: which rows, how many, cut to how many tokens, with what beside them; and how."""

    filters: Filters = Filters()
    limit: int | None = None
    explain: bool = False
    replay: bool = False
    max_seq_len: int | None = None
    advantage: Literal["grpo"] | None = None
    format: str = "ndjson"
    shape: str = "turnlog"


class Export(msgspec.Struct, frozen=True):
    """A started export: `cursor` repeats it, `next_cursor` goes on behind its window; `pieces` are the bytes.

    `is_empty` says that there are no rows.
    """

    cursor: str
    next_cursor: str
    media_type: str
    is_empty: bool
    pieces: AsyncGenerator[bytes]


class _Place(msgspec.Struct, frozen=True):
    """A session's turn in the export: at `place`, with the other sessions of its group where a shape takes those.

    `advantage` is the session's own, `elsewhere` says that its group comes later.
    """

    stored: Stored
    place: Position
    members: Sequence[Stored] = ()
    advantages: Mapping[str, float] = {}
    elsewhere: bool = False


class Exporter:
    """`release` is this version's, for provenance."""

    def __init__(self, database: Database, release: str) -> None:
        self._database = database
        self._release = release

    async def start(self, wish: Wish, cursor: str | None) -> Export:
        """Fix the window. Raises InvalidRequest for a foreign cursor, or a format or shape that there is not."""
        shapes.require(wish.format, wish.shape, wish.explain)
        epoch, horizon = await self._database.read(
            lambda connection: (reads.epoch(connection), reads.horizon(connection))
        )
        given = Cursor(epoch, Position(0, 0)) if cursor is None else decode_cursor(cursor)
        if given.epoch != epoch:
            raise InvalidRequest(
                f"the cursor is of epoch {given.epoch}, the store is in {epoch}: it was restored; export anew"
            )
        pinned = given if given.high is not None else msgspec.structs.replace(given, high=horizon)
        assert pinned.high is not None
        following = Cursor(epoch, pinned.high)
        pages = self._pages(pinned, wish)
        first = await anext(pages, None)
        writer = shapes.open_writer(wish.format, wish.shape, wish.explain)
        pieces = _written(writer, first, pages)
        return Export(pinned.encode(), following.encode(), writer.media_type, first is None, pieces)

    async def rows(self, session_ids: Sequence[str], wish: Wish) -> list[Fields]:
        """The rows of these sessions as they are now, what is left out too; for few sessions at a time."""
        window = Cursor("", Position(0, 0), reads.END)
        found = await self._read([(one, reads.END) for one in session_ids], reads.END, wish)
        return await asyncio.to_thread(self._fields, found, window, wish)

    async def _pages(self, window: Cursor, wish: Wish) -> AsyncIterator[Sequence[Fields]]:
        assert window.high is not None
        given = 0
        after = _resume(window)
        while wish.limit is None or given < wish.limit:
            places = await self._changed(after, window.high, wish)
            if not places:
                return
            for part in await self._parts(places, wish):
                found = await self._read(part, window.high, wish)
                rows = await asyncio.to_thread(self._fields, found, window, wish)
                if wish.limit is not None:
                    rows = rows[: wish.limit - given]
                given += len(rows)
                if rows:
                    yield rows
                if given == wish.limit:
                    return
            after = places[-1][1]

    async def _changed(self, after: Position, high: Position, wish: Wish) -> list[tuple[str, Position]]:
        """The next places. Where nobody asks for what is left out, only of the group that is asked for."""
        filters = wish.filters
        return await self._database.read(
            lambda connection: reads.changed_sessions(
                connection,
                after=after,
                upto=high,
                limit=PAGE,
                session_id=filters.session_id,
                group_id=None if wish.explain else filters.group_id,
                types=(*EXPORTED, "SessionCreated") if wish.explain else EXPORTED,
            )
        )

    async def _parts(self, places: list[tuple[str, Position]], wish: Wish) -> list[list[tuple[str, Position]]]:
        """The places in parts that can be in memory at once."""
        counts = await self._database.read(lambda c: bulk.turn_counts(c, [one for one, _ in places]))
        parts: list[list[tuple[str, Position]]] = []
        turns = 0
        for one in places:
            turns += counts.get(one[0], 0)
            if not parts or turns > PAGE_TURNS or (wish.replay and len(parts[-1]) == REPLAY_PAGE):
                parts.append([])
                turns = counts.get(one[0], 0)
            parts[-1].append(one)
        return parts

    async def _read(self, places: list[tuple[str, Position]], high: Position, wish: Wish) -> list[_Place]:
        return await self._database.read(lambda connection: self._stored(connection, places, high, wish))

    def _stored(
        self, connection: Connection, places: list[tuple[str, Position]], high: Position, wish: Wish
    ) -> list[_Place]:
        stored = bulk.read_sessions(connection, [one for one, _ in places], high, replay=wish.replay)
        grouped = shapes.takes_groups(wish.shape)
        members: dict[str, list[str]] = {}
        advantages: dict[str, dict[str, float]] = {}
        found: list[_Place] = []
        for session_id, place in places:
            one = stored.get(session_id)
            if one is None:
                continue
            group_id = one.group_id
            if group_id is None or not (grouped or wish.advantage):
                found.append(_Place(one, place, [one] if grouped else ()))
                continue
            if group_id not in members:
                members[group_id] = bulk.group_members(connection, group_id)
                advantages[group_id] = grpo(bulk.rewards(connection, members[group_id], high)) if wish.advantage else {}
            given = advantages[group_id]
            if not grouped:
                found.append(_Place(one, place, advantages=given))
                continue
            ends = bulk.last_places(connection, members[group_id], high, EXPORTED)
            if session_id not in ends:
                # It had nothing to export then, or has been erased: it is no part of its group's row.
                found.append(_Place(one, place))
            elif wish.filters.session_id is None and max(ends.values()) > place:
                found.append(_Place(one, place, elsewhere=True))
            else:
                beside = bulk.read_sessions(connection, sorted(ends), high, replay=wish.replay)
                found.append(_Place(one, place, list(beside.values()), given))
        return found

    def _fields(self, places: Sequence[_Place], window: Cursor, wish: Wish) -> list[Fields]:
        """The places' rows; what is left out is a row too where `explain` asks for it. Runs on a thread."""
        found: list[Fields] = []
        for place in places:
            if place.elsewhere:
                continue
            skip = window.given or 0 if place.place == window.at else 0
            if place.members:
                found += self._group(place, window, wish)[skip:]
            else:
                rows = islice(self._session(place.stored, place, window, wish), skip, None)
                found += [self._shaped(row, wish) for row in rows]
        return found if wish.explain else [row for row in found if shapes.EXCLUDED not in row]

    def _group(self, place: _Place, window: Cursor, wish: Wish) -> list[Fields]:
        """A whole group as one row, and what of it is left out."""
        every = [one for member in place.members for one in self._session(member, place, window, wish)]
        rows = [one for one in every if isinstance(one, Row)]
        left_out = [one for one in every if not isinstance(one, Row)]
        total = bool(rows) + len(left_out) if wish.explain else 1
        cursors = [_behind(window, place.place, number, total) for number in range(1, 2 + len(left_out))]
        if not rows:
            return [{**one, "cursor": cursor} for one, cursor in zip(left_out, cursors, strict=False)]
        rows[-1] = msgspec.structs.replace(rows[-1], cursor=cursors[0])
        try:
            whole = shapes.of_group(wish.shape, rows)
        except Unfit as error:
            whole = _excluded(place.stored.session_id, cursors[0], str(error))
        return [whole, *({**one, "cursor": cursor} for one, cursor in zip(left_out, cursors[1:], strict=True))]

    def _shaped(self, row: Row | Fields, wish: Wish) -> Fields:
        if not isinstance(row, Row):
            return row
        try:
            return shapes.of_row(wish.format, wish.shape, row)
        except Unfit as error:
            return _excluded(row.session.session_id, row.cursor, str(error), segment=row.sample.segment)

    def _session(self, stored: Stored, place: _Place, window: Cursor, wish: Wish) -> Iterator[Row | Fields]:
        """A session's rows and what of it is left out; an unreadable one ends with the reason."""
        try:
            yield from self._readable(stored, place, window, wish)
        except (UnknownEvent, CorruptContent, Inconsistent) as error:
            log.error("session %s cannot be exported: %s", stored.session_id, error)
            yield _excluded(stored.session_id, _behind(window, place.place), f"unreadable: {error}")

    def _readable(self, stored: Stored, place: _Place, window: Cursor, wish: Wish) -> Iterator[Row | Fields]:
        """A row, or the reason why there is none, of each live segment, then of each turn that is not live."""
        session_id, at = stored.session_id, place.place
        if stored.status == "erased":
            yield _excluded(session_id, _behind(window, at), "erased")
            return
        found = known(stored)
        reason = _session_excluded(found, wish.filters)
        if reason is not None:
            yield _excluded(session_id, _behind(window, at), reason)
            return
        made = SessionRows(stored, found, wish.max_seq_len, self._release)
        samples = {sample.segment: sample for sample in made.samples}
        segments = sorted(made.live_segments)
        live = set(found.session.path)
        discarded = [turn for turn in found.session.turns if turn.number not in live] if wish.explain else []
        total = len(segments) + len(discarded)
        for number, segment in enumerate(segments, 1):
            cursor, sample = _behind(window, at, number, total), samples.get(segment)
            if sample is None:
                yield _excluded(session_id, cursor, "no turn within max_seq_len", segment=segment)
            elif wish.filters.status not in (None, sample.status):
                yield _excluded(session_id, cursor, f"status is {sample.status}", segment=segment)
            else:
                advantage = place.advantages.get(session_id)
                yield made.row(sample, cursor, routing=wish.replay, advantage=advantage)
        for number, turn in enumerate(discarded, len(segments) + 1):
            cursor = _behind(window, at, number, total)
            yield _excluded(session_id, cursor, "rolled back", segment=turn.segment, turn=turn.number)


async def _written(
    writer: shapes.Writer, first: Sequence[Fields] | None, rest: AsyncIterator[Sequence[Fields]]
) -> AsyncGenerator[bytes]:
    """The pages as pieces of one file; the work is done on threads."""
    with contextlib.closing(writer):
        if first is not None:
            for piece in await asyncio.to_thread(_all, writer.write, first):
                yield piece
        async for rows in rest:
            for piece in await asyncio.to_thread(_all, writer.write, rows):
                yield piece
        last = writer.finish()
        while piece := await asyncio.to_thread(next, last, b""):
            yield piece


def _all(write: Callable[[Sequence[Fields]], Iterable[bytes]], rows: Sequence[Fields]) -> list[bytes]:
    return list(write(rows))


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


def _session_excluded(known: Known, filters: Filters) -> str | None:
    """Why a session gives no row at all."""
    session = known.session
    if not session.path:
        return "no committed turn"
    if filters.group_id not in (None, session.config.group_id):
        return "group_id differs"
    if filters.session_status not in (None, session.status):
        return f"session_status is {session.status}"
    committed = known.times[session.path[-1]]
    if filters.since is not None and committed < filters.since:
        return "committed before since"
    if filters.until is not None and committed > filters.until:
        return "committed after until"
    return _reward_excluded(session, filters)


def _reward_excluded(session: Session, filters: Filters) -> str | None:
    reward = None if session.reward is None else session.reward.reward
    if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
        return "no reward" if reward is None else "reward below min_reward"
    if filters.max_reward is not None and (reward is None or reward > filters.max_reward):
        return "no reward" if reward is None else "reward above max_reward"
    return None


def _excluded(
    session_id: str, cursor: str, reason: str, *, segment: int | None = None, turn: int | None = None
) -> Fields:
    return {"session_id": session_id, "segment": segment, "turn": turn, shapes.EXCLUDED: reason, "cursor": cursor}
