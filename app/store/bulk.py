"""Reads many whole sessions as of one position in the order of commits, for exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, case, or_, select

from app.domain.events import ChunkKey, RewardAssigned, SessionErased, UnknownEvent, decode
from app.domain.groups import Root
from app.domain.session import fold
from app.store import rollouts
from app.store.broken import BrokenRow
from app.store.damaged import attempt_or, session_ids, split
from app.store.dialect import AlchemyTx, oldest_tx
from app.store.reads import (
    FRAME,
    SPAN,
    START,
    SYNCED,
    EventRow,
    Frames,
    Position,
    at_or_before,
    decode_events,
    event_rows,
)
from app.store.rollouts import RESTORED, REWARD
from app.store.schema import annotation_columns, blobs, chunks, events, sessions, turns

BEHIND = 1 << 62
"""Position of the first session of which nobody knows where it stands; no writer ever comes so far."""


class StoredSession(msgspec.Struct, frozen=True):
    """A session's rows: events up to the given position, content as it is now. All content is compressed frames.

    `objects` are the names of chunks' objects, until `store.chunk_reader` has fetched them into `chunks`, or as they
    are, with their `urls`.

    `columns` are those that were asked for, by turn and name, each by the event that wrote it. `root` is None for a
    root. `damage`: why only its head is here. `rollout_rows`: how many rows its rollout has in an
    export, where the rollout has several sessions.
    """

    session_id: str
    status: str
    group_id: str | None
    events: list[EventRow]
    frames: Frames
    blobs: dict[int, bytes]
    chunks: dict[ChunkKey, bytes | None]
    root: Root | None = None
    damage: str | None = None
    rollout_rows: int | None = None
    objects: dict[ChunkKey, str] = {}
    urls: Mapping[str, str] = {}
    columns: dict[tuple[int, str], dict[int, bytes]] = {}

    @property
    def rollout_id(self) -> str:
        return self.session_id if self.root is None else self.root.session_id


class ExportHead(msgspec.Struct, frozen=True):
    """A session's number of committed turns (a measure of its size), and its rollout.

    `group_id` is the group that counts it. `root_id` is the rollout's root, None for the root itself. `is_known` False:
    neither head nor log can be read.
    """

    session_id: str
    group_id: str | None
    turns: int
    root_id: str | None = None
    is_known: bool = True

    @property
    def rollout(self) -> str:
        return self.root_id or self.session_id


def _heads() -> Select[Any]:
    root_id = case((rollouts.is_root(), None), else_=sessions.c.root_id)
    return select(sessions.c.session_id, rollouts.group(), sessions.c.turns, root_id)


def heads(connection: Connection, session_ids: Sequence[str]) -> dict[str, ExportHead]:
    query = _heads().where(sessions.c.session_id.in_(session_ids))
    return {row[0]: ExportHead(*row) for row in connection.execute(query)}


def every_head(connection: Connection) -> dict[str, ExportHead]:
    """Of all sessions, around damaged pages: a lost head is what the log says.

    Where that is lost too, the session is in no known group (`is_known`).
    """
    ids = session_ids(connection)
    every, _ = split(connection, ids, heads)
    lost = [session_id for session_id in ids if session_id not in every]
    for session_id in lost:
        every[session_id] = attempt_or(connection, partial(_head_by_log, session_id=session_id), None) or ExportHead(
            session_id, None, 0, is_known=False
        )
    for session_id in lost:
        head = every[session_id]
        root = every.get(head.rollout)
        if root is None:
            every[session_id] = msgspec.structs.replace(head, root_id=None)
        elif root is not head:
            every[session_id] = msgspec.structs.replace(head, group_id=root.group_id)
    return every


def _head_by_log(connection: Connection, session_id: str) -> ExportHead | None:
    try:
        session = fold(session_id, decode_events(event_rows(connection, session_id)))
    except UnknownEvent:
        return None
    if session is None:
        return None
    root_id = rollouts.root_in_logs(AlchemyTx(connection), session_id, session.config.parent)
    return ExportHead(session_id, session.config.group_id, len(session.turns), root_id)


def read_sessions(
    connection: Connection,
    session_ids: Sequence[str],
    upto: Position,
    *,
    replay: bool,
    images: bool = False,
    columns: Sequence[str] = (),
) -> dict[str, StoredSession]:
    """An erased session has only its status. `replay`: read the live chunks too, `images`: the images, `columns`: those
    of these names."""
    stored: dict[str, StoredSession] = {}
    for part in _parts(session_ids):
        stored |= _read_part(connection, part, upto, replay=replay, images=images, columns=columns)
    return stored


def read_each(
    connection: Connection,
    session_ids: Sequence[str],
    upto: Position,
    *,
    replay: bool,
    images: bool = False,
    columns: Sequence[str] = (),
) -> dict[str, StoredSession]:
    """As `read_sessions`, but a damaged page affects only the sessions on it: they have `damage`, and no content."""
    readable, lost = split(
        connection, session_ids, partial(_read_part, upto=upto, replay=replay, images=images, columns=columns)
    )
    for session_id, why in lost.items():
        head = attempt_or(connection, partial(_stored_heads, session_ids=[session_id]), {}).get(session_id)
        stored = head or StoredSession(session_id, "", None, [], {}, {}, {})
        readable[session_id] = msgspec.structs.replace(stored, damage=why)
    return readable


def _is_erased(log: Sequence[EventRow]) -> bool:
    return any(row.type == SessionErased.__name__ for row in log)


def _read_part(
    connection: Connection,
    session_ids: Sequence[str],
    upto: Position,
    *,
    replay: bool,
    images: bool = False,
    columns: Sequence[str] = (),
) -> dict[str, StoredSession]:
    sessions = _stored_heads(connection, session_ids)
    live = {session_id: stored for session_id, stored in sessions.items() if stored.status != "erased"}
    read_content(connection, live, upto, replay=replay, images=images, columns=columns)
    return sessions


def _stored_heads(connection: Connection, session_ids: Sequence[str]) -> dict[str, StoredSession]:
    heads = select(sessions.c.session_id, sessions.c.status, sessions.c.group_id).where(
        sessions.c.session_id.in_(session_ids)
    )
    roots = rollouts.roots_of(connection, session_ids)
    return {
        row[0]: StoredSession(row[0], row[1], row[2], [], {}, {}, {}, roots.get(row[0]))
        for row in connection.execute(heads)
    }


_log = select(events.c.session_id, events.c.seq, events.c.at, events.c.type, events.c.version, events.c.data).order_by(
    events.c.session_id, events.c.seq
)


def read_content(
    connection: Connection,
    stored: Mapping[str, StoredSession],
    upto: Position,
    *,
    replay: bool,
    images: bool = False,
    columns: Sequence[str] = (),
) -> None:
    """Read log and content of sessions that have not been erased."""
    live = list(stored)
    log = _log.where(events.c.session_id.in_(live), at_or_before(upto))
    # A damaged index may lead to another session's rows.
    for row in connection.execute(log).all():
        if row[0] in stored:
            stored[row[0]].events.append(EventRow(*row[1:]))
    content = select(turns.c.session_id, turns.c.turn, turns.c.tokens, turns.c.exchange).where(
        turns.c.session_id.in_(live)
    )
    for session_id, turn, tokens, exchange in connection.execute(content).all():
        if session_id in stored:
            stored[session_id].frames[turn] = (tokens, exchange)
    shared = select(blobs.c.session_id, blobs.c.number, blobs.c.data).where(blobs.c.session_id.in_(live))
    if not images:
        shared = shared.where(blobs.c.kind != "image")
    for session_id, number, data in connection.execute(shared).all():
        if session_id in stored:
            stored[session_id].blobs[number] = data
    if columns:
        of_turns = select(
            *(annotation_columns.c[name] for name in ("session_id", "turn", "name", "seq", "data"))
        ).where(annotation_columns.c.session_id.in_(live), annotation_columns.c.name.in_(columns))
        for session_id, turn, name, seq, data in connection.execute(of_turns):
            if session_id in stored:
                stored[session_id].columns.setdefault((turn, name), {})[seq] = data
    if replay:
        rows = select(chunks.c.session_id, chunks.c.fence, chunks.c.number, *FRAME).where(
            chunks.c.session_id.in_(live), chunks.c.tombstoned_by.is_(None)
        )
        for session_id, fence, number, data, location in connection.execute(rows):
            if session_id in stored and location is not None:
                stored[session_id].objects[fence, number] = location
            elif session_id in stored:
                stored[session_id].chunks[fence, number] = data


def read_logs(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, list[EventRow]]:
    """The logs alone, without content. An erased session has none, whenever it was erased."""
    logs: dict[str, list[EventRow]] = {session_id: [] for session_id in session_ids}
    erased = events.c.type == SessionErased.__name__
    for row in connection.execute(_log.where(events.c.session_id.in_(session_ids), or_(at_or_before(upto), erased))):
        if row[0] in logs:
            logs[row[0]].append(EventRow(*row[1:]))
    return {session_id: log for session_id, log in logs.items() if not _is_erased(log)}


def group_members(connection: Connection, group_id: str) -> list[ExportHead]:
    """All sessions of a group's rollouts, erased ones too."""
    return [ExportHead(*row) for row in connection.execute(_heads().where(rollouts.in_groups([group_id])))]


def rewards(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    """Each session's reward as of a position; sessions without one are left out.

    Sessions with an unreadable reward are left out too: the export reports them.
    """
    by_session: dict[str, float] = {}
    for part in _parts(session_ids):
        by_session |= _rewards(connection, part, upto)
    return by_session


def rewards_of_each(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    """As `rewards`, but a damaged page affects only the sessions on it."""
    return split(connection, session_ids, partial(_rewards, upto=upto))[0]


def _rewards(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    by_session: dict[str, float] = {}
    unreadable: set[str] = set()
    query = (
        select(events.c.session_id, events.c.type, events.c.version, events.c.data)
        .where(events.c.session_id.in_(session_ids), events.c.type.in_((REWARD, RESTORED)), at_or_before(upto))
        .order_by(events.c.session_id, events.c.seq)
    )
    for session_id, kind, version, data in connection.execute(query):
        if kind == RESTORED:
            by_session.pop(session_id, None)
            continue
        try:
            event = decode(REWARD, version, data)
        except UnknownEvent:
            unreadable.add(session_id)
            continue
        if isinstance(event, RewardAssigned) and event.turn is None:
            by_session[session_id] = event.reward
    return {session_id: reward for session_id, reward in by_session.items() if session_id not in unreadable}


def last_places(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> Mapping[str, Position]:
    """The position of each session's last event of these types, at or before `upto`."""
    places: dict[str, Position] = {}
    for part in _parts(session_ids):
        query = (
            select(events.c.session_id, events.c.tx, events.c.position)
            .where(events.c.session_id.in_(part), events.c.type.in_(types), at_or_before(upto))
            .order_by(events.c.tx, events.c.position)
        )
        for session_id, tx, position in connection.execute(query):
            places[session_id] = Position(tx, position)
    return places


def last_places_of_each(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, Position]:
    """As `last_places`, by each session's own events: the index over the order may be what is damaged.

    A session with an event that cannot be read stands behind all others, at a place that no event has.
    """
    places, lost = split(connection, session_ids, partial(_last_places, upto=upto, types=types))
    places |= {session_id: Position(upto.tx, BEHIND + at) for at, session_id in enumerate(sorted(lost), start=1)}
    return places


def _last_places(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, Position]:
    """Raises BrokenRow."""
    query = (
        select(events.c.session_id, events.c.tx, events.c.position)
        .where(events.c.session_id.in_(session_ids), events.c.type.in_(types))
        .order_by(events.c.session_id, events.c.seq)
    )
    places: dict[str, Position] = {}
    for session_id, tx, position in connection.execute(query):
        if not (isinstance(tx, int) and isinstance(position, int)):
            raise BrokenRow("a text or bytes where a number was stored")
        place = Position(tx, position)
        # A damaged index may lead to another session's rows.
        if place <= upto and session_id in session_ids:
            places[session_id] = max(place, places.get(session_id, place))
    return places


def horizon_of_each(connection: Connection) -> Position:
    """As `reads.horizon`, by each session's own events."""
    oldest: int = connection.execute(select(oldest_tx())).scalar_one()
    places = last_places_of_each(connection, session_ids(connection), Position(oldest, 0), SYNCED).values()
    return max([place for place in places if place.position < BEHIND], default=START)


def _parts(session_ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (session_ids[at : at + SPAN] for at in range(0, len(session_ids), SPAN))
