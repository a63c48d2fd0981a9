"""The fleet's log: appended by a process that knows its newest event, read by every process a few times a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Connection, bindparam, func, insert, literal, select

from app.domain.events import UnknownEvent, decode, encode, name_of
from app.domain.fleet import TYPES, AdapterPaused, FleetEvent, FleetPaused, Placed, PublicUrlSet
from app.errors import StoreUnavailable
from app.store.dialect import Row, Tx, now
from app.store.log import BaseOperation
from app.store.schema import fleet_events, open_turns, sessions

_ROW = (fleet_events.c.seq, fleet_events.c.at, fleet_events.c.type, fleet_events.c.version, fleet_events.c.data)
_this_moment = select(now().label("now")).subquery("this_moment")
SINCE = (
    select(_this_moment.c.now, *_ROW)
    .select_from(_this_moment.outerjoin(fleet_events, fleet_events.c.seq >= bindparam("known", type_=BigInteger)))
    .order_by(fleet_events.c.seq)
)
"""Event `known` and all later ones, each with the database's clock; one row without an event if there are none."""
_newest = select(func.max(fleet_events.c.seq)).group_by(fleet_events.c.key)
_state = select(*_ROW).where(fleet_events.c.seq.in_(_newest)).order_by(fleet_events.c.seq)
_last = select(func.max(fleet_events.c.seq), now())
_insert = insert(fleet_events)
_clock = select(literal(0), now())
_with_run = open_turns.join(sessions, sessions.c.session_id == open_turns.c.session_id)
_claims = select(open_turns.c.session_id, open_turns.c.fence, open_turns.c.incarnation, sessions.c.run).select_from(
    _with_run
)
_counts = (
    select(sessions.c.run, open_turns.c.adapter, func.count())
    .select_from(_with_run)
    .group_by(sessions.c.run, open_turns.c.adapter)
)


class FleetRead(msgspec.Struct, frozen=True):
    """Events in order, and the database's clock at the read, in seconds since the epoch."""

    events: list[Placed]
    now: float


def state(connection: Connection) -> FleetRead:
    """The last event of each key, which is the whole state. Raises StoreUnavailable if one cannot be read."""
    return FleetRead(_decoded(connection.execute(_state)), clock(connection))


def seen(rows: Sequence[Row]) -> FleetRead:
    """The result of `SINCE`. Raises as `state`."""
    return FleetRead(_decoded(row[1:] for row in rows if row[1] is not None), float(rows[0][0]))


def later(connection: Connection, kind: type[FleetEvent], after: int, limit: int) -> list[Placed]:
    """The next events of a kind behind number `after`. Raises as `state`."""
    of_kind = select(*_ROW).where(fleet_events.c.seq > after, fleet_events.c.type == kind.__name__)
    return _decoded(connection.execute(of_kind.order_by(fleet_events.c.seq).limit(limit)))


def clock(connection: Connection) -> float:
    """The database's clock, in seconds since the epoch."""
    row = connection.execute(_clock).one()
    return float(row[1])


class OpenClaim(NamedTuple):
    """The claim of an open turn, and its session's run."""

    session_id: str
    fence: int
    incarnation: int
    run: str


def generating(
    connection: Connection, run: str | None = None, adapter: str | None = None, keys: Sequence[str] | None = None
) -> list[OpenClaim]:
    """The open turns of a run, of an adapter, with one of these retry keys, in any process, oldest first; None: any."""
    wanted = _claims.order_by(open_turns.c.opened_at)
    if run is not None:
        wanted = wanted.where(sessions.c.run == run)
    if adapter is not None:
        wanted = wanted.where(open_turns.c.adapter == adapter)
    if keys is not None:
        wanted = wanted.where(open_turns.c.retry_key.in_(keys))
    return [OpenClaim(*row) for row in connection.execute(wanted)]


def open_counts(connection: Connection) -> dict[tuple[str, str | None], int]:
    """Number of open turns by run and adapter; None counts those without one."""
    return {(row[0], row[1]): row[2] for row in connection.execute(_counts)}


def _decoded(rows: Iterable[Row]) -> list[Placed]:
    placed = []
    for seq, at, name, version, data in rows:
        try:
            event = decode(name, version, data, TYPES)
        except UnknownEvent as error:
            raise StoreUnavailable(f"event {seq} of the fleet's log cannot be read: {error}") from error
        assert isinstance(event, FleetEvent)
        placed.append(Placed(seq, at, event))
    return placed


class AppendFleet(BaseOperation, frozen=True):
    """Append an event after number `expected`; None if the log has advanced.

    `lease_s`: a pause or a public address ends this many seconds after the write, or at the event's own `until` if that
    is later.
    """

    expected: int
    event: FleetEvent
    lease_s: float | None = None
    runs_inline: ClassVar[bool] = True

    def apply(self, tx: Tx) -> Placed | None:
        row = tx.one(_last, {})
        assert row is not None
        last, at = row[0] or 0, float(row[1])
        if last != self.expected:
            return None
        event = self.event
        if self.lease_s is not None and isinstance(event, (AdapterPaused, FleetPaused, PublicUrlSet)):
            event = msgspec.structs.replace(event, until=max(event.until, at + self.lease_s))
        name = name_of(event)
        tx.insert(
            _insert,
            [
                {
                    "seq": last + 1,
                    "key": event.key,
                    "type": name,
                    "version": event.VERSION,
                    "at": at,
                    "data": encode(event),
                }
            ],
        )
        return Placed(last + 1, at, event)
