"""The feed: events of all sessions in the order of commits, its end, and what readers resume by.

A place is (`tx`, `position`). A reader stays below the oldest transaction that still runs, so that no event appears
behind it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, bindparam, exists, func, insert, select, tuple_, update

from app.domain.events import EXPORTED
from app.domain.patterns import ALL_RUNS, MAX_INTEGER
from app.store.damage import SPAN, BrokenRow, PageDamaged, attempt, attempt_or, split
from app.store.dialect import Tx, log_synced, log_written, next_tx, oldest_tx, sync_delay_s
from app.store.ports import Database
from app.store.schema import events, store_meta
from app.store.selection import GroupFilter, chosen
from app.store.sessions import EventRow, called, listed

WINDOW = 10_000
"""Events that one read looks through for a type that may be rare."""

FEW = 1000
"""Sessions whose events are found by their keys: each page looks at all of them. Of more, the order is walked."""

BEHIND = 1 << 62
"""Position of the first session of which nobody knows where it stands; no writer ever comes so far."""

SETTLE_S = 1.0
"""How long to wait for running transactions; a longer one hides commits made meanwhile."""

PAUSE_S = 0.01

SYNCED = (*EXPORTED, "SessionCreated")
"""Types of events that are on disk before anyone sees them. Claims are not: a crash or failover of the database may
undo them and reuse their positions."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A place in the order of commits."""

    tx: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
    position: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]


START = Position(0, 0)
"""Before everything."""

END = Position(MAX_INTEGER, MAX_INTEGER)
"""Behind everything."""


_IN_ORDER: Sequence[ColumnElement[int]] = (events.c.tx, events.c.position)
_BY_KEY: Sequence[ColumnElement[int]] = (events.c.tx + 0, events.c.position + 0)
"""The same place, for events of few sessions: the sum keeps SQLite from walking the order instead of their key."""


def at_or_before(place: Position) -> ColumnElement[bool]:
    """Condition on events: at or before `place` in the order of commits."""
    return tuple_(*_IN_ORDER) <= (place.tx, place.position)


def _later_than(place: Position) -> ColumnElement[bool]:
    return tuple_(*_IN_ORDER) > (place.tx, place.position)


def _place_of(tx: int, position: int) -> Position:
    """Raises BrokenRow for a place that no version wrote."""
    if not (isinstance(tx, int) and isinstance(position, int)):
        raise BrokenRow("a text or bytes where a number was stored")
    return Position(tx, position)


def epoch(connection: Connection) -> str:
    """The store's epoch: the restore of a backup or of all runs raises it, and with it ends every export cursor."""
    value: str = connection.execute(select(store_meta.c.value).where(store_meta.c.key == "epoch")).scalar_one()
    return value


FIRST = "1"
"""The epoch before the first restore."""


def of_run(run: str) -> str:
    """The key in `store_meta` of what a restore of this run alone, or its erasure, raises; ALL_RUNS: a restore of any
    run alone."""
    return f"epoch:{run}"


def cursor_epoch(connection: Connection, run: str | None) -> str:
    """What the cursor of an export of a run names, or (None) of one of all runs: a restore that touches it raises
    it."""
    own = of_run(ALL_RUNS if run is None else run)
    query = select(store_meta.c.key, store_meta.c.value).where(store_meta.c.key.in_(("epoch", own)))
    meta = {row.key: row.value for row in connection.execute(query)}
    return f"{meta['epoch']}.{meta[own]}" if own in meta else meta["epoch"]


def number_of_restores(connection: Connection, run: str) -> int:
    """Counts from 1, and grows with each restore of the run alone and its erasure; ALL_RUNS: with one of all runs."""
    key = "epoch" if run == ALL_RUNS else of_run(run)
    value: str = connection.execute(select(store_meta.c.value).where(store_meta.c.key == key)).scalar() or FIRST
    return int(value.partition("-")[0])


def next_epoch(epoch: str) -> str:
    """The next number, and a random part that no other store with the same past has."""
    return f"{int(epoch.partition('-')[0]) + 1}-{secrets.token_hex(4)}"


_meta = select(store_meta.c.value).where(store_meta.c.key == bindparam("of"))
_set_meta = update(store_meta).where(store_meta.c.key == bindparam("of")).values(value=bindparam("to"))
_add_meta = insert(store_meta)


def raise_epochs(tx: Tx) -> None:
    """End the cursors of every export; the log's epoch stays."""
    epoch, of_log = (tx.one(_meta, {"of": key}) for key in ("epoch", "log_epoch"))
    assert epoch is not None
    raised = next_epoch(epoch[0])
    _put(tx, "epoch", raised)
    _put(tx, "log_epoch", f"{raised}={epoch_of_log(epoch[0], None if of_log is None else of_log[0])}")


def raise_epoch(tx: Tx, run: str) -> None:
    """End the cursors of exports of this run alone, or (ALL_RUNS) of those of all runs."""
    key = of_run(run)
    row = tx.one(_meta, {"of": key})
    _put(tx, key, next_epoch(FIRST if row is None else row[0]))


def _put(tx: Tx, key: str, value: str) -> None:
    if not tx.run(_set_meta, {"of": key, "to": value}):
        tx.insert(_add_meta, [{"key": key, "value": value}])


def log_epoch(connection: Connection) -> str:
    """The log's epoch, which positions name: only the restore of a backup raises it, not that of a checkpoint."""
    named = store_meta.c.key.in_(("epoch", "log_epoch"))
    meta = {row.key: row.value for row in connection.execute(select(store_meta).where(named))}
    return epoch_of_log(meta["epoch"], meta.get("log_epoch"))


def epoch_of_log(epoch: str, log_epoch: str | None) -> str:
    """`log_epoch` is that row's value; it counts while it names the store's epoch."""
    named, _, kept = (log_epoch or "").partition("=")
    return kept if named == epoch else epoch


# Where the order ends.


def end(connection: Connection, types: Sequence[str] = (), among: Sequence[str] | None = None) -> Position:
    """The place of the last event (of these types; of these sessions) below which nothing can appear any more, except
    after a database crash."""
    tx, position = _IN_ORDER if among is None else _BY_KEY
    query = select(tx, position).where(events.c.tx < oldest_tx()).order_by(tx.desc(), position.desc()).limit(1)
    if types:
        query = query.where(events.c.type.in_(types))
    if among is not None:
        query = query.where(events.c.session_id.in_(among))
    row = connection.execute(query).first()
    return max(START if row is None else _place_of(*row), last_forgotten(connection))


def horizon(connection: Connection) -> Position:
    """The last place below which nothing can appear any more, even after a crash, of what can be read."""
    return max(listed(connection, lambda again, among: [end(again, SYNCED, among)]), default=START)


FORGOTTEN = "forgotten"
"""The key in `store_meta` of the last place of an event that was taken out of the log with its whole session."""


def last_forgotten(connection: Connection) -> Position:
    """The last place of an event that is not in the log any more: the log ends there or later."""
    return forgotten_place(connection.execute(select_forgotten).scalar())


def forgotten_place(value: str | None) -> Position:
    """`value` is that row's."""
    if value is None:
        return START
    tx, _, position = value.partition(".")
    return Position(int(tx), int(position))


select_forgotten = select(store_meta.c.value).where(store_meta.c.key == FORGOTTEN)


class Synced(NamedTuple):
    """How far PostgreSQL's log of changes is written and on the disk, in bytes, and within how many seconds of a commit
    the rest is. All 0 on SQLite."""

    written: int
    synced: int
    delay_s: float


def synced(connection: Connection) -> Synced:
    """Read it after `end`: with the log on the disk up to `written`, no crash of PostgreSQL undoes an event up to that
    end."""
    return Synced(*connection.execute(select(log_written(), log_synced(), sync_delay_s())).one())


async def wait_for_horizon(database: Database) -> None:
    """Wait until the order of commits has all that are acknowledged, but no longer than SETTLE_S.

    A reader stays below the oldest running transaction of PostgreSQL, so it may miss newer commits of others. SQLite
    has one writer. Raises StoreUnavailable.
    """
    if database.is_sqlite:
        return

    def look(connection: Connection) -> tuple[int, int]:
        oldest, following = connection.execute(select(oldest_tx(), next_tx())).one()
        return oldest, following

    clock = asyncio.get_running_loop().time
    deadline = clock() + SETTLE_S
    oldest, present = await database.read(look)
    while oldest < present and clock() < deadline:
        await asyncio.sleep(PAUSE_S)
        oldest, _ = await database.read(look)


# Events in order.


class EventFilter(GroupFilter, frozen=True):
    """Conditions on events; empty or None: any. A group is that of a session or of its rollout, when it is read."""

    types: tuple[str, ...] = ()
    session_id: str | None = None
    name: str | None = None
    generation: int | None = None

    @property
    def of_sessions(self) -> list[Select[tuple[str]]]:
        """The sessions of the run and groups, and those of the name or generation; without one for any."""
        found = [] if self.run is None and not self.of_groups else [chosen(self)]
        if self.name is not None or self.generation is not None:
            found.append(called(self.name, self.generation))
        return found


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


def changed_sessions(
    connection: Connection, wanted: EventFilter, *, after: Position, upto: Position, limit: int
) -> list[tuple[str, Position]]:
    """Sessions in the order of their last event of the wanted types in (after, upto], each once, with that place."""
    later = events.alias("later")
    newer = exists().where(
        later.c.session_id == events.c.session_id,
        later.c.seq > events.c.seq,
        later.c.type.in_(wanted.types),
        tuple_(later.c.tx, later.c.position) <= (upto.tx, upto.position),
    )
    query = (
        select(events.c.session_id, *_IN_ORDER)
        .where(
            *_conditions(wanted, by_key=_is_of_few(connection, wanted)), ~newer, _later_than(after), at_or_before(upto)
        )
        .order_by(*_IN_ORDER)
        .limit(limit)
    )
    return [(row[0], Position(row[1], row[2])) for row in connection.execute(query)]


def last_places(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, Position]:
    """The place of each session's last event of these types, at or before `upto`, by the sessions' own events.

    A session with an event that cannot be read stands behind all others, at a place that no event has.
    """
    places, lost = split(connection, session_ids, partial(_last_places, upto=upto, types=types))
    return places | {name: Position(upto.tx, BEHIND + at) for at, name in enumerate(sorted(lost), start=1)}


def _last_places(
    connection: Connection, session_ids: Sequence[str], upto: Position, types: Sequence[str]
) -> dict[str, Position]:
    query = (
        select(events.c.session_id, *_IN_ORDER)
        .where(events.c.session_id.in_(session_ids), events.c.type.in_(types))
        .order_by(events.c.session_id, events.c.seq)
    )
    places: dict[str, Position] = {}
    for session_id, tx, position in connection.execute(query):
        place = _place_of(tx, position)
        # A damaged index may lead to another session's rows.
        if place <= upto and session_id in session_ids:
            places[session_id] = max(place, places.get(session_id, place))
    return places


_COLUMNS = (*_IN_ORDER, events.c.session_id, *(events.c[name] for name in EventRow._fields))


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

    A page may be empty and yet not the last: look whether it reached `upto`. Where a damaged page is in the way, what
    cannot be read is given too, whatever is asked for: on SQLite that is one event, on PostgreSQL one transaction's.
    """
    try:
        return attempt(connection, lambda again: _page(again, after, upto, wanted, limit))
    except PageDamaged:
        return _page_around_damage(connection, after, upto, wanted, limit)


def _page(connection: Connection, after: Position, upto: Position, wanted: EventFilter, limit: int) -> EventPage:
    end, is_of_few = upto, _is_of_few(connection, wanted)
    if (wanted.types or wanted.of_sessions) and not is_of_few:
        end = _window(connection, after, upto) or upto
    place = _BY_KEY if is_of_few else _IN_ORDER
    query = select(*_COLUMNS).where(
        tuple_(*place) > (after.tx, after.position),
        tuple_(*place) <= (end.tx, end.position),
        *_conditions(wanted, by_key=is_of_few),
    )
    rows = _placed(connection, query.order_by(*place).limit(limit))
    if len(rows) == limit:
        end = rows[-1].place
    if rows and rows[-1].place == end:
        return EventPage(rows, end, rows[-1].at)
    return EventPage(rows, end, written_at(connection, end))


def _page_around_damage(
    connection: Connection, after: Position, upto: Position, wanted: EventFilter, limit: int
) -> EventPage:
    """As `page`, of the next SPAN transactions (SQLite: positions)."""
    by_tx = connection.dialect.name == "postgresql"
    first = after.tx + (after.position == MAX_INTEGER) if by_tx else after.position + 1
    last = min(first + SPAN - 1, upto.tx if by_tx else upto.position)

    def place(number: int) -> Position:
        return Position(number, MAX_INTEGER) if by_tx else Position(0, number)

    def read(again: Connection, numbers: Sequence[int]) -> dict[int, list[PlacedRow]]:
        low, high = max(place(numbers[0] - 1), after), min(place(numbers[-1]), upto)
        query = select(*_COLUMNS).where(_later_than(low), at_or_before(high))
        return {numbers[0]: _placed(again, query.order_by(*_IN_ORDER))}

    parts, lost = split(connection, range(first, last + 1), read)
    placed = _matching(connection, list(chain.from_iterable(parts.values())), wanted)
    placed += [PlacedRow(place(number), None, None) for number in lost]
    placed.sort(key=lambda row: row.place)
    if len(placed) > limit:
        return EventPage(placed[:limit], placed[limit - 1].place, placed[limit - 1].at)
    reached = max(min(place(last), upto), placed[-1].place) if placed else min(place(last), upto)
    return EventPage(placed, reached, attempt_or(connection, lambda again: written_at(again, reached), None))


def _window(connection: Connection, after: Position, upto: Position) -> Position | None:
    """The place WINDOW events behind `after`, from the index alone; None if there are fewer."""
    query = (
        select(*_IN_ORDER)
        .where(_later_than(after), at_or_before(upto))
        .order_by(*_IN_ORDER)
        .offset(WINDOW - 1)
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else _place_of(row[0], row[1])


def _is_of_few(connection: Connection, wanted: EventFilter) -> bool:
    """Are the sessions named, or so few, that their own keys find the events?"""
    if wanted.session_id is not None or wanted.group_id or wanted.name is not None:
        return True
    some = (found.limit(FEW + 1).subquery() for found in wanted.of_sessions)
    counts = [connection.execute(select(func.count()).select_from(one)).scalar_one() for one in some]
    return min(counts, default=FEW + 1) <= FEW


def _conditions(wanted: EventFilter, *, by_key: bool) -> list[ColumnElement[bool]]:
    """`by_key` False: the order of commits is walked, not the keys of the sessions."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.types:
        conditions.append(events.c.type.in_(wanted.types))
    if wanted.session_id is not None:
        conditions.append(events.c.session_id == wanted.session_id)
    session_id = events.c.session_id if by_key else events.c.session_id.concat("")
    conditions += [session_id.in_(found) for found in wanted.of_sessions]
    return conditions


def _placed(connection: Connection, query: Select[Any]) -> list[PlacedRow]:
    """Raises BrokenRow for a place or an id that no version wrote."""
    rows = [PlacedRow(_place_of(row[0], row[1]), row[2], EventRow(*row[3:])) for row in connection.execute(query)]
    if not all(isinstance(row.session_id, str) for row in rows):
        raise BrokenRow("a row that is not an event")
    return rows


def _matching(connection: Connection, rows: Sequence[PlacedRow], wanted: EventFilter) -> list[PlacedRow]:
    """Without SQL: the rows of sessions may be what is damaged."""
    ids: Collection[str | None] = {row.session_id for row in rows}
    if wanted.session_id is not None:
        ids = [wanted.session_id]
    for found in wanted.of_sessions:
        # Where it cannot be known whose a session is, a run is told nothing.
        unknown = ids if wanted.run is None else ()
        ids = set(ids).intersection(attempt_or(connection, partial(_ids, query=found), unknown))
    return [
        row
        for row in rows
        if row.session_id in ids and (not wanted.types or (row.row is not None and row.row.type in wanted.types))
    ]


def _ids(connection: Connection, query: Select[Any]) -> Collection[str | None]:
    return set(connection.execute(query).scalars())
