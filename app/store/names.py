"""Reads of a name's generations: the sessions that clients call alike, one after another."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, LargeBinary, Select, Text, cast, literal, null, select, union_all

from app.store.dialect import contains_bytes
from app.store.schema import archived, events, sessions

_ATTEMPTS = ("TurnOpened", "TurnCommitted")
_STILL_HERE = ("writing", "copy")
"""States of a row of `archived` whose session is in the database."""


class Generation(NamedTuple):
    """A session of a name. `frees_name` is None unless it is archived: else its log says so."""

    session_id: str
    number: int
    status: str
    frees_name: bool | None


def generations(connection: Connection, name: str) -> list[Generation]:
    """The sessions that have had this name, the newest first."""
    here = select(
        sessions.c.session_id, sessions.c.generation, sessions.c.status, cast(null(), archived.c.frees_name.type)
    )
    left = select(archived.c.session_id, archived.c.generation, literal("archived", Text), archived.c.frees_name)
    rows = connection.execute(
        union_all(
            here.where(sessions.c.name.is_not(None), sessions.c.name == name),
            left.where(archived.c.name.is_not(None), archived.c.name == name, archived.c.state.not_in(_STILL_HERE)),
        )
    )
    return sorted((Generation(*row) for row in rows), key=lambda one: one.number, reverse=True)


def called(name: str | None, generation: int | None) -> Select[tuple[str]]:
    """The ids of the sessions of a name, of a generation, or of both."""
    query = select(sessions.c.session_id).where(sessions.c.name.is_not(None))
    if name is not None:
        query = query.where(sessions.c.name == name)
    return query if generation is None else query.where(sessions.c.generation == generation)


def attempted(connection: Connection, name: str, mark: str) -> list[str]:
    """The generations of a name, the newest first, that have a turn whose event holds `mark`: the hash of a key or of a
    request's body. There is no index of marks: only a marked request that the newest generation does not know asks."""
    has_mark = contains_bytes(events.c.data, literal(mark.encode(), LargeBinary))
    query = (
        select(sessions.c.session_id, sessions.c.generation)
        .join(events, events.c.session_id == sessions.c.session_id)
        .where(
            sessions.c.name.is_not(None),
            sessions.c.name == name,
            sessions.c.status != "undone",
            events.c.type.in_(_ATTEMPTS),
            has_mark,
        )
        .distinct()
        .order_by(sessions.c.generation.desc())
    )
    return [row[0] for row in connection.execute(query)]
