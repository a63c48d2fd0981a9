"""A session as it was after one of its events, for people and for tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from app.domain.events import Recorded, TurnCommitted, UnknownEvent
from app.domain.session import Session, apply
from app.errors import InvalidRequest, NotFound, SessionNotFound, SessionUnreadable
from app.store import heads_view, reads
from app.store.engine import Database
from app.store.reads import EventRow

INLINE = 64
"""Events that are decoded and folded on the event loop: about a millisecond."""


class SessionAt(NamedTuple):
    """The state after the last of `events`, which begin a log of `last_seq` events.

    `damage` says why they end earlier than was asked for: the event behind them cannot be read.
    """

    session: Session
    events: Sequence[Recorded]
    last_seq: int
    damage: str | None

    def turn(self, number: int) -> tuple[float, TurnCommitted]:
        """When a turn was committed, and how; a discarded one, too. Raises NotFound."""
        if not 1 <= number <= len(self.session.turns):
            raise NotFound(f"session {self.session.session_id} has no turn {number} at event {self.session.version}")
        recorded = self.events[self.session.turn(number).seq - 1]
        assert isinstance(recorded.event, TurnCommitted)
        return recorded.at, recorded.event


async def session_at(database: Database, session_id: str, seq: int | None = None, *, whole: bool = False) -> SessionAt:
    """The state after event `seq`, None: the last, from the log alone: no snapshot is asked.

    Raises SessionNotFound; InvalidRequest for a `seq` that the log does not have; SessionUnreadable where not even
    its first event can be read; StoreUnavailable. `whole`: raises UnknownEvent where any event up to there is
    missing or cannot be read.
    """
    if seq is not None and seq < 1:
        raise InvalidRequest(f"event {seq}: events are numbered from 1")
    rows, last = await database.read(
        lambda connection: (
            reads.event_rows(connection, session_id, limit=seq),
            heads_view.last_seq(connection, session_id),
        ),
        session_id=session_id,
    )
    if not rows:
        raise SessionNotFound(f"session {session_id} does not exist")
    if seq is not None and seq > last:
        raise InvalidRequest(f"event {seq}: the log of session {session_id} ends with event {last}")
    if len(rows) <= INLINE:
        return _folded(session_id, rows, last, whole)
    return await asyncio.to_thread(_folded, session_id, rows, last, whole)


def _folded(session_id: str, rows: Sequence[EventRow], last: int, whole: bool) -> SessionAt:
    session: Session | None = None
    events: list[Recorded] = []
    damage = None
    for row in rows:
        try:
            (recorded,) = reads.decode_events([row])
            session = apply(session, recorded, session_id)
        except UnknownEvent as error:
            if whole:
                raise
            damage = f"event {len(events) + 1}: {error}"
            break
        events.append(recorded)
    if session is None:
        raise SessionUnreadable(f"session {session_id}: {damage}")
    return SessionAt(session, events, last, damage)
