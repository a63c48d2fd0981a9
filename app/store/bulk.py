"""Reads many whole sessions as of one position in the order of commits, for exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, case, or_, select

from app.domain.events import ChunkKey, RewardAssigned, SessionClosed, SessionErased, UnknownEvent
from app.domain.fold import fold
from app.domain.groups import Root
from app.domain.upcast import decode
from app.store import rollouts
from app.store.damaged import PageDamaged, attempt, split
from app.store.reads import FRAME, SPAN, EventRow, Frames, Position, at_or_before, decode_events
from app.store.rollouts import RESTORED, REWARD
from app.store.schema import blobs, chunks, events, sessions, turns


class StoredSession(msgspec.Struct, frozen=True):
    """A session's rows: events up to the given position, content as it is now. All content is compressed frames.

    `objects` are the names of chunks' objects, until `store.objects.reader` has fetched them into `chunks`, or as they
    are, with their `urls`.

    `root` is None for a root. `damage`: why only its head is here. `rollout_rows`: how many rows its rollout has in an
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

    @property
    def rollout_id(self) -> str:
        return self.session_id if self.root is None else self.root.session_id


class ExportHead(msgspec.Struct, frozen=True):
    """A session's number of committed turns (a measure of its size), and its rollout.

    `group_id` is the group that counts it. `root_id` is the rollout's root, None for the root itself.
    """

    session_id: str
    group_id: str | None
    turns: int
    root_id: str | None = None

    @property
    def rollout(self) -> str:
        return self.root_id or self.session_id


def _heads() -> Select[Any]:
    root_id = case((rollouts.is_root(), None), else_=sessions.c.root_id)
    return select(sessions.c.session_id, rollouts.group(), sessions.c.turns, root_id)


def heads(connection: Connection, session_ids: Sequence[str]) -> dict[str, ExportHead]:
    query = _heads().where(sessions.c.session_id.in_(session_ids))
    return {row[0]: ExportHead(*row) for row in connection.execute(query)}


def read_sessions(
    connection: Connection, session_ids: Sequence[str], upto: Position, *, replay: bool, images: bool = False
) -> dict[str, StoredSession]:
    """An erased session has only its status. `replay`: read the live chunks too, `images`: the images."""
    found: dict[str, StoredSession] = {}
    for part in _parts(session_ids):
        found |= _read_part(connection, part, upto, replay=replay, images=images)
    return found


def read_each(
    connection: Connection, session_ids: Sequence[str], upto: Position, *, replay: bool, images: bool = False
) -> dict[str, StoredSession]:
    """As `read_sessions`, but a damaged page affects only the sessions on it."""
    found, lost = split(connection, session_ids, partial(_read_part, upto=upto, replay=replay, images=images))
    for session_id, why in lost.items():
        found[session_id] = _read_damaged(connection, session_id, upto, why, replay=replay, images=images)
    return found


def _read_damaged(
    connection: Connection, session_id: str, upto: Position, why: str, *, replay: bool, images: bool = False
) -> StoredSession:
    """A session that cannot be read whole. If only its head is lost, it is complete, since its log says the same."""
    stored = StoredSession(session_id, "", None, [], {}, {}, {})
    try:
        heads = attempt(connection, lambda again: _stored_heads(again, [session_id]))
    except PageDamaged:
        pass
    else:
        return msgspec.structs.replace(heads.get(session_id, stored), damage=why)
    try:
        attempt(connection, lambda again: read_content(again, {session_id: stored}, upto, replay=replay, images=images))
    except PageDamaged as error:
        return msgspec.structs.replace(stored, events=[], frames={}, blobs={}, chunks={}, objects={}, damage=str(error))
    return msgspec.structs.replace(stored, status=_status(session_id, stored.events))


def _status(session_id: str, log: Sequence[EventRow]) -> str:
    """What the log says; of one that cannot be folded, as far as the types of its events tell."""
    try:
        session = fold(session_id, decode_events(log))
    except UnknownEvent:
        session = None
    if session is not None:
        return session.status
    if _is_erased(log):
        return "erased"
    return "closed" if any(row.type == SessionClosed.__name__ for row in log) else "open"


def _is_erased(log: Sequence[EventRow]) -> bool:
    return any(row.type == SessionErased.__name__ for row in log)


def _read_part(
    connection: Connection, session_ids: Sequence[str], upto: Position, *, replay: bool, images: bool = False
) -> dict[str, StoredSession]:
    found = _stored_heads(connection, session_ids)
    live = {session_id: stored for session_id, stored in found.items() if stored.status != "erased"}
    read_content(connection, live, upto, replay=replay, images=images)
    return found


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
    connection: Connection, found: Mapping[str, StoredSession], upto: Position, *, replay: bool, images: bool = False
) -> None:
    """Read log and content of sessions that have not been erased."""
    live = list(found)
    log = _log.where(events.c.session_id.in_(live), at_or_before(upto))
    # A damaged index may lead to another session's rows.
    for row in connection.execute(log).all():
        if row[0] in found:
            found[row[0]].events.append(EventRow(*row[1:]))
    content = select(turns.c.session_id, turns.c.turn, turns.c.facts, turns.c.wire).where(turns.c.session_id.in_(live))
    for session_id, turn, facts, wire in connection.execute(content).all():
        if session_id in found:
            found[session_id].frames[turn] = (facts, wire)
    shared = select(blobs.c.session_id, blobs.c.number, blobs.c.data).where(blobs.c.session_id.in_(live))
    if not images:
        shared = shared.where(blobs.c.kind != "image")
    for session_id, number, data in connection.execute(shared).all():
        if session_id in found:
            found[session_id].blobs[number] = data
    if replay:
        rows = select(chunks.c.session_id, chunks.c.fence, chunks.c.number, *FRAME).where(
            chunks.c.session_id.in_(live), chunks.c.tombstoned_by.is_(None)
        )
        for session_id, fence, number, data, location in connection.execute(rows):
            if session_id in found and location is not None:
                found[session_id].objects[fence, number] = location
            elif session_id in found:
                found[session_id].chunks[fence, number] = data


def read_logs(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, list[EventRow]]:
    """The logs alone, without content. An erased session has none, whenever it was erased."""
    found: dict[str, list[EventRow]] = {session_id: [] for session_id in session_ids}
    erased = events.c.type == SessionErased.__name__
    for row in connection.execute(_log.where(events.c.session_id.in_(session_ids), or_(at_or_before(upto), erased))):
        if row[0] in found:
            found[row[0]].append(EventRow(*row[1:]))
    return {session_id: log for session_id, log in found.items() if not _is_erased(log)}


def group_members(connection: Connection, group_id: str) -> list[ExportHead]:
    """All sessions of a group's rollouts, erased ones too."""
    return [ExportHead(*row) for row in connection.execute(_heads().where(rollouts.in_groups([group_id])))]


def rewards(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    """Each session's reward as of a position; sessions without one are left out.

    Sessions with an unreadable reward are left out too: the export reports them.
    """
    found: dict[str, float] = {}
    for part in _parts(session_ids):
        found |= _rewards(connection, part, upto)
    return found


def rewards_of_each(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    """As `rewards`, but a damaged page affects only the sessions on it."""
    return split(connection, session_ids, partial(_rewards, upto=upto))[0]


def _rewards(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, float]:
    found: dict[str, float] = {}
    unreadable: set[str] = set()
    query = (
        select(events.c.session_id, events.c.type, events.c.version, events.c.data)
        .where(events.c.session_id.in_(session_ids), events.c.type.in_((REWARD, RESTORED)), at_or_before(upto))
        .order_by(events.c.session_id, events.c.seq)
    )
    for session_id, kind, version, data in connection.execute(query):
        if kind == RESTORED:
            found.pop(session_id, None)
            continue
        try:
            event = decode(REWARD, version, data)
        except UnknownEvent:
            unreadable.add(session_id)
            continue
        if isinstance(event, RewardAssigned) and event.turn is None:
            found[session_id] = event.reward
    return {session_id: reward for session_id, reward in found.items() if session_id not in unreadable}


def last_places(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> Mapping[str, Position]:
    """The position of each session's last event of these types, at or before `upto`."""
    found: dict[str, Position] = {}
    for part in _parts(session_ids):
        query = (
            select(events.c.session_id, events.c.tx, events.c.position)
            .where(events.c.session_id.in_(part), events.c.type.in_(types), at_or_before(upto))
            .order_by(events.c.tx, events.c.position)
        )
        for session_id, tx, position in connection.execute(query):
            found[session_id] = Position(tx, position)
    return found


def _parts(session_ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (session_ids[at : at + SPAN] for at in range(0, len(session_ids), SPAN))
