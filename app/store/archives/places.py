"""Which sessions are archived, and where. An archived session has no rows in the tables of its log and content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, select, tuple_

from app.store.archives.format import Place
from app.store.reads import Position
from app.store.schema import archived_sessions, archives, sessions

_archived = select(archived_sessions.c.session_id, archives.c.name, archived_sessions.c.row_group).join_from(
    archived_sessions, archives, archives.c.id == archived_sessions.c.archive_id
)


class Archived(NamedTuple):
    """An archived session: where it is, and its head's columns."""

    place: Place
    head: dict[str, Any]


def archived(connection: Connection, session_id: str) -> Archived | None:
    """None for a session whose rows are in the database, or that is nowhere."""
    place = places_of(connection, [session_id]).get(session_id)
    if place is None:
        return None
    head = connection.execute(select(sessions).where(sessions.c.session_id == session_id)).one()
    return Archived(place, dict(head._mapping))


def places_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, Place]:
    """Of those of the sessions that are archived; at most `reads.SPAN` of them at once."""
    found = connection.execute(_archived.where(archived_sessions.c.session_id.in_(session_ids)))
    return {row[0]: Place(row[1], row[2]) for row in found}


def exported_places(connection: Connection, session_ids: Sequence[str], upto: Position) -> dict[str, Position]:
    """The place in an export of those of the sessions that are archived, if it is at or before `upto`."""
    place = (archived_sessions.c.exported_tx, archived_sessions.c.exported_position)
    query = select(archived_sessions.c.session_id, *place).where(
        archived_sessions.c.session_id.in_(session_ids),
        archived_sessions.c.archive_id.is_not(None),
        tuple_(*place) <= (upto.tx, upto.position),
    )
    return {row[0]: Position(row[1], row[2]) for row in connection.execute(query)}
