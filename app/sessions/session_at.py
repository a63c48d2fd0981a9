"""A session's state after one of its events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.domain.events import AnnotationWritten, Recorded, TurnCommitted, UnknownEvent
from app.domain.session import Annotation, Session, states
from app.errors import InvalidRequest, NotFound, SessionNotFound
from app.store.ports import Connection, Database, of_session
from app.store.sessions import EventRow, decode_events, event_rows, last_seq

INLINE = 64
"""Up to this many events are decoded and folded on the event loop, about 1 ms."""


class SessionAt(NamedTuple):
    """The state after the last of `events`, the beginning of a log of `last_seq` events.

    `damage` is why they end before the requested event: the next one cannot be read.
    """

    session: Session
    events: Sequence[Recorded]
    last_seq: int
    damage: str | None

    def turn(self, number: int) -> tuple[float, TurnCommitted]:
        """When turn `number` was committed, and its event; rolled-back turns included. Raises NotFound."""
        if number not in self.session.turns:
            raise NotFound(f"session {self.session.session_id} has no turn {number} at event {self.session.version}")
        recorded = self.events[self.session.turn(number).seq - 1]
        assert isinstance(recorded.event, TurnCommitted)
        return recorded.at, recorded.event

    def said_of(self, turn: int, most: int | None = None) -> list[dict[str, Any]]:
        """The annotations of a turn (0: of the session) with their values, if these have at most `most` bytes; of a
        column what it is, not its numbers."""
        said: list[dict[str, Any]] = []
        for name, one in sorted(self.session.annotations.get(turn, {}).items()):
            said.append(described(name, one))
            if one.column is None and (most is None or one.size <= most):
                event = self.events[one.seq - 1].event
                assert isinstance(event, AnnotationWritten)
                said[-1]["value"] = event.value
        return said


def described(name: str, annotation: Annotation) -> dict[str, Any]:
    """An annotation without its content."""
    fields = {"name": name, "seq": annotation.seq, "at": annotation.at, "writer": annotation.writer}
    column = annotation.column
    of_column = () if column is None else ("dtype", "over", "length", "absent")
    return {**fields, "size": annotation.size, **{part: getattr(column, part) for part in of_column}}


async def session_at(database: Database, session_id: str, seq: int | None = None, *, whole: bool = False) -> SessionAt:
    """The state after event `seq` (None: the last), folded from the log without a snapshot.

    Raises SessionNotFound; InvalidRequest if the log has no event `seq`; StoreUnavailable; SessionUnreadable if its
    first event cannot be read, or with `whole` any event up to `seq`.
    """
    if seq is not None and seq < 1:
        raise InvalidRequest(f"event {seq}: events are numbered from 1")
    rows, last = await of_session(database, session_id, _rows, seq)
    if not rows:
        raise SessionNotFound.of(session_id)
    if seq is not None and seq > last:
        raise InvalidRequest(f"event {seq}: the log of session {session_id} ends with event {last}")
    session, events, damage = (
        _folded(session_id, rows) if len(rows) <= INLINE else await asyncio.to_thread(_folded, session_id, rows)
    )
    if session is None or (whole and damage is not None):
        raise database.unreadable.error(session_id, damage) from damage
    return SessionAt(session, events, last, None if damage is None else str(damage))


def _rows(connection: Connection, session_id: str, seq: int | None) -> tuple[list[EventRow], int]:
    return event_rows(connection, session_id, limit=seq), last_seq(connection, session_id)


def _folded(session_id: str, rows: Sequence[EventRow]) -> tuple[Session | None, list[Recorded], UnknownEvent | None]:
    """The state after the events that can be read, these, and why the next one cannot."""
    session: Session | None = None
    events: list[Recorded] = []
    damage: UnknownEvent | None = None
    try:
        for row in rows:
            events += decode_events([row])
    except UnknownEvent as error:
        damage = UnknownEvent(f"event {len(events) + 1}: {error}")
    try:
        for state in states(session_id, events):
            session = state
    except UnknownEvent as error:
        del events[0 if session is None else session.version :]
        damage = UnknownEvent(f"event {len(events) + 1}: {error}")
    return session, events, damage
