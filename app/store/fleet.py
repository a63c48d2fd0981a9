"""The fleet's log: appended by whoever saw its newest event, read by every process a few times a second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from sqlalchemy import BigInteger, Connection, bindparam, func, insert, literal, select

from app.domain import upcast
from app.domain.events import UnknownEvent, name_of
from app.domain.fleet import AdapterPaused, FleetEvent, FleetPaused, Placed
from app.errors import StoreUnavailable
from app.store.dialect import Row, Tx, now
from app.store.log import BaseOperation
from app.store.schema import fleet_events

_ROW = (fleet_events.c.seq, fleet_events.c.at, fleet_events.c.type, fleet_events.c.version, fleet_events.c.data)
_after = select(*_ROW).where(fleet_events.c.seq > bindparam("known", type_=BigInteger)).order_by(fleet_events.c.seq)
_newest = select(func.max(fleet_events.c.seq)).group_by(fleet_events.c.key)
_state = select(*_ROW).where(fleet_events.c.seq.in_(_newest)).order_by(fleet_events.c.seq)
_last = select(func.max(fleet_events.c.seq), now())
_insert = insert(fleet_events)
_clock = select(literal(0), now())


class Seen(msgspec.Struct, frozen=True):
    """Events in order, and the database's clock when they were read, in seconds since the epoch."""

    events: list[Placed]
    now: float


def state(connection: Connection) -> Seen:
    """The last event of each key: all there is to know. Raises StoreUnavailable for one that cannot be read."""
    return Seen(_decoded(connection.execute(_state)), _now(connection))


def after(connection: Connection, known: int) -> Seen:
    """Events behind `known`. Raises as `state`."""
    return Seen(_decoded(connection.execute(_after, {"known": known})), _now(connection))


def _now(connection: Connection) -> float:
    row = connection.execute(_clock).one()
    return float(row[1])


def _decoded(rows: Iterable[Row]) -> list[Placed]:
    found = []
    for seq, at, name, version, data in rows:
        try:
            event = upcast.decode(name, version, data)
        except UnknownEvent as error:
            raise StoreUnavailable(f"the fleet's log cannot be read at {seq}: {error}") from error
        assert isinstance(event, FleetEvent)
        found.append(Placed(seq, at, event))
    return found


class AppendFleet(BaseOperation, frozen=True):
    """Write an event behind number `expected`; None where the log has moved on meanwhile.

    `lease_s`: a pause ends so many seconds after it was written.
    """

    expected: int
    event: FleetEvent
    lease_s: float | None = None
    brief: ClassVar[bool] = True

    @property
    def session_id(self) -> str:
        """Of no session in particular: it comes first in a batch."""
        return ""

    def apply(self, tx: Tx) -> Placed | None:
        row = tx.one(_last, {})
        assert row is not None
        last, at = row[0] or 0, float(row[1])
        if last != self.expected:
            return None
        event = self.event
        if self.lease_s is not None and isinstance(event, (AdapterPaused, FleetPaused)):
            event = msgspec.structs.replace(event, until=at + self.lease_s)
        name = name_of(event)
        tx.insert(
            _insert,
            [
                {
                    "seq": last + 1,
                    "key": event.key,
                    "type": name,
                    "version": upcast.VERSIONS[name],
                    "at": at,
                    "data": upcast.encode(event),
                }
            ],
        )
        return Placed(last + 1, at, event)
