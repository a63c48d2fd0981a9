"""`/export`: every session's samples in the order of commit, as of one moment.

An export covers a window (`low`, `high`] of the commit order: each session whose last exported event
lies in it appears once, as it was at `high`, at the place of that event. So a running export sees a
consistent prefix of each session, however much is being written, and the same cursor gives the same rows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import msgspec

from app.domain.events import EXPORTED, Recorded, TurnCommitted, UnknownEvent
from app.domain.samples import Inconsistent, Sample, TurnTokens, samples
from app.domain.session import Session, fold
from app.errors import InvalidRequest
from app.export import turnlog
from app.store import codec, reads
from app.store.codec import CorruptContent, Facts, Wire
from app.store.engine import Database
from app.store.reads import Position

log = logging.getLogger("turnlog.export")

PAGE = 8
"""Sessions in memory at a time."""


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an export stands. `high` None: up to the moment of asking. `at` with `segment`: inside a session."""

    epoch: str
    low: Position
    high: Position | None = None
    at: Position | None = None
    segment: int | None = None

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


class Export(msgspec.Struct, frozen=True):
    """A started export: `cursor` repeats it, `next_cursor` goes on behind its window."""

    cursor: str
    next_cursor: str
    rows: AsyncIterator[bytes]


class Erased(Exception):
    """The session's content is gone since the moment that is exported."""


class _Stored(msgspec.Struct, frozen=True):
    """A session as read from the database, not yet unpacked."""

    session: Session
    events: dict[int, TurnCommitted]
    times: dict[int, float]
    frames: dict[int, tuple[bytes | None, bytes | None]]
    metadata: bytes | None


class Exporter:
    """`version` is this release's, for provenance."""

    def __init__(self, database: Database, version: str) -> None:
        self._database = database
        self._version = version

    async def start(self, filters: Filters, cursor: str | None, limit: int | None, explain: bool) -> Export:
        """Fix the window and give the rows as NDJSON lines. Raises InvalidRequest for a foreign cursor."""
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
        return Export(pinned.encode(), following.encode(), self._rows(pinned, filters, limit, explain))

    async def _rows(self, window: Cursor, filters: Filters, limit: int | None, explain: bool) -> AsyncIterator[bytes]:
        assert window.high is not None
        given = 0
        after, skip = _resume(window)
        while limit is None or given < limit:
            page, places = await self._page(after, window.high, filters, explain)
            if not places:
                return
            lines = await asyncio.to_thread(self._lines, page, places, window, filters, skip, explain)
            if limit is not None:
                lines = lines[: limit - given]
            given += len(lines)
            if lines:
                yield b"".join(lines)
            after, skip = places[-1][1], None

    async def _page(
        self, after: Position, high: Position, filters: Filters, explain: bool
    ) -> tuple[list[_Stored | Exception], list[tuple[str, Position]]]:
        types = (*EXPORTED, "SessionCreated") if explain else EXPORTED

        def read(
            connection: reads.Connection,
        ) -> tuple[list[_Stored | Exception], list[tuple[str, Position]]]:
            places = reads.changed_sessions(
                connection, after=after, upto=high, limit=PAGE, session_id=filters.session_id, types=types
            )
            return [_read_session(connection, session_id, high) for session_id, _ in places], places

        return await self._database.read(read)

    def _lines(
        self,
        page: list[_Stored | Exception],
        places: list[tuple[str, Position]],
        window: Cursor,
        filters: Filters,
        skip: int | None,
        explain: bool,
    ) -> list[bytes]:
        lines: list[bytes] = []
        for stored, (session_id, place) in zip(page, places, strict=True):
            try:
                if isinstance(stored, Exception):
                    raise stored
                lines += self._session_lines(stored, place, window, filters, skip, explain)
            except (UnknownEvent, CorruptContent, Inconsistent) as error:
                log.error("session %s cannot be exported: %s", session_id, error)
                if explain:
                    lines.append(_excluded(session_id, None, f"unreadable: {error}"))
            except Erased:
                if explain:
                    lines.append(_excluded(session_id, None, "erased"))
            skip = None
        return lines

    def _session_lines(
        self,
        stored: _Stored,
        place: Position,
        window: Cursor,
        filters: Filters,
        skip: int | None,
        explain: bool,
    ) -> Iterator[bytes]:
        session = stored.session
        reason = _session_excluded(stored, filters)
        if reason is not None:
            if explain:
                yield _excluded(session.session_id, None, reason)
            return
        if explain:
            live = set(session.path)
            for turn in session.turns:
                if turn.number not in live:
                    yield _excluded(session.session_id, turn.segment, "rolled back", turn=turn.number)
        content, wires = _unpack(stored)
        every = samples(session, content)
        for sample in every:
            if skip is not None and sample.segment <= skip:
                continue
            if filters.status not in (None, sample.status):
                if explain:
                    yield _excluded(session.session_id, sample.segment, f"status is {sample.status}")
                continue
            last = sample is every[-1]
            cursor = msgspec.structs.replace(window, at=place, segment=None if last else sample.segment)
            yield turnlog.row(
                session,
                sample,
                messages=_conversation(session, sample, wires),
                metadata=stored.metadata,
                source=self._source(stored, sample),
                cursor=cursor.encode(),
                last_segment=last,
            )

    def _source(self, stored: _Stored, sample: Sample) -> turnlog.Source:
        events = [stored.events[span.turn] for span in sample.turns]
        return turnlog.Source(
            engines=sorted({event.engine for event in events}),
            dialects=sorted({event.dialect for event in events}),
            created_at=stored.session.created_at,
            committed_at=stored.times[events[-1].turn],
            turnlog_version=self._version,
        )


def _resume(window: Cursor) -> tuple[Position, int | None]:
    """The place after which to go on, and the segment of the next session up to which rows were given."""
    if window.at is None:
        return window.low, None
    if window.segment is None:
        return window.at, None
    return Position(window.at.tx, window.at.position - 1), window.segment


def _read_session(connection: reads.Connection, session_id: str, high: Position) -> _Stored | Exception:
    try:
        head = reads.head(connection, session_id)
        if head is None or head.status == "erased":
            return Erased()
        events = reads.load_events(connection, session_id, upto=high)
        session = fold(session_id, events)
        assert session is not None
        committed = {e.event.turn: e for e in events if isinstance(e.event, TurnCommitted)}
        metadata = None
        if session.metadata is not None:
            metadata = reads.load_blobs(connection, session_id, [session.metadata.number]).get(session.metadata.number)
        return _Stored(
            session,
            {turn: _event(recorded) for turn, recorded in committed.items()},
            {turn: recorded.at for turn, recorded in committed.items()},
            reads.load_frames(connection, session_id, session.path),
            metadata,
        )
    except (UnknownEvent, CorruptContent) as error:
        return error


def _event(recorded: Recorded) -> TurnCommitted:
    assert isinstance(recorded.event, TurnCommitted)
    return recorded.event


def _unpack(stored: _Stored) -> tuple[dict[int, TurnTokens], dict[int, Wire]]:
    """The live turns' content, each checked against the log's hash. Raises CorruptContent."""
    content: dict[int, TurnTokens] = {}
    wires: dict[int, Wire] = {}
    for number in stored.session.path:
        facts_frame, wire_frame = stored.frames.get(number, (None, None))
        event = stored.events[number]
        if facts_frame is None or wire_frame is None:
            raise CorruptContent(f"turn {number}: the content is not there")
        if codec.content_hash(facts_frame, wire_frame) != event.content_hash:
            raise CorruptContent(f"turn {number}: the content's hash is not the log's")
        facts = codec.unpack(facts_frame, Facts)
        wires[number] = codec.unpack(wire_frame, Wire)
        content[number] = TurnTokens(event, facts.suffix_ids, facts.output_ids, facts.logprobs)
    return content, wires


def _conversation(session: Session, sample: Sample, wires: dict[int, Wire]) -> list[bytes]:
    """The messages at the end of a segment, as they were sent and answered."""
    chain = session.message_chain(sample.turns[-1].turn)
    return [message for turn in chain for message in (*wires[turn.number].messages, wires[turn.number].message)]


def _session_excluded(stored: _Stored, filters: Filters) -> str | None:
    """Why a session gives no row at all."""
    session = stored.session
    if not session.path:
        return "no committed turn"
    if filters.group_id not in (None, session.config.group_id):
        return "group_id differs"
    if filters.session_status not in (None, session.status):
        return f"session_status is {session.status}"
    committed = stored.times[session.path[-1]]
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


def _excluded(session_id: str, segment: int | None, reason: str, turn: int | None = None) -> bytes:
    row = {"session_id": session_id, "segment": segment, "turn": turn, "excluded": reason}
    return msgspec.json.encode(row) + b"\n"
