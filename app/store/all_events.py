"""The events of all sessions in the order of commits, filtered, a page at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, select, tuple_

from app.domain.patterns import MAX_INTEGER
from app.store import rollouts
from app.store.broken import BrokenRow
from app.store.damaged import attempt_or, rows_in_parts
from app.store.names import called
from app.store.reads import START, EventRow, Position, at_or_before, last_forgotten
from app.store.schema import events

WINDOW = 10_000
"""Events that one read looks through for a type that may be rare."""

SPAN = 500
"""Transactions (SQLite: positions) that one read covers around a damaged page."""


class EventFilter(msgspec.Struct, frozen=True):
    """Conditions on events; empty or None: any. A group is that of a session or of its rollout, when it is read."""

    types: tuple[str, ...] = ()
    session_id: str | None = None
    group_id: str | None = None
    name: str | None = None
    generation: int | None = None

    @property
    def is_of_few(self) -> bool:
        """Are the sessions named, so that their own keys find the events?"""
        return not (self.session_id is self.group_id is self.name is None)

    @property
    def of_name(self) -> Select[tuple[str]] | None:
        """The sessions of the name or generation."""
        return None if self.name is None and self.generation is None else called(self.name, self.generation)


class PlacedRow(NamedTuple):
    """A stored event and where it stands; `row` None: it cannot be read, nor can its session's id."""

    place: Position
    session_id: str | None
    row: EventRow | None

    @property
    def at(self) -> float | None:
        """When it was written, if that can be read."""
        return self.row.at if self.row is not None and isinstance(self.row.at, float) else None


class EventPage(NamedTuple):
    """Events in order. Up to `reached`, which may be behind the end, there are no others; `at` is when the event there
    was written, if known."""

    rows: list[PlacedRow]
    reached: Position
    at: float | None


_COLUMNS = (events.c.tx, events.c.position, events.c.session_id, *(events.c[name] for name in EventRow._fields))


def holds(connection: Connection, place: Position, at: float | None) -> bool:
    """Is the event that was written `at` that time still at this place? True where it cannot be known, as of one whose
    session may have been taken out of the log."""
    if place == START or at is None:
        return True
    is_there = attempt_or(connection, lambda again: written_at(again, place), at)
    return is_there == at or (is_there is None and place <= last_forgotten(connection))


def written_at(connection: Connection, place: Position) -> float | None:
    """When the event at this place was written; None without one, and where a damaged page has no number there."""
    query = select(events.c.at).where(events.c.tx == place.tx, events.c.position == place.position)
    position = connection.execute(query).scalar()
    return position if isinstance(position, float) else None


def page(connection: Connection, after: Position, upto: Position, wanted: EventFilter, limit: int) -> EventPage:
    """The next events in (after, upto] that match, at most `limit`; `upto` is an end of the log or before it.

    A page may be empty and yet not the last: look whether it reached `upto`.
    """
    end = upto
    if wanted.types and not wanted.is_of_few:
        end = _window(connection, after, upto) or upto
    place: Sequence[ColumnElement[int]] = (events.c.tx, events.c.position)
    if wanted.is_of_few:  # by the key of the sessions: the sum keeps SQLite from walking the order
        place = (events.c.tx + 0, events.c.position + 0)
    query = select(*_COLUMNS).where(
        tuple_(*place) > (after.tx, after.position), tuple_(*place) <= (end.tx, end.position), *_conditions(wanted)
    )
    rows = _placed(connection, query.order_by(*place).limit(limit))
    if len(rows) == limit:
        end = rows[-1].place
    if rows and rows[-1].place == end:
        return EventPage(rows, end, rows[-1].at)
    return EventPage(rows, end, written_at(connection, end))


def page_around_damage(
    connection: Connection, after: Position, upto: Position, wanted: EventFilter, limit: int
) -> EventPage:
    """As `page`, of the next SPAN transactions or positions; what cannot be read is given, whatever is asked for.

    On SQLite that is one event, on PostgreSQL one transaction's.
    """
    by_tx = connection.dialect.name == "postgresql"
    first = after.tx + (after.position == MAX_INTEGER) if by_tx else after.position + 1
    last = min(first + SPAN - 1, upto.tx if by_tx else upto.position)

    def place(number: int) -> Position:
        return Position(number, MAX_INTEGER) if by_tx else Position(0, number)

    def read(again: Connection, first: int, last: int) -> list[PlacedRow]:
        low, high = max(place(first - 1), after), min(place(last), upto)
        query = select(*_COLUMNS).where(_later_than(low), at_or_before(high))
        return _placed(again, query.order_by(events.c.tx, events.c.position))

    placed, lost = rows_in_parts(connection, first, last, read)
    placed = _matching(connection, placed, wanted)
    placed += [PlacedRow(place(number), None, None) for number in lost]
    placed.sort(key=lambda row: row.place)
    if len(placed) > limit:
        return EventPage(placed[:limit], placed[limit - 1].place, placed[limit - 1].at)
    reached = max(min(place(last), upto), placed[-1].place) if placed else min(place(last), upto)
    return EventPage(placed, reached, attempt_or(connection, lambda again: written_at(again, reached), None))


def _later_than(place: Position) -> ColumnElement[bool]:
    return tuple_(events.c.tx, events.c.position) > (place.tx, place.position)


def _window(connection: Connection, after: Position, upto: Position) -> Position | None:
    """The place WINDOW events behind `after`, from the index alone; None if there are fewer."""
    query = (
        select(events.c.tx, events.c.position)
        .where(_later_than(after), at_or_before(upto))
        .order_by(events.c.tx, events.c.position)
        .offset(WINDOW - 1)
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else Position(*row)


def _conditions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    of_type = [events.c.type.in_(wanted.types)] if wanted.types else []
    return [*of_type, *_of_sessions(wanted)]


def _of_sessions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.session_id is not None:
        conditions.append(events.c.session_id == wanted.session_id)
    if wanted.group_id is not None:
        conditions.append(events.c.session_id.in_(rollouts.members_of_group(wanted.group_id)))
    if wanted.of_name is not None:
        conditions.append(events.c.session_id.in_(wanted.of_name))
    return conditions


def _placed(connection: Connection, query: Select[Any]) -> list[PlacedRow]:
    """Raises BrokenRow for a place or an id that no version wrote."""
    rows = [PlacedRow(Position(row[0], row[1]), row[2], EventRow(*row[3:])) for row in connection.execute(query)]
    for row in rows:
        numbers = (row.place.tx, row.place.position)
        if not (all(isinstance(number, int) for number in numbers) and isinstance(row.session_id, str)):
            raise BrokenRow("a row that is no event's")
    return rows


def _matching(connection: Connection, rows: Sequence[PlacedRow], wanted: EventFilter) -> list[PlacedRow]:
    """Without SQL: the rows of sessions may be what is damaged."""
    ids: Collection[str | None] = {row.session_id for row in rows}
    if wanted.session_id is not None:
        ids = [wanted.session_id]
    if wanted.group_id is not None:
        ids = attempt_or(connection, partial(_ids, query=rollouts.members_of_group(wanted.group_id)), ids)
    if wanted.of_name is not None:
        ids = set(ids).intersection(attempt_or(connection, partial(_ids, query=wanted.of_name), ids))
    return [
        row
        for row in rows
        if row.session_id in ids and (not wanted.types or (row.row is not None and row.row.type in wanted.types))
    ]


def _ids(connection: Connection, query: Select[Any]) -> Collection[str | None]:
    return set(connection.execute(query).scalars())
