"""Reads of a name's generations: the sessions that clients call alike, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Boolean, Connection, LargeBinary, Select, cast, literal, null, select, union, union_all

from app.store.dialect import Row, StorePoints, contains
from app.store.schema import events, sessions

_ATTEMPTS = ("TurnOpened", "TurnCommitted")


class Generation(NamedTuple):
    """A session of a name. `frees_name` is None unless it is archived: else its log says so."""

    session_id: str
    number: int
    status: str
    frees_name: bool | None


def generations(connection: Connection, points: StorePoints, name: str) -> list[Generation]:
    """The sessions that have had this name, the newest first. In one statement: on PostgreSQL one that leaves or comes
    back between two would be in neither."""
    here = select(sessions.c.session_id, sessions.c.generation, sessions.c.status, cast(null(), Boolean)).where(
        sessions.c.name.is_not(None), sessions.c.name == name
    )
    rows = connection.execute(union_all(here, *(departed.generations(name) for departed in points.departed)))
    return sorted((Generation(*row) for row in rows), key=lambda one: one.number, reverse=True)


def called(name: str | None, generation: int | None) -> Select[tuple[str]]:
    """The ids of the sessions of a name, of a generation, or of both."""
    query = select(sessions.c.session_id).where(sessions.c.name.is_not(None))
    if name is not None:
        query = query.where(sessions.c.name == name)
    return query if generation is None else query.where(sessions.c.generation == generation)


def attempted(connection: Connection, points: StorePoints, name: str, mark: str, agent: str = "") -> list[str]:
    """The generations of a name, the newest first, that have a turn whose event holds `mark`: the hash of a key or of a
    request's body. With `agent`, what the id of an agent's session has behind its root's, that agent's sessions.

    There is no index of marks: only a marked request that the newest generation does not know asks.
    """
    here = (
        select(events.c.session_id, sessions.c.generation)
        .join_from(sessions, events, events.c.session_id == sessions.c.session_id + agent)
        .where(
            sessions.c.name.is_not(None),
            sessions.c.name == name,
            sessions.c.status != "undone",
            events.c.type.in_(_ATTEMPTS),
            contains(events.c.data, literal(mark.encode(), LargeBinary)),
        )
    )
    left = (departed.attempted(name, mark, agent) for departed in points.departed)
    rows: Sequence[Row] = connection.execute(union(here, *left)).all()
    return [row[0] for row in sorted(rows, key=lambda row: row[1], reverse=True)]
