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
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Literal

import msgspec
import pybase64

from app.domain.events import EXPORTED, TurnCommitted, UnknownEvent
from app.domain.samples import Inconsistent, Sample, TurnTokens, samples
from app.domain.session import Session, fold
from app.errors import InvalidRequest
from app.export import turnlog
from app.service import replay
from app.store import reads
from app.store.engine import Database
from app.store.reads import Position
from workers import codec
from workers.codec import CorruptContent, Facts, Wire
from workers.parse import REPLAY

log = logging.getLogger("turnlog.export")

PAGE = 8
"""Sessions in memory at a time."""

REPLAY_PAGE = 2
"""With replay payloads, which are larger than all else."""


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


class Wish(msgspec.Struct, frozen=True):
    """What an export shall hold: which rows, at most how many, cut to how many tokens, with what beside them."""

    filters: Filters
    limit: int | None = None
    explain: bool = False
    replay: bool = False
    max_seq_len: int | None = None


class Export(msgspec.Struct, frozen=True):
    """A started export: `cursor` repeats it, `next_cursor` goes on behind its window."""

    cursor: str
    next_cursor: str
    rows: AsyncIterator[bytes]


class _Stored(msgspec.Struct, frozen=True):
    """A session's rows as they stand in the database."""

    session_id: str
    place: Position
    status: str
    events: list[reads.EventRow]
    frames: reads.Frames
    metadata: bytes | None
    chunks: Mapping[reads.ChunkKey, bytes | None] = {}


class _Known(msgspec.Struct, frozen=True):
    """A session folded as of the export's moment; `times` are when each turn was committed."""

    session: Session
    events: dict[int, TurnCommitted]
    times: dict[int, float]


class Exporter:
    """`version` is this release's, for provenance."""

    def __init__(self, database: Database, version: str) -> None:
        self._database = database
        self._version = version

    async def start(self, wish: Wish, cursor: str | None) -> Export:
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
        return Export(pinned.encode(), following.encode(), self._rows(pinned, wish))

    async def _rows(self, window: Cursor, wish: Wish) -> AsyncIterator[bytes]:
        assert window.high is not None
        given = 0
        after, skip = _resume(window)
        while wish.limit is None or given < wish.limit:
            page = await self._page(after, window.high, wish)
            if not page:
                return
            lines = await asyncio.to_thread(self._lines, page, window, wish, skip)
            if wish.limit is not None:
                lines = lines[: wish.limit - given]
            given += len(lines)
            if lines:
                yield b"".join(lines)
            after, skip = page[-1].place, None

    async def _page(self, after: Position, high: Position, wish: Wish) -> list[_Stored]:
        types = (*EXPORTED, "SessionCreated") if wish.explain else EXPORTED
        limit = REPLAY_PAGE if wish.replay else PAGE

        def read(connection: reads.Connection) -> list[_Stored]:
            places = reads.changed_sessions(
                connection, after=after, upto=high, limit=limit, session_id=wish.filters.session_id, types=types
            )
            return [_read_session(connection, session_id, place, high, wish.replay) for session_id, place in places]

        return await self._database.read(read)

    def _lines(self, page: list[_Stored], window: Cursor, wish: Wish, skip: int | None) -> list[bytes]:
        """The page's rows; what is left out is a line too where `explain` asks for it. Runs on a thread."""
        lines: list[bytes] = []
        for stored in page:
            try:
                found = list(self._session_lines(stored, window, wish, skip))
                lines += [line for line, excluded in found if wish.explain or not excluded]
            except (UnknownEvent, CorruptContent, Inconsistent) as error:
                log.error("session %s cannot be exported: %s", stored.session_id, error)
                if wish.explain:
                    lines.append(_excluded(stored, window, f"unreadable: {error}"))
            skip = None
        return lines

    def _session_lines(
        self, stored: _Stored, window: Cursor, wish: Wish, skip: int | None
    ) -> Iterator[tuple[bytes, bool]]:
        """Lines, and of each whether it tells of something left out."""
        if stored.status == "erased":
            yield _excluded(stored, window, "erased"), True
            return
        known = _fold(stored)
        session = known.session
        reason = _session_excluded(known, wish.filters)
        if reason is not None:
            yield _excluded(stored, window, reason), True
            return
        content, wires = _unpack(stored, known)
        metadata = None if stored.metadata is None else codec.decompress(stored.metadata)
        every = samples(session, content, wish.max_seq_len)
        for sample in every:
            last = sample is every[-1]
            if skip is not None and sample.segment <= skip:
                continue
            if wish.filters.status not in (None, sample.status):
                yield _excluded(stored, window, f"status is {sample.status}", segment=sample.segment), True
                continue
            cursor = msgspec.structs.replace(window, at=stored.place, segment=None if last else sample.segment)
            row = turnlog.row(
                session,
                sample,
                messages=_conversation(session, sample, wires),
                metadata=metadata,
                source=self._source(known, sample),
                cursor=cursor.encode(),
                last_segment=last,
                replay=_replay(stored, known, sample) if wish.replay else {},
            )
            yield row, False
        for segment in {turn.event.segment for turn in content.values()} - {sample.segment for sample in every}:
            yield _excluded(stored, window, "no turn within max_seq_len", segment=segment), True
        for turn in session.turns:
            if turn.number not in content:
                yield _excluded(stored, window, "rolled back", segment=turn.segment, turn=turn.number), True

    def _source(self, known: _Known, sample: Sample) -> turnlog.Source:
        events = [known.events[span.turn] for span in sample.turns]
        return turnlog.Source(
            engines=sorted({event.engine for event in events}),
            dialects=sorted({event.dialect for event in events}),
            created_at=known.session.created_at,
            committed_at=known.times[events[-1].turn],
            turnlog_version=self._version,
        )


def _resume(window: Cursor) -> tuple[Position, int | None]:
    """The place after which to go on, and the segment of the next session up to which rows were given."""
    if window.at is None:
        return window.low, None
    if window.segment is None:
        return window.at, None
    return Position(window.at.tx, window.at.position - 1), window.segment


def _read_session(
    connection: reads.Connection, session_id: str, place: Position, high: Position, replay: bool
) -> _Stored:
    head = reads.head(connection, session_id)
    if head is None or head.status == "erased":
        return _Stored(session_id, place, "erased", [], {}, None)
    return _Stored(
        session_id,
        place,
        head.status,
        reads.event_rows(connection, session_id, upto=high),
        reads.load_frames(connection, session_id),
        reads.metadata_frame(connection, session_id),
        reads.load_live_chunks(connection, session_id) if replay else {},
    )


def _fold(stored: _Stored) -> _Known:
    """Raises UnknownEvent."""
    events = reads.decode_events(stored.events)
    session = fold(stored.session_id, events)
    if session is None:
        raise UnknownEvent("the log is empty")
    committed = [(recorded.at, recorded.event) for recorded in events if isinstance(recorded.event, TurnCommitted)]
    return _Known(session, {event.turn: event for _, event in committed}, {event.turn: at for at, event in committed})


def _unpack(stored: _Stored, known: _Known) -> tuple[dict[int, TurnTokens], dict[int, Wire]]:
    """The live turns' content, each checked against the log's hash. Raises CorruptContent."""
    content: dict[int, TurnTokens] = {}
    wires: dict[int, Wire] = {}
    for number in known.session.path:
        facts_frame, wire_frame = stored.frames.get(number, (None, None))
        event = known.events[number]
        if facts_frame is None or wire_frame is None:
            raise CorruptContent(f"turn {number}: the content is not there")
        if codec.content_hash(facts_frame, wire_frame) != event.content_hash:
            raise CorruptContent(f"turn {number}: the content's hash is not the log's")
        facts = codec.unpack(facts_frame, Facts)
        wires[number] = codec.unpack(wire_frame, Wire)
        content[number] = TurnTokens(event, facts.suffix_ids, facts.output_ids, facts.logprobs)
    return content, wires


def _replay(stored: _Stored, known: _Known, sample: Sample) -> dict[str, object]:
    """The sample's rows: those of the newest turn of its segment that has any, up to the sample's end.

    Raises CorruptContent.
    """
    found: dict[str, turnlog.Routing | None] = {}
    tombstoned: list[str] = []
    for kind in REPLAY:
        turns = [span.turn for span in sample.turns]
        if not any(ref.kind == kind for turn in turns for ref in known.events[turn].payloads):
            continue
        found[kind] = _routing(stored, known.session, sample, kind)
        if found[kind] is None:
            tombstoned.append(kind)
    return turnlog.replay_fields(found, tombstoned)


def _routing(stored: _Stored, session: Session, sample: Sample, kind: str) -> turnlog.Routing | None:
    """None where the payloads have been tombstoned, since the export's moment perhaps."""
    in_segment = (number for number in reversed(session.path) if session.turn(number).segment == sample.segment)
    payloads = (payload for number in in_segment for payload in session.payloads.get(number, ()))
    payload = next((payload for payload in payloads if payload.kind == kind), None)
    if payload is None:
        return None
    stop = min(payload.stop, max(len(sample.tokens) - 1, 0))
    needed = [chunk for chunk in payload.chunks if chunk.start < stop]
    if any((chunk.fence, chunk.number) not in stored.chunks for chunk in needed):
        return None
    rows = replay.rows_of(payload, stored.chunks, payload.start, stop)
    data = pybase64.b64encode(rows.tobytes()).decode()
    return turnlog.Routing(data, payload.start, len(rows), rows.dtype.name, (len(rows), *payload.shape))


def _conversation(session: Session, sample: Sample, wires: dict[int, Wire]) -> list[bytes]:
    """The messages at the end of a segment, as they were sent and answered."""
    chain = session.message_chain(sample.turns[-1].turn)
    return [message for turn in chain for message in (*wires[turn.number].messages, wires[turn.number].message)]


def _session_excluded(known: _Known, filters: Filters) -> str | None:
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
    stored: _Stored, window: Cursor, reason: str, *, segment: int | None = None, turn: int | None = None
) -> bytes:
    cursor = msgspec.structs.replace(window, at=stored.place, segment=segment if turn is None else None)
    row = {"session_id": stored.session_id, "segment": segment, "turn": turn, "excluded": reason}
    return msgspec.json.encode({**row, "cursor": cursor.encode()}) + b"\n"
