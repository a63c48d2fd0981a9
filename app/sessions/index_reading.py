"""Reads what the search index is made of: events of the log of all sessions, and the content that they name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from app.domain.events import (
    BlobRef,
    Recorded,
    RolledBack,
    SessionCreated,
    SessionRestored,
    TurnCommitted,
    TurnRejected,
    UnknownEvent,
)
from app.errors import SessionUnreadable, StoreDamaged
from app.sessions.log_position import LogPosition
from app.store import all_events, reads
from app.store.all_events import EventFilter
from app.store.ports import Database
from app.store.reads import Connection, EventRow, Position
from app.store.search import content
from app.store.search.content import Key
from workers.codec import CorruptContent

TYPES = tuple(one.__name__ for one in (SessionCreated, TurnCommitted, TurnRejected, RolledBack, SessionRestored))

PAGE = 512
"""Events that are read at once."""

CONTENT_BYTES = 4 << 20
"""Bytes of stored content, compressed, that are read at once; one turn may have more."""

UNKNOWN_BYTES = CONTENT_BYTES // 64
"""What is assumed of content that is not in the database."""

Events = Sequence[tuple[str, Recorded]]
"""Events of the log with their sessions."""


class Content(NamedTuple):
    """Events, and the content that they name."""

    events: Events
    wires: Mapping[Key, bytes | None]
    metadata: Mapping[str, bytes]


class IndexReader:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def events(self, position: LogPosition, upto: Position) -> tuple[Events, LogPosition] | None:
        """The next events that can be read, and how far they reach; None if the log does not have the position."""

        def read(
            connection: Connection, *, around_damage: bool
        ) -> tuple[list[tuple[str, EventRow]], LogPosition] | None:
            held = reads.log_epoch(connection) == position.epoch
            if not (held and all_events.holds(connection, position.place, position.at)):
                return None
            pages = all_events.page_around_damage if around_damage else all_events.page
            found = pages(connection, position.place, upto, EventFilter(), PAGE)
            rows = [
                (row.session_id, row.row)
                for row in found.rows
                if row.session_id is not None and row.row is not None and row.row.type in TYPES
            ]
            return rows, LogPosition(position.epoch, found.reached, found.at)

        found = await self._database.read(partial(read, around_damage=False), or_else=partial(read, around_damage=True))
        return None if found is None else (_decoded(found[0]), found[1])

    async def groups(self, events: Events) -> list[Events]:
        """The events in order, as many at once as have CONTENT_BYTES of content; at least one, maybe empty, group."""
        turns, blobs = _named(events)

        def read(connection: Connection) -> tuple[Mapping[Key, int], Mapping[Key, int]]:
            return content.wire_sizes(connection, turns), content.blob_sizes(connection, blobs)

        of_turns, of_blobs = await self._database.read(read, or_else=lambda _: ({}, {}))
        groups: list[list[tuple[str, Recorded]]] = [[]]
        size = 0
        for one in events:
            named = _named([one])
            own = sum(of_turns.get(key, UNKNOWN_BYTES) for key in named[0])
            own += sum(of_blobs.get(key, UNKNOWN_BYTES) for key in named[1])
            if size and size + own > CONTENT_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(one)
            size += own
        return [*groups]

    async def content(self, events: Events) -> Content:
        """What cannot be read is left out: a damaged page, an erased session."""
        turns, blobs = _named(events)
        wires: dict[Key, bytes | None] = {}
        metadata: dict[str, bytes] = {}
        with contextlib.suppress(StoreDamaged, CorruptContent):
            wires |= await self._database.read(partial(content.wires, wanted=turns))
            raw = await self._database.read(partial(content.raw_blobs, wanted=blobs)) if blobs else {}
            metadata |= {session_id: one for (session_id, _), one in raw.items()}
        missing = {key for key in turns if key not in wires}, {key for key in blobs if key[0] not in metadata}
        for session_id in sorted({key[0] for keys in missing for key in keys}):
            own_turns, own_blobs = ([number for of, number in keys if of == session_id] for keys in missing)
            try:
                frames, found = await self._database.read(
                    partial(_content, session_id=session_id, turns=own_turns, blobs=own_blobs), session_id=session_id
                )
            except (SessionUnreadable, CorruptContent):
                continue
            wires |= {(session_id, turn): wire for turn, wire in frames.items()}
            metadata |= dict.fromkeys([session_id], *found.values()) if found else {}
        return Content(events, wires, metadata)


def _named(events: Events) -> tuple[set[Key], set[Key]]:
    """The turns and the blobs whose content is to be indexed."""
    turns: set[Key] = set()
    blobs: set[Key] = set()
    for session_id, recorded in events:
        match recorded.event:
            case TurnCommitted(turn=turn) as event if event.body_hash:  # a copy of a fork has none
                turns.add((session_id, turn))
            case SessionCreated(metadata=BlobRef(number=number)):
                blobs.add((session_id, number))
    return turns, blobs


def _decoded(rows: Sequence[tuple[str, EventRow]]) -> list[tuple[str, Recorded]]:
    """The events that can be read."""
    found: list[tuple[str, Recorded]] = []
    for session_id, row in rows:
        try:
            [recorded] = reads.decode_events([row])
        except UnknownEvent:
            continue
        found.append((session_id, recorded))
    return found


def _content(
    connection: Connection, session_id: str, turns: Sequence[int], blobs: Sequence[int]
) -> tuple[dict[int, bytes | None], dict[int, bytes]]:
    """Wire frames and blobs of one session, wherever it is. Raises CorruptContent."""
    frames = reads.load_frames(connection, session_id, turns, facts=False) if turns else {}
    return {turn: wire for turn, (_, wire) in frames.items()}, reads.load_blobs(connection, session_id, blobs)
