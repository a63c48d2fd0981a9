"""Lists all sessions although a page that lists or orders them is damaged.

The log is the truth: an unreadable head is derived from it, and the order of commits from each session's own events.
This reads every session.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Integer, literal_column, select, tuple_

from app.domain.events import UnknownEvent
from app.domain.groups import Attempt
from app.store import group_reads, heads_view
from app.store import projections as heads
from app.store.broken import BrokenRow
from app.store.damaged import PageDamaged, attempt, attempt_or, rows_in_parts, session_ids, split
from app.store.dialect import AlchemyTx, oldest_tx
from app.store.heads_view import HeadRow
from app.store.reads import SYNCED, Position, last_forgotten
from app.store.schema import events

PLACES = 5000
"""Places of the order looked at in one read."""

BEHIND = 1 << 62
"""Position of the first event of which nobody knows where it stands; no writer ever comes so far."""

_rowid: ColumnElement[int] = literal_column("events.rowid", Integer)


class Heads(NamedTuple):
    """Of each session its head, stored or derived from the log; and why there is none of the others."""

    rows: dict[str, HeadRow]
    lost: dict[str, str]

    def root_of(self, row: HeadRow) -> str | None:
        """None for a session that stands for itself."""
        return row.root_id if row.root_id in self.rows else None

    def counted_in(self, row: HeadRow) -> str | None:
        """The group that the session's rollout counts in."""
        return self.rows[self.root_of(row) or row.session_id].group_id

    def of_root(self, root_id: str) -> list[HeadRow]:
        """The sessions of a root's agents and children."""
        return [row for row in self.rows.values() if self.root_of(row) == root_id]

    def is_finished(self, root: HeadRow) -> bool:
        """As `rollouts.is_finished`."""
        others = (row for row in self.of_root(root.session_id) if row.status != "erased")
        return (
            root.status == "closed"
            and root.reward is not None
            and all(row.status == "closed" and row.reward == root.reward for row in others)
        )


def all_heads(connection: Connection, ids: Sequence[str] | None = None) -> Heads:
    """None: of every session. A head that is not there, and of which there is no log, is left out."""
    every = session_ids(connection) if ids is None else ids
    found, lost = split(connection, every, _heads)
    for session_id in list(lost):
        try:
            log = attempt(connection, lambda again: heads.read_log(AlchemyTx(again), session_id))  # noqa: B023
        except (PageDamaged, UnknownEvent):
            continue
        del lost[session_id]
        if log is not None:
            row = heads.head_row(log)
            found[session_id] = HeadRow(session_id, **{name: row[column] for name, column in _FIELDS.items()})
    return Heads(found, lost)


_FIELDS = {name: column for name, column in heads_view.COLUMN_OF.items() if name != "session_id"}


def _heads(connection: Connection, ids: Sequence[str]) -> Mapping[str, HeadRow]:
    return {row.session_id: row for row in heads_view.of(connection, ids)}


def last_places(
    connection: Connection, ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, Position]:
    """Where each session's last event of these types stands, at or before `upto`.

    An event that cannot be read counts as one of them: its place is mostly known from the index over the order. Where
    it is not, the session stands behind all others, at a place that no event has.
    """

    def read(again: Connection, part: Sequence[str]) -> Mapping[str, Position]:
        return _last_places(again, part, upto, types)

    found, lost = split(connection, ids, read)
    unknown = 0
    for session_id, (place, rows) in _places_of_lost(connection, list(lost), upto, types).items():
        if place is None and rows:
            unknown += 1
            place = Position(upto.tx, BEHIND + unknown)
        if place is not None:
            found[session_id] = place
    return found


def _last_places(
    connection: Connection, ids: Sequence[str], upto: Position, types: Sequence[str]
) -> Mapping[str, Position]:
    """By the log's own key: the index over the order may be what is damaged."""
    query = (
        select(events.c.session_id, events.c.tx, events.c.position)
        .where(events.c.session_id.in_(ids), events.c.type.in_(types))
        .order_by(events.c.session_id, events.c.seq)
    )
    found: dict[str, Position] = {}
    for session_id, tx, position in connection.execute(query):
        place = _position(tx, position)
        if place <= upto and session_id in ids:
            found[session_id] = max(place, found.get(session_id, place))
    return found


def _position(tx: object, position: object) -> Position:
    """SQLite stores a value's type in its row: changed bytes may make it another. Raises BrokenRow."""
    if isinstance(tx, int) and isinstance(position, int):
        return Position(tx, position)
    raise BrokenRow("a text or bytes where a number was stored")


def _places_of_lost(
    connection: Connection, ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, tuple[Position | None, bool]]:
    """The same of sessions of which an event is lost; and is there any place of an event that is not known?"""
    found: dict[str, Position | None] = {}
    hidden: dict[int, str] = {}
    nowhere: set[str] = set()
    for session_id in ids:
        places, rowids = _readable_places(connection, session_id, types)
        found[session_id] = max((place for place in places if place <= upto), default=None)
        hidden.update(dict.fromkeys(rowids, session_id))
        if not rowids:
            nowhere.add(session_id)
    for rowid, place in _places_by_row(connection, hidden.keys()).items():
        session_id = hidden.pop(rowid)
        if place <= upto:
            found[session_id] = max(place, found[session_id] or place)
    nowhere.update(hidden.values())
    return {session_id: (place, session_id in nowhere) for session_id, place in found.items()}


def _readable_places(connection: Connection, session_id: str, types: Sequence[str]) -> tuple[list[Position], list[int]]:
    """The places of a session's events that can be read, and on SQLite the rows of the others."""
    own = events.c.session_id == session_id
    is_sqlite = connection.dialect.name == "sqlite"
    # Both are in the index over the key, so that no row is looked at.
    numbered = select(events.c.seq, *((_rowid,) if is_sqlite else ())).where(own).order_by(events.c.seq)
    rows = attempt_or(connection, lambda again: again.execute(numbered).all(), ())
    if not all(isinstance(row[0], int) for row in rows):  # changed bytes of an index may be another type's
        return [], []

    def read(again: Connection, first: int, last: int) -> list[tuple[str, Position]]:
        query = select(events.c.type, events.c.tx, events.c.position).where(own, events.c.seq.between(first, last))
        return [(row[0], _position(row[1], row[2])) for row in again.execute(query)]

    last = max((row[0] for row in rows), default=0)
    found, lost = rows_in_parts(connection, 1, last, read)
    rowids = {row[0]: row[1] for row in rows} if is_sqlite else {}
    return [place for name, place in found if name in types], [rowids[seq] for seq in lost if seq in rowids]


def _places_by_row(connection: Connection, wanted: Collection[int]) -> dict[int, Position]:
    """From SQLite's index over the order, which has them without the rows; as far as it can be read."""
    found: dict[int, Position] = {}
    rows = set(wanted)
    after = Position(0, 0)
    while rows - found.keys():
        query = (
            select(_rowid, events.c.tx, events.c.position)
            .where(tuple_(events.c.tx, events.c.position) > (after.tx, after.position))
            .order_by(events.c.tx, events.c.position)
            .limit(PLACES)
        )
        page = attempt_or(connection, lambda again: again.execute(query).all(), ())  # noqa: B023
        if not page:
            break
        numbers = [row for row in page if row[0] in rows and isinstance(row[1], int) and isinstance(row[2], int)]
        found.update((row[0], Position(row[1], row[2])) for row in numbers)
        after = Position(page[-1][1], page[-1][2])
    return found


def horizon(connection: Connection) -> Position:
    """As `reads.horizon`, from each session's own events."""
    oldest: int = connection.execute(select(oldest_tx())).scalar_one()
    places = last_places(connection, session_ids(connection), Position(oldest, 0), SYNCED)
    last = max((place for place in places.values() if place.position < BEHIND), default=Position(0, 0))
    return max(last, last_forgotten(connection))


def newest_version(connection: Connection) -> int | None:
    """As `group_reads.newest_version`, from the heads that can be read."""
    versions = (row.weight_version for row in all_heads(connection).rows.values())
    return max((version for version in versions if version is not None), default=None)


def members(connection: Connection, group_ids: Collection[str]) -> dict[str, list[HeadRow]]:
    """The sessions of some groups' rollouts, by group, whose heads can be read or derived."""
    every = all_heads(connection)
    found: dict[str, list[HeadRow]] = {group_id: [] for group_id in group_ids}
    for row in every.rows.values():
        group_id = every.counted_in(row)
        if group_id in found:
            found[group_id].append(row)
    return found


def attempts(connection: Connection, group_ids: Sequence[str]) -> dict[str, list[Attempt]]:
    """As `group_reads.attempts`."""
    every = all_heads(connection)
    found: dict[str, list[Attempt]] = {group_id: [] for group_id in group_ids}
    for row in every.rows.values():
        if row.group_id in found and every.root_of(row) is None:
            one = Attempt(row.session_id, row.attempt, row.reward, row.status, every.is_finished(row))
            found[row.group_id].append(one)
    return {group_id: group_reads.in_order(of_group) for group_id, of_group in found.items()}


def of_agents(connection: Connection, root_ids: Sequence[str]) -> dict[str, list[str]]:
    """As `group_reads.of_agents`."""
    every = all_heads(connection)
    named = ((root_id, every.of_root(root_id)) for root_id in root_ids)
    return {root_id: [row.session_id for row in rows if row.status != "open"] for root_id, rows in named if rows}


def turn_events(connection: Connection, group_ids: Sequence[str]) -> group_reads.TurnEvents:
    """As `group_reads.turn_events`, less the sessions of which an event is lost."""
    group_of = {
        row.session_id: group_id
        for group_id, rows in members(connection, group_ids).items()
        for row in rows
        if row.status == "closed"
    }
    found: group_reads.TurnEvents = {group_id: {} for group_id in group_ids}
    for session_id, rows in split(connection, list(group_of), group_reads.turn_events_of)[0].items():
        found[group_of[session_id]][session_id] = rows
    return found
