"""Content: what turns said and sampled, blobs, chunks of replay payloads wherever they are, and whole sessions for
exports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection, Select, and_, bindparam, case, func, null, or_, select, tuple_

from app.domain.events import ChunkKey, Event, RewardAssigned, SessionClosed, SessionErased, UnknownEvent
from app.domain.groups import Outcome, Root
from app.domain.restore import in_effect
from app.domain.selection import has_all
from app.errors import PayloadsUnavailable
from app.store import rollouts
from app.store.damage import SPAN, attempt_or, of_readable, split
from app.store.feed import Position, at_or_before
from app.store.ports import Database
from app.store.rollouts import CLOSED, RESTORED, REWARD
from app.store.schema import annotation_columns, blobs, chunks, events, refused_replies, sessions, turns
from app.store.sessions import EventRow, Frames, decode_events
from workers import codec
from workers.codec import CorruptContent, Exchange, Messages, StoredTokens

log = logging.getLogger("turnlog.objects")

T = TypeVar("T")

READ_AT_ONCE = 32
"""Objects read at the same time for one reader."""

# The turns of one session, and its blobs.


def load_frames(
    connection: Connection, session_id: str, numbers: Sequence[int], *, tokens: bool = True, exchange: bool = True
) -> Frames:
    """The stored content of some turns, discarded ones too."""
    parts = [numbers[at : at + SPAN] for at in range(0, len(numbers), SPAN)]
    rows = (connection.execute(_frames(tokens, exchange), {"sid": session_id, "numbers": part}) for part in parts)
    return {row[0]: (row[1], row[2]) for found in rows for row in found}


@cache
def _frames(tokens: bool, exchange: bool) -> Select[Any]:
    with_tokens = case((turns.c.tokens.is_(None), turns.c.exchange))
    return select(
        turns.c.turn, turns.c.tokens if tokens else null(), turns.c.exchange if exchange else with_tokens
    ).where(turns.c.session_id == bindparam("sid"), turns.c.turn.in_(bindparam("numbers", expanding=True)))


def first_exchanges(connection: Connection, session_ids: Sequence[str]) -> dict[str, bytes | None]:
    """By session, what went over the wire in its first committed turn."""
    numbers = select(turns.c.session_id, func.min(turns.c.turn).label("turn")).group_by(turns.c.session_id)
    first = numbers.where(turns.c.session_id.in_(session_ids)).subquery()
    is_first = and_(turns.c.session_id == first.c.session_id, turns.c.turn == first.c.turn)
    query = select(turns.c.session_id, turns.c.exchange).join(first, is_first)
    return {row[0]: row[1] for row in connection.execute(query)}


def load_tokens(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, StoredTokens]:
    """The tokens of some turns. Raises CorruptContent, also for a turn whose content is not there."""
    return unpack_tokens(load_frames(connection, session_id, numbers, exchange=False), numbers)


def load_exchanges(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, Exchange]:
    """What went over the wire in some turns. Raises CorruptContent, also where the content is not there."""
    frames = load_frames(connection, session_id, numbers, tokens=False)
    return _unpacked(frames, numbers, lambda _, exchange: codec.unpack(exchange, Exchange))


def unpack_tokens(frames: Frames, numbers: Sequence[int]) -> dict[int, StoredTokens]:
    """Raises CorruptContent, also where the content is not there."""
    return _unpacked(frames, numbers, codec.unpack_tokens)


def load_messages(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, Messages]:
    """What each of these turns added to its history. Raises CorruptContent, also where the content is not there."""
    return unpack_messages(load_frames(connection, session_id, numbers, tokens=False), numbers)


def unpack_messages(frames: Frames, numbers: Sequence[int]) -> dict[int, Messages]:
    """The messages of some turns. Raises CorruptContent, also where the content is not there."""
    return _unpacked(frames, numbers, lambda _, exchange: codec.unpack_messages(exchange))


def _unpacked(
    frames: Frames, numbers: Sequence[int], unpack: Callable[[bytes | None, bytes | None], T]
) -> dict[int, T]:
    """What `unpack` makes of each turn's two frames. Raises CorruptContent, which names the turn."""
    unpacked: dict[int, T] = {}
    for number in numbers:
        try:
            unpacked[number] = unpack(*frames.get(number, (None, None)))
        except CorruptContent as error:
            raise CorruptContent(f"turn {number}: {error}") from error
    return unpacked


def load_blobs(connection: Connection, session_id: str, numbers: Iterable[int]) -> dict[int, bytes]:
    """Raw per-session blobs by number. Raises CorruptContent, also where one is not there."""
    wanted = sorted(set(numbers))
    query = select(blobs.c.number, blobs.c.kind, blobs.c.data).where(
        blobs.c.session_id == session_id, blobs.c.number.in_(wanted)
    )
    raw: dict[int, bytes] = {}
    for number, kind, frame in connection.execute(query):
        try:
            raw[number] = codec.decompress(frame)
        except CorruptContent as error:
            raise CorruptContent(f"{kind}: {error}") from error
    if any(number not in raw for number in wanted):
        raise CorruptContent("the content is missing")
    return raw


def refused_reply(connection: Connection, session_id: str, fence: int) -> tuple[int, bytes] | None:
    """The size of a refused reply, and its beginning. Raises CorruptContent."""
    query = select(refused_replies.c.size, refused_replies.c.data).where(
        refused_replies.c.session_id == session_id, refused_replies.c.fence == fence
    )
    row = connection.execute(query).first()
    return None if row is None else (row[0], codec.decompress(row[1]))


def metadata_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, bytes]:
    """The metadata's JSON by session. Sessions without any, erased ones, and damaged ones are missing.

    It is a blob of each, without an index, so callers bound how many they look at.
    """
    stored = of_readable(connection, session_ids, _metadata_frames)
    by_session: dict[str, bytes] = {}
    for session_id, frame in stored.items():
        with suppress(CorruptContent):
            by_session[session_id] = codec.decompress(frame)
    return by_session


def matches(connection: Connection, session_ids: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> dict[str, bool]:
    """Of these sessions, those with metadata: has it what is wanted? What cannot be read matches nothing."""
    return {name: has_all(metadata, wanted) for name, metadata in metadata_of(connection, session_ids).items()}


def _metadata_frames(connection: Connection, session_ids: Sequence[str]) -> dict[str, bytes | None]:
    query = select(blobs.c.session_id, blobs.c.data).where(
        blobs.c.session_id.in_(session_ids), blobs.c.number == 0, blobs.c.kind == "metadata"
    )
    return {row[0]: row[1] for row in connection.execute(query)}


# Chunks of replay payloads, in the database or in objects.

FRAME = (
    chunks.c.data,
    case((chunks.c.tombstoned_by.is_(None), chunks.c.location)).label("location"),
)
"""A chunk's stored frame, and the name of the object that it is in instead."""


def stored_chunks(
    connection: Connection, session_id: str, keys: Collection[ChunkKey]
) -> dict[ChunkKey, bytes | str | None]:
    """Stored frames of chunks, or the names of the objects that they are in; None for a tombstone, nothing for one that
    is not there."""
    wanted = sorted(keys)
    query = select(chunks.c.fence, chunks.c.number, *FRAME).where(chunks.c.session_id == session_id)
    key = tuple_(chunks.c.fence, chunks.c.number)
    parts = (query.where(key.in_(wanted[at : at + SPAN])) for at in range(0, len(wanted), SPAN))
    return {
        (row[0], row[1]): row[2] if row[3] is None else row[3] for part in parts for row in connection.execute(part)
    }


is_live = chunks.c.tombstoned_by.is_(None) & chunks.c.location.is_not(None)
"""Condition on chunks: in an object that nobody may delete."""

ChunkFrames = dict[ChunkKey, bytes | None]


async def load_chunks(database: Database, session_id: str, keys: Collection[ChunkKey]) -> ChunkFrames:
    """Stored frames of chunks; None for a tombstone or a frame that is lost, nothing for a chunk that is not there.

    Raises PayloadsUnavailable, SessionUnreadable, StoreUnavailable.
    """
    stored = await database.read(lambda connection: stored_chunks(connection, session_id, keys), session_id=session_id)
    frames: ChunkFrames = {key: frame for key, frame in stored.items() if not isinstance(frame, str)}
    objects = {key: name for key, name in stored.items() if isinstance(name, str)}
    return frames | await _fetched(database, session_id, objects)


async def fetch_objects(database: Database, sessions: Iterable[StoredSession]) -> None:
    """Fetch the chunks of sessions that are in objects. Raises PayloadsUnavailable, StoreUnavailable."""
    for stored in sessions:
        if stored.objects:
            stored.chunks.update(await _fetched(database, stored.session_id, stored.objects))
            stored.objects.clear()


async def _fetched(database: Database, session_id: str, objects: Mapping[ChunkKey, str]) -> ChunkFrames:
    """The frames in objects; None for one that is lost. One that was tombstoned since is left out."""
    if not objects:
        return {}
    bucket = database.bucket
    if bucket is None:
        raise PayloadsUnavailable("replay payloads are in object storage: set TURNLOG_PAYLOADS")
    room = asyncio.Semaphore(READ_AT_ONCE)

    async def read(name: str) -> bytes | None:
        async with room:
            return await bucket.read(name)

    frames = dict(zip(objects, await asyncio.gather(*map(read, objects.values())), strict=True))
    missing = [key for key, frame in frames.items() if frame is None]
    if missing:
        live = await database.read(partial(live_objects, session_id=session_id, keys=missing), session_id=session_id)
        for key in missing:
            if key in live:
                log.error("session %s: the object %s is missing from object storage", session_id, live[key].name)
            else:
                del frames[key]
    return frames


class LiveObject(NamedTuple):
    name: str
    kind: str
    number: int


def live_objects(
    connection: Connection, session_id: str, keys: Collection[ChunkKey] | None = None
) -> dict[ChunkKey, LiveObject]:
    """The objects that chunks of a session refer to; of these keys, if any are given."""
    query = select(chunks.c.fence, chunks.c.number, chunks.c.location, chunks.c.kind)
    rows = connection.execute(query.where(chunks.c.session_id == session_id, is_live))
    objects = {(row[0], row[1]): LiveObject(row[2], row[3], row[1]) for row in rows}
    return objects if keys is None else {key: objects[key] for key in keys if key in objects}


# Whole sessions as of one position in the order of commits.


class StoredSession(msgspec.Struct, frozen=True):
    """A session's rows: events up to the given position, and content as it is when `read_content` reads it. All content
    is compressed frames.

    `objects` are the names of chunks' objects, until `fetch_objects` has fetched them into `chunks`, or as they
    are, with their `urls`.

    `columns` are those that were asked for, by turn and name, each by the event that wrote it. `root` is None for a
    root. `damage`: why only its head is here. `rollout_rows`: how many rows its rollout has in an
    export, where the rollout has several sessions.
    """

    session_id: str
    status: str
    group_id: str | None
    events: list[EventRow] = []
    frames: Frames = {}
    blobs: dict[int, bytes] = {}
    chunks: dict[ChunkKey, bytes | None] = {}
    root: Root | None = None
    damage: str | None = None
    rollout_rows: int | None = None
    objects: dict[ChunkKey, str] = {}
    urls: Mapping[str, str] = {}
    columns: dict[tuple[int, str], dict[int, bytes]] = {}

    @property
    def rollout_id(self) -> str:
        return self.session_id if self.root is None else self.root.session_id


def read_sessions(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, StoredSession]:
    """Sessions without their content. An erased one has only its status; one on a damaged page has `damage`, no log."""
    return _undamaged(connection, session_ids, partial(_with_logs, upto=upto))


def read_content(
    connection: Connection,
    stored: Mapping[str, StoredSession],
    turns: Mapping[str, Collection[int] | None],
    *,
    replay: bool,
    images: bool = False,
    columns: Sequence[str] = (),
) -> dict[str, StoredSession]:
    """Sessions of `stored` with the content of these turns (None: of all), which is read into them. One that was erased
    since its log was read has only its status, one that has left the store is missing, one on a damaged page has
    `damage`.

    `replay`: read the live chunks too, `images`: the images, `columns`: those of these names.
    """
    read = partial(_with_content, stored=stored, numbers=turns, replay=replay, images=images, columns=columns)
    return _undamaged(connection, list(turns), read)


def _undamaged(
    connection: Connection,
    session_ids: Sequence[str],
    read: Callable[[Connection, Sequence[str]], Mapping[str, StoredSession]],
) -> dict[str, StoredSession]:
    stored, lost = split(connection, session_ids, read)
    for session_id, why in lost.items():
        head = attempt_or(connection, partial(_stored_heads, session_ids=[session_id]), {}).get(session_id)
        stored[session_id] = msgspec.structs.replace(head or StoredSession(session_id, "", None), damage=why)
    return stored


def _stored_heads(connection: Connection, session_ids: Sequence[str]) -> dict[str, StoredSession]:
    heads = select(sessions.c.session_id, sessions.c.status, sessions.c.group_id).where(
        sessions.c.session_id.in_(session_ids)
    )
    roots = rollouts.roots_of(connection, session_ids)
    return {row[0]: StoredSession(*row, root=roots.get(row[0])) for row in connection.execute(heads)}


_log = select(events.c.session_id, *(events.c[name] for name in EventRow._fields)).order_by(
    events.c.session_id, events.c.seq
)


def _with_logs(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, StoredSession]:
    every = _stored_heads(connection, session_ids)
    stored = {session_id: one for session_id, one in every.items() if one.status != "erased"}
    # Each row's session is looked up, since a damaged index may lead to another session's rows.
    for session_id, *row in connection.execute(_log.where(events.c.session_id.in_(stored), at_or_before(upto))):
        if session_id in stored:
            stored[session_id].events.append(EventRow(*row))
    return every


def _with_content(
    connection: Connection,
    session_ids: Sequence[str],
    stored: Mapping[str, StoredSession],
    numbers: Mapping[str, Collection[int] | None],
    *,
    replay: bool,
    images: bool,
    columns: Sequence[str],
) -> dict[str, StoredSession]:
    heads = select(sessions.c.session_id, sessions.c.status, sessions.c.group_id).where(
        sessions.c.session_id.in_(session_ids)
    )
    there = [row for row in connection.execute(heads) if row[0] in stored]
    every = {row[0]: StoredSession(*row) if row[1] == "erased" else stored[row[0]] for row in there}
    stored = {session_id: one for session_id, one in every.items() if one.status != "erased"}
    whole = [session_id for session_id in stored if numbers[session_id] is None]
    content = select(turns.c.session_id, turns.c.turn, turns.c.tokens, turns.c.exchange)
    for session_id, turn, tokens, exchange in connection.execute(content.where(turns.c.session_id.in_(whole))):
        if session_id in stored:
            stored[session_id].frames[turn] = (tokens, exchange)
    for session_id, one in stored.items():
        if (wanted := numbers[session_id]) is not None:
            one.frames.update(load_frames(connection, session_id, sorted(wanted)))
    shared = select(blobs.c.session_id, blobs.c.number, blobs.c.data).where(blobs.c.session_id.in_(stored))
    for session_id, number, data in connection.execute(shared if images else shared.where(blobs.c.kind != "image")):
        if session_id in stored:
            stored[session_id].blobs[number] = data
    if columns:
        of_turns = select(
            *(annotation_columns.c[name] for name in ("session_id", "turn", "name", "seq", "data"))
        ).where(annotation_columns.c.session_id.in_(stored), annotation_columns.c.name.in_(columns))
        for session_id, turn, name, seq, data in connection.execute(of_turns):
            if session_id in stored:
                stored[session_id].columns.setdefault((turn, name), {})[seq] = data
    if replay:
        rows = select(chunks.c.session_id, chunks.c.fence, chunks.c.number, *FRAME)
        live = rows.where(chunks.c.session_id.in_(stored), chunks.c.tombstoned_by.is_(None))
        for session_id, fence, number, data, location in connection.execute(live):
            if session_id in stored and location is not None:
                stored[session_id].objects[fence, number] = location
            elif session_id in stored:
                stored[session_id].chunks[fence, number] = data
    return every


def read_logs(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, list[EventRow]]:
    """The logs alone, of the sessions that can be read. An erased session has none, whenever it was erased."""
    return of_readable(connection, session_ids, partial(_logs, upto=upto))


def _logs(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, list[EventRow]]:
    logs: dict[str, list[EventRow]] = {session_id: [] for session_id in session_ids}
    erased = events.c.type == SessionErased.__name__
    for session_id, *row in connection.execute(
        _log.where(events.c.session_id.in_(session_ids), or_(at_or_before(upto), erased))
    ):
        if session_id in logs:
            logs[session_id].append(EventRow(*row))
    return {
        session_id: log
        for session_id, log in logs.items()
        if not any(row.type == SessionErased.__name__ for row in log)
    }


def outcomes(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, Outcome]:
    """What became of each session as of a position; sessions without a reward that did not fail are left out.

    Those of which an event cannot be read are left out too: the export reports them.
    """
    return of_readable(connection, session_ids, partial(_outcomes, upto=upto))


def _outcomes(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, Outcome]:
    query = (
        select(events.c.session_id, *(events.c[name] for name in EventRow._fields))
        .where(events.c.session_id.in_(session_ids), events.c.type.in_((REWARD, CLOSED, RESTORED)), at_or_before(upto))
        .order_by(events.c.session_id, events.c.seq)
    )
    logs: dict[str, list[EventRow]] = {}
    for session_id, *row in connection.execute(query):
        logs.setdefault(session_id, []).append(EventRow(*row))
    by_session: dict[str, Outcome] = {}
    for session_id, rows in logs.items():
        with suppress(UnknownEvent):
            outcome = _outcome(recorded.event for recorded in in_effect(decode_events(rows)))
            if outcome != Outcome():
                by_session[session_id] = outcome
    return by_session


def _outcome(log: Iterable[Event]) -> Outcome:
    outcome = Outcome()
    for event in log:
        if isinstance(event, SessionClosed):
            outcome = Outcome(outcome.reward, event.failed)
        elif isinstance(event, RewardAssigned) and event.turn is None:
            outcome = Outcome(event.reward, outcome.failed if event.restored else None)
    return outcome
