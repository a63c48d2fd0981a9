"""Reads of a name's generations: the sessions that clients call alike, one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import Connection, LargeBinary, Select, Text, cast, literal, null, select, union, union_all

from app.domain.events import Event, TurnCommitted, TurnOpened
from app.store.dialect import contains
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


def attempted(connection: Connection, name: str, mark: str, agent: str = "") -> list[str]:
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
    own = archived.alias()
    left = (
        select(own.c.session_id, archived.c.generation)
        .join_from(archived, own, own.c.session_id == archived.c.session_id + agent)
        .where(
            archived.c.name.is_not(None),
            archived.c.name == name,
            own.c.state.not_in(_STILL_HERE),
            contains(own.c.marks, literal(_packed(mark), LargeBinary)),
        )
    )
    rows = connection.execute(union(here, left))
    return [row[0] for row in sorted(rows, key=lambda row: row[1], reverse=True)]


def marks_of(log: Iterable[Event]) -> bytes:
    """What `attempted` finds a session by that has left: its keys, and the bodies of its childless turns."""
    attempts = [event for event in log if isinstance(event, (TurnOpened, TurnCommitted))]
    committed = {event.turn: event for event in attempts if isinstance(event, TurnCommitted)}
    parents = {event.parent for event in committed.values()}
    marks = {event.retry_key for event in attempts if event.retry_key is not None}
    marks |= {event.body_hash for event in committed.values() if event.turn not in parents}
    return b"".join(map(_packed, sorted(marks)))


def _packed(mark: str) -> bytes:
    return hashlib.sha256(mark.encode()).digest()[:8]
