"""Checks the fleet's log, and the affinities: the names by which clients bound engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import msgspec
from sqlalchemy import Connection, select

from app.domain import events, fleet
from app.domain.events import UnknownEvent, decode
from app.domain.fleet import AdapterPaused, AdapterResumed, Fleet, FleetEvent, FleetPaused, FleetResumed, Placed, apply
from app.features.session_control.affinities import State
from app.features.session_control.schema import affinities
from app.store.database import Database
from app.store.schema import fleet_events, sessions
from ops.verify.report import STORE, Report

EVENTS = 5000
"""Events of the fleet's log, or affinities, read in one query."""

_Row = tuple[int, str, str, int, float, bytes]


async def check_fleet(database: Database, report: Report, progress: Callable[[str], None]) -> None:
    """Check that every event of the fleet's log is readable, has the next number, and agrees with the events before
    it."""
    log = _Log(report)
    while rows := await database.read(partial(_rows, after=log.seq)):
        for row in rows:
            log.take(row)
        progress(f"{log.seq} events of the fleet")
    after = ""
    while names := await database.read(partial(_check_affinities, after=after, report=report)):
        after = names[-1]
        progress(f"affinities up to {after}")


def _rows(connection: Connection, after: int) -> Sequence[_Row]:
    names = ("seq", "key", "type", "version", "at", "data")
    query = select(*(fleet_events.c[name] for name in names)).where(fleet_events.c.seq > after)
    return [tuple(row) for row in connection.execute(query.order_by(fleet_events.c.seq).limit(EVENTS))]


_EITHER = {**events.TYPES, **fleet.TYPES}
"""An event of a session is told from one that cannot be read."""


class _Log:
    """The state of the fleet's log up to event `seq`, the last one read."""

    def __init__(self, report: Report) -> None:
        self.seq = 0
        self._fleet = Fleet()
        self._report = report

    def take(self, row: _Row) -> None:
        seq, key, name, version, at, data = row
        if seq != self.seq + 1:
            self._found(seq, f"follows event {self.seq}")
        self.seq = seq
        try:
            event = decode(name, version, data, _EITHER)
        except UnknownEvent as error:
            self._found(seq, f"cannot be read: {error}")
            return
        if not isinstance(event, FleetEvent):
            self._found(seq, f"{name} is an event of a session")
            return
        if event.key != key:
            self._found(seq, f"is about {event.key}, its row says {key}")
        self._closings(seq, event)
        self._fleet = apply(self._fleet, Placed(seq, at, event))

    def _closings(self, seq: int, event: FleetEvent) -> None:
        """Check the counter of closings: it is one higher when an open gate is closed, and otherwise unchanged."""
        match event:
            case AdapterPaused() | AdapterResumed():
                gate = self._fleet.gates_of(event.run).adapter(event.name)
            case FleetPaused() | FleetResumed():
                gate = self._fleet.gates_of(event.run).fleet
            case _:
                return
        shuts = isinstance(event, AdapterPaused | FleetPaused) and not gate.is_shut
        if event.closings != gate.closings + shuts:
            self._found(seq, f"counts {event.closings} closings after {gate.closings}")

    def _found(self, seq: int, what: str) -> None:
        self._report.found(STORE, f"event {seq} of the fleet: {what}")


class _Named(msgspec.Struct, frozen=True):
    control_id: str
    state: str
    worker_session: bool
    has_session: bool


def _check_affinities(connection: Connection, after: str, report: Report) -> list[str]:
    """Check that each affinity has a known state and an existing session; returns the names that were checked."""
    query = (
        select(
            affinities.c.control_id, affinities.c.state, affinities.c.worker_session, sessions.c.session_id.is_not(None)
        )
        .select_from(affinities.outerjoin(sessions, sessions.c.session_id == affinities.c.session_id))
        .where(affinities.c.control_id > after)
        .order_by(affinities.c.control_id)
        .limit(EVENTS)
    )
    found = [_Named(*row) for row in connection.execute(query)]
    for one in found:
        what = f"affinity {one.control_id}"
        if one.state not in get_args(State):
            report.found(STORE, f"{what} is {one.state}, which is not a state of an affinity")
        elif one.state != "bound" and not one.worker_session:
            report.found(STORE, f"{what} is {one.state}, but no engine has a session of it")
        if not one.has_session:
            report.found(STORE, f"{what} belongs to a session that does not exist")
    return [one.control_id for one in found]
