"""Reads how turns ended, of several sessions at once, for charts over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, or_, select

from app.store.reads import SPAN, EventRow
from app.store.schema import events

ENDS = ("TurnCommitted", "TurnRejected", "TurnAbandoned")
"""The stored types of the events that end a turn."""


BEGUN = 200
"""Conditions in one statement: SQLite allows an expression of 1000 levels."""


class EndRow(NamedTuple):
    session_id: str
    event: EventRow


def turn_ends(connection: Connection, after: Mapping[str, int], limit: int) -> list[EndRow]:
    """The events that ended turns of the sessions, each behind the event that is given with it (0: all of them), at
    most `limit` of each statement, in no order; not yet decoded."""
    found: list[EndRow] = []
    unread = [session_id for session_id, seq in after.items() if not seq]
    for at in range(0, len(unread), SPAN):
        found += _ends(connection, events.c.session_id.in_(unread[at : at + SPAN]), limit)
    begun = [and_(events.c.session_id == session_id, events.c.seq > seq) for session_id, seq in after.items() if seq]
    for at in range(0, len(begun), BEGUN):
        found += _ends(connection, or_(*begun[at : at + BEGUN]), limit)
    return found


def _ends(connection: Connection, wanted: ColumnElement[bool], limit: int) -> list[EndRow]:
    columns = (events.c.session_id, *(events.c[name] for name in EventRow._fields))
    query = select(*columns).where(wanted, events.c.type.in_(ENDS)).limit(limit)
    return [EndRow(row[0], EventRow(*row[1:])) for row in connection.execute(query)]
