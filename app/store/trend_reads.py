"""Reads how turns ended, of several sessions at once, for charts over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, select

from app.store.reads import SPAN, EventRow
from app.store.schema import events

ENDS = ("TurnCommitted", "TurnRejected", "TurnAbandoned")
"""The stored types of the events that end a turn."""


class EndRow(NamedTuple):
    session_id: str
    event: EventRow


def turn_ends(connection: Connection, session_ids: Sequence[str], limit: int) -> list[EndRow]:
    """The events that ended the sessions' turns, at most `limit` of each statement, in no order; not yet decoded."""
    found: list[EndRow] = []
    for at in range(0, len(session_ids), SPAN):
        query = (
            select(events.c.session_id, *(events.c[name] for name in EventRow._fields))
            .where(events.c.session_id.in_(session_ids[at : at + SPAN]), events.c.type.in_(ENDS))
            .limit(limit)
        )
        found += [EndRow(row[0], EventRow(*row[1:])) for row in connection.execute(query)]
    return found
