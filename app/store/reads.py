"""Reads: functions over a Core connection, for `Database.read`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, case, exists, func, literal, null, or_, select, tuple_
from sqlalchemy import Connection as Connection

from app.domain.events import EXPORTED, BlobsTombstoned, ChunkKey, Recorded, UnknownEvent, decode
from app.domain.patterns import MAX_INTEGER
from app.domain.session import Session, decode_session, fold
from app.store import pins, rollouts
from app.store.broken import Content
from app.store.dialect import oldest_tx, used_bytes
from app.store.names import called
from app.store.schema import (
    blobs,
    chunks,
    events,
    groups,
    open_turns,
    refused_replies,
    sessions,
    snapshots,
    staged_tokens,
    store_meta,
    turns,
)
from app.store.statements import ENDED, is_idle
from workers import codec
from workers.codec import CorruptContent, Exchange, Messages, StoredTokens

SNAPSHOT_FORMAT = "session-3"
"""Changes with the structure of `Session`; snapshots of another format are ignored."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A place in the order of commits."""

    tx: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
    position: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]


START = Position(0, 0)
"""Before everything."""

END = Position(MAX_INTEGER, MAX_INTEGER)
"""Behind everything."""


def read_all_rows(connection: Connection, session_id: str) -> None:
    """Read every row of a session without its content, to find a damaged page."""
    for table in (sessions, open_turns, events, turns, blobs, chunks, refused_replies, staged_tokens):
        columns = [column for column in table.columns if not isinstance(column.type, Content)]
        connection.execute(select(*columns).where(table.c.session_id == session_id)).all()


class EventRow(NamedTuple):
    """A stored event, not yet decoded."""

    seq: int
    at: float
    type: str
    version: int
    data: bytes


def event_rows(
    connection: Connection,
    session_id: str,
    *,
    after: int = 0,
    upto: Position | None = None,
    limit: int | None = None,
) -> list[EventRow]:
    """A session's events after seq `after`, in order."""
    query = (
        select(*(events.c[name] for name in EventRow._fields))
        .where(events.c.session_id == session_id, events.c.seq > after)
        .order_by(events.c.seq)
    )
    if upto is not None:
        query = query.where(at_or_before(upto))
    if limit is not None:
        query = query.limit(limit)
    return [EventRow(*row) for row in connection.execute(query)]


def last_seq(connection: Connection, session_id: str) -> int:
    """The number of a log's last event; 0 where there is none."""
    return connection.execute(select(func.max(events.c.seq)).where(events.c.session_id == session_id)).scalar() or 0


def decode_events(rows: Iterable[EventRow]) -> list[Recorded]:
    """Raises UnknownEvent, also if a damaged page holds something else than an event."""
    return [_recorded(row) for row in rows]


def _recorded(row: EventRow) -> Recorded:
    if not (isinstance(row.seq, int) and isinstance(row.at, float) and isinstance(row.version, int)):
        raise UnknownEvent("a row that is no event's")
    return Recorded(row.seq, row.at, decode(row.type, row.version, row.data or b""))


def load_events(connection: Connection, session_id: str, *, after: int = 0, limit: int | None = None) -> list[Recorded]:
    """Few events, read and decoded. Raises UnknownEvent."""
    return decode_events(event_rows(connection, session_id, after=after, limit=limit))


def session_rows(connection: Connection, session_id: str) -> tuple[Session | None, list[EventRow]]:
    """A session's snapshot, if any, and the events after it.

    A snapshot is ignored if its last event is not in the log, because a database crash undid it, and after a restore.
    """
    snapshot = load_snapshot(connection, session_id)
    if snapshot is not None:
        rows = event_rows(connection, session_id, after=snapshot.version - 1)
        if continues(snapshot, rows):
            return snapshot, rows[1:]
    return None, event_rows(connection, session_id)


def continues(snapshot: Session, rows: Sequence[EventRow]) -> bool:
    """Is the first of these events the snapshot's last, and does none go back to before it?"""
    is_last = bool(rows) and (rows[0].seq, rows[0].at) == (snapshot.version, snapshot.last_event_at)
    return is_last and all(row.type != "SessionRestored" for row in rows[1:])


def fold_rows(session_id: str, snapshot: Session | None, rows: Iterable[EventRow]) -> Session | None:
    """The fold of `session_rows`. Raises UnknownEvent."""
    return fold(session_id, decode_events(rows), snapshot)


def load_snapshot(connection: Connection, session_id: str) -> Session | None:
    """A cached fold, or None; a damaged or foreign one is ignored, because the log is the truth."""
    query = select(snapshots.c.format, snapshots.c.data).where(snapshots.c.session_id == session_id)
    row = connection.execute(query).first()
    return None if row is None or row[0] != SNAPSHOT_FORMAT else snapshot_of(row[1])


def snapshot_of(frame: bytes) -> Session | None:
    """The fold in a snapshot's frame, or None if it is damaged."""
    try:
        return decode_session(codec.decompress(frame))
    except (CorruptContent, msgspec.MsgspecError):
        return None


Frames = dict[int, tuple[bytes | None, bytes | None]]
"""A turn's stored tokens and exchange, by turn; None where not asked for or erased. A small turn's tokens are in its
exchange, which is read for either."""

SPAN = 500
"""Turns in one IN list; SQLite takes at most some thousand parameters."""


def load_frames(
    connection: Connection,
    session_id: str,
    numbers: Sequence[int] | None = None,
    *,
    tokens: bool = True,
    exchange: bool = True,
) -> Frames:
    """The stored content of some turns (None: of all), discarded ones too."""
    with_tokens = case((turns.c.tokens.is_(None), turns.c.exchange))
    query = select(
        turns.c.turn, turns.c.tokens if tokens else null(), turns.c.exchange if exchange else with_tokens
    ).where(turns.c.session_id == session_id)
    parts = (
        [query]
        if numbers is None
        else [query.where(turns.c.turn.in_(numbers[at : at + SPAN])) for at in range(0, len(numbers), SPAN)]
    )
    return {row[0]: (row[1], row[2]) for part in parts for row in connection.execute(part)}


def load_tokens(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, StoredTokens]:
    """The tokens of some turns. Raises CorruptContent, also for a turn whose content is not there."""
    return unpack_tokens(load_frames(connection, session_id, numbers, exchange=False), numbers)


def load_exchanges(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, Exchange]:
    """What went over the wire in some turns. Raises CorruptContent, also where the content is not there."""
    return unpack_exchanges(load_frames(connection, session_id, numbers, tokens=False), numbers)


def unpack_tokens(frames: Frames, numbers: Sequence[int]) -> dict[int, StoredTokens]:
    """Raises CorruptContent, also where the content is not there."""
    return {number: codec.unpack_tokens(*frames.get(number, (None, None))) for number in numbers}


def load_messages(connection: Connection, session_id: str, numbers: Sequence[int]) -> dict[int, Messages]:
    """What each of these turns added to its history. Raises CorruptContent, also where the content is not there."""
    return unpack_messages(load_frames(connection, session_id, numbers, tokens=False), numbers)


def unpack_messages(frames: Frames, numbers: Sequence[int]) -> dict[int, Messages]:
    """The messages of some turns. Raises CorruptContent, also where the content is not there."""
    return {number: codec.unpack_messages(frames.get(number, (None, None))[1]) for number in numbers}


def unpack_exchanges(frames: Frames, numbers: Sequence[int]) -> dict[int, Exchange]:
    """Raises CorruptContent, also where the content is not there."""
    return {number: codec.unpack(frames.get(number, (None, None))[1], Exchange) for number in numbers}


def load_blobs(connection: Connection, session_id: str, numbers: Iterable[int]) -> dict[int, bytes]:
    """Raw per-session blobs by number. Raises CorruptContent, also where one is not there."""
    wanted = sorted(set(numbers))
    query = select(blobs.c.number, blobs.c.data).where(blobs.c.session_id == session_id, blobs.c.number.in_(wanted))
    blobs_by_number = {row[0]: row[1] for row in connection.execute(query)}
    return {number: codec.decompress(blobs_by_number.get(number)) for number in wanted}


FRAME = (
    chunks.c.data,
    case((chunks.c.tombstoned_by.is_(None), chunks.c.location)).label("location"),
)
"""A chunk's stored frame, and the name of the object that it is in instead."""


def load_chunks(
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


def refused_reply(connection: Connection, session_id: str, fence: int) -> tuple[int, bytes] | None:
    """The size of a refused reply, and the stored frame of its beginning."""
    query = select(refused_replies.c.size, refused_replies.c.data).where(
        refused_replies.c.session_id == session_id, refused_replies.c.fence == fence
    )
    row = connection.execute(query).first()
    return None if row is None else (row[0], row[1])


def database_bytes(connection: Connection) -> int:
    """The database's size in bytes, without free pages."""
    size: int = connection.execute(select(used_bytes())).scalar_one()
    return size


def idle_sessions(
    connection: Connection, since: float, after: str, limit: int, among: Sequence[str] | None = None
) -> list[str]:
    """Open sessions after id `after` that have no turn in flight and have not changed since, nor has their rollout.

    `among`: only those of these, without a limit.
    """
    query = (
        select(sessions.c.session_id)
        .where(
            sessions.c.session_id > after,
            sessions.c.status == "open",
            is_idle(literal(since)),
            *of_these(among),
        )
        .order_by(sessions.c.session_id)
        .limit(limit if among is None else None)
    )
    return list(connection.execute(query).scalars())


def closed_sessions(
    connection: Connection,
    cutoff: float,
    after: tuple[float, str],
    limit: int,
    *,
    holding: bool,
    acknowledged: bool = False,
    among: Sequence[str] | None = None,
) -> list[tuple[float, str]]:
    """Sessions closed or undone at or before `cutoff`, after `after` in the order of (closed_at, id), without those
    that a checkpoint has.

    `holding`: only those that still hold a replay payload or a refused reply. `acknowledged`: leave out those of a
    group that the training feed's consumer has not acknowledged. `among`: only those of these, without a limit.
    """
    place = tuple_(sessions.c.closed_at, sessions.c.session_id)
    query = (
        select(sessions.c.closed_at, sessions.c.session_id)
        .where(
            sessions.c.status.in_(ENDED),
            sessions.c.closed_at <= cutoff,
            place > after,
            ~pins.is_pinned(),
            *of_these(among),
        )
        .order_by(sessions.c.closed_at, sessions.c.session_id)
        .limit(limit if among is None else None)
    )
    if holding:
        query = query.where(holds_payload())
    if acknowledged:
        counted_in = rollouts.group()
        consumed = exists().where(groups.c.group_id == counted_in, groups.c.acked_at.is_not(None))
        query = query.where(or_(counted_in.is_(None), consumed))
    return [(row[0], row[1]) for row in connection.execute(query)]


def of_these(session_ids: Sequence[str] | None) -> list[ColumnElement[bool]]:
    """Condition on heads; None: any."""
    return [] if session_ids is None else [sessions.c.session_id.in_(session_ids)]


def holds_payload() -> ColumnElement[bool]:
    """Condition on sessions: still holds a replay payload or a refused reply."""
    live = exists().where(chunks.c.session_id == sessions.c.session_id, chunks.c.tombstoned_by.is_(None))
    return or_(live, exists().where(refused_replies.c.session_id == sessions.c.session_id))


def last_tombstone(connection: Connection, session_id: str) -> int:
    """The seq of a session's newest `BlobsTombstoned`; 0 if it has none."""
    query = select(func.max(events.c.seq)).where(
        events.c.session_id == session_id, events.c.type == BlobsTombstoned.__name__
    )
    return connection.execute(query).scalar_one() or 0


def epoch(connection: Connection) -> str:
    """The store's epoch: a restore raises it, and with it ends every export cursor."""
    value: str = connection.execute(select(store_meta.c.value).where(store_meta.c.key == "epoch")).scalar_one()
    return value


def log_epoch(connection: Connection) -> str:
    """The log's epoch, which positions name: only the restore of a backup raises it, not that of a checkpoint."""
    named = store_meta.c.key.in_(("epoch", "log_epoch"))
    meta = {row.key: row.value for row in connection.execute(select(store_meta).where(named))}
    return epoch_of_log(meta["epoch"], meta.get("log_epoch"))


def epoch_of_log(epoch: str, log_epoch: str | None) -> str:
    """`log_epoch` is that row's value; it counts while it names the store's epoch."""
    named, _, kept = (log_epoch or "").partition("=")
    return kept if named == epoch else epoch


SYNCED = (*EXPORTED, "SessionCreated")
"""Types of events that are on disk before anyone sees them. Claims are not: a crash or failover of the database may
undo them and reuse their positions."""


def horizon(connection: Connection) -> Position:
    """The last position below which nothing can appear any more, even after a crash."""
    last = (
        select(events.c.tx, events.c.position)
        .where(events.c.tx < oldest_tx(), events.c.type.in_(SYNCED))
        .order_by(events.c.tx.desc(), events.c.position.desc())
        .limit(1)
    )
    row = connection.execute(last).first()
    return max(START if row is None else Position(*row), last_forgotten(connection))


FORGOTTEN = "forgotten"
"""The key in `store_meta` of the last place of an event that was taken out of the log with its whole session."""


def last_forgotten(connection: Connection) -> Position:
    """The last place of an event that is not in the log any more: the log ends there or later."""
    return forgotten_place(connection.execute(select_forgotten).scalar())


def forgotten_place(value: str | None) -> Position:
    """`value` is that row's."""
    if value is None:
        return START
    tx, _, position = value.partition(".")
    return Position(int(tx), int(position))


select_forgotten = select(store_meta.c.value).where(store_meta.c.key == FORGOTTEN)


def changed_sessions(
    connection: Connection,
    *,
    after: Position,
    upto: Position,
    limit: int,
    session_id: str | None = None,
    group_id: str | None = None,
    name: str | None = None,
    generation: int | None = None,
    types: Sequence[str] = EXPORTED,
) -> list[tuple[str, Position]]:
    """Sessions in the order of their last event of these types in (after, upto], each once, with that place."""
    later = events.alias("later")
    newer = exists().where(
        later.c.session_id == events.c.session_id,
        later.c.seq > events.c.seq,
        later.c.type.in_(types),
        tuple_(later.c.tx, later.c.position) <= (upto.tx, upto.position),
    )
    place = (events.c.tx, events.c.position)
    query = (
        select(events.c.session_id, *place)
        .where(
            events.c.type.in_(types),
            ~newer,
            tuple_(*place) > (after.tx, after.position),
            tuple_(*place) <= (upto.tx, upto.position),
        )
        .order_by(*place)
        .limit(limit)
    )
    if session_id is not None:
        query = query.where(events.c.session_id == session_id)
    if group_id is not None:
        query = query.where(events.c.session_id.in_(rollouts.members_of_group(group_id)))
    if name is not None or generation is not None:
        query = query.where(events.c.session_id.in_(called(name, generation)))
    return [(row[0], Position(row[1], row[2])) for row in connection.execute(query)]


def at_or_before(place: Position) -> ColumnElement[bool]:
    """Condition on events: at or before `place` in the order of commits."""
    return tuple_(events.c.tx, events.c.position) <= (place.tx, place.position)
