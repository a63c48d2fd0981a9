"""The service's current figures, for the head of the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select, true

from app.domain.fleet import OPEN
from app.sessions.as_reply import as_reply
from app.store.schema import open_turns, sessions
from app.store.sessions import database_bytes
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.features.gates.pauses import Pauses
    from app.services import Services

MAX_AGE_S = 0.9
"""Maximum age of an overview: all browsers share one a second."""

COUNT_PAUSE = 20
"""Sessions are counted again after COUNT_PAUSE times the duration of the last count: to count a million of them every
second would need a whole core."""

ACTIVE_S = 60.0
"""A session is active if its last turn is not older than this."""

MAX_KNOWN = 64
"""Runs of which the newest overview is kept."""


class HeadCounts(NamedTuple):
    """Sessions by status; `changed`: open ones that changed since a given time; `bytes`: the database's."""

    open: int
    closed: int
    erased: int
    changed: int
    bytes: int


def _of(run: str | None) -> ColumnElement[bool]:
    """Condition on heads: the session is the run's; None: any."""
    return true() if run is None else sessions.c.run == run


def counts(connection: Connection, since: float, run: str | None = None) -> HeadCounts:
    """Reads every head, or those of a run."""
    changed = and_(sessions.c.status == "open", sessions.c.turns > 0, sessions.c.updated_at >= since)
    query = select(sessions.c.status, func.count(), func.sum(case((changed, 1), else_=0))).where(_of(run))
    query = query.group_by(sessions.c.status)
    by_state = {row[0]: (row[1], row[2]) for row in connection.execute(query)}
    opened, closed, erased = (by_state.get(status, (0, 0)) for status in ("open", "closed", "erased"))
    return HeadCounts(opened[0], closed[0], erased[0], opened[1], database_bytes(connection))


def claims(connection: Connection, since: float, run: str | None = None) -> tuple[int, int]:
    """The open turns, of a run or of all, and how many are of sessions otherwise unchanged since a given time."""
    new = and_(open_turns.c.opened_at >= since, or_(sessions.c.updated_at < since, sessions.c.turns == 0))
    query = select(func.count(), func.sum(case((new, 1), else_=0))).select_from(
        open_turns.join(sessions, sessions.c.session_id == open_turns.c.session_id)
    )
    query = query.where(_of(run))
    row = connection.execute(query).one()
    return row[0], row[1] or 0


class SessionCounts(msgspec.Struct, frozen=True):
    """`running`, `paused` (at a gate of this process) and `idle` add up to `open`.

    `active`: opened or committed a turn within a minute. `counted_at`: when the statuses were counted.
    """

    open: int
    closed: int
    erased: int
    running: int
    paused: int
    idle: int
    active: int
    counted_at: float


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds; null if no turn was committed within the last minute."""

    p50: float | None
    p99: float | None


class DatabaseSize(msgspec.Struct, frozen=True):
    bytes: int
    wal_bytes: int | None
    kind: Literal["sqlite", "postgresql"]


class Overview(msgspec.Struct, frozen=True):
    """Times are seconds since the epoch. Turns, percentiles and errors are those of `scope`. `weight_version` is the
    newest. Of a run, what is known of the whole server alone is null.

    `read_only` says why this process cannot serve turns yet after its start, else null.
    """

    at: float
    sessions: SessionCounts
    turns_per_s: float | None
    overhead_ms: Percentiles | None
    engine_ms: Percentiles | None
    errors: Mapping[str, int] | None
    errors_total: Mapping[str, int] | None
    weight_version: int | None
    gate: reply_types.FleetGate
    adapters: list[reply_types.AdapterState]
    database: DatabaseSize | None
    read_only: str | None
    scope: str


class _OfRun:
    """The newest overview of a run, or of all (None), and when its sessions are counted again."""

    def __init__(self, run: str | None) -> None:
        self.run = run
        self.lock = asyncio.Lock()
        self.latest: tuple[float, Overview] | None = None
        self.counted: tuple[HeadCounts, float] | None = None
        self.due_at = 0.0


class Overviews:
    """Makes overviews for all browsers."""

    def __init__(self, services: Services, pauses: Pauses | None) -> None:
        self._services = services
        self._database = services.database
        self._sessions = services.session_list
        self._pauses = pauses
        self._known: dict[str | None, _OfRun] = {}

    async def now(self, run: str | None) -> Overview:
        """The overview of a run or of all, at most a second old. Raises StoreUnavailable."""
        known = self._known.pop(run, None) or _OfRun(run)
        self._known[run] = known
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        async with known.lock:
            moment = time.monotonic()
            if known.latest is None or moment - known.latest[0] > MAX_AGE_S:
                known.latest = moment, await self._read(known)
            return known.latest[1]

    async def _read(self, known: _OfRun) -> Overview:
        at, run = self._services.clock(), known.run
        began = time.monotonic()
        if known.counted is None or began >= known.due_at:
            known.counted = await self._database.read(partial(counts, since=at - ACTIVE_S, run=run)), at
            ended = time.monotonic()
            known.due_at = ended + COUNT_PAUSE * (ended - began)
        heads, counted_at = known.counted
        (in_flight, newly_active), newest = await self._database.read(
            lambda connection: (claims(connection, at - ACTIVE_S, run), self._newest(connection, run))
        )
        at_gates = {one: claim for one, claim in self._sessions.at_gates().items() if self._is_of(one, run)}
        unclaimed = sum(not has_claim for has_claim in at_gates.values())
        recent = self._services.metrics.recent.summary()
        gate, adapters = await self._gates(run)
        return Overview(
            at=at,
            sessions=SessionCounts(
                open=heads.open,
                closed=heads.closed,
                erased=heads.erased,
                running=max(0, in_flight - (len(at_gates) - unclaimed)),
                paused=len(at_gates),
                idle=max(0, heads.open - in_flight - unclaimed),
                active=heads.changed + newly_active,
                counted_at=counted_at,
            ),
            turns_per_s=recent.turns_per_s if run is None else None,
            overhead_ms=Percentiles(recent.overhead_p50_ms, recent.overhead_p99_ms) if run is None else None,
            engine_ms=Percentiles(recent.engine_p50_ms, recent.engine_p99_ms) if run is None else None,
            errors=recent.errors if run is None else None,
            errors_total=recent.errors_total if run is None else None,
            weight_version=newest,
            gate=gate,
            adapters=adapters,
            database=DatabaseSize(
                heads.bytes, self._database.log_file_bytes(), "sqlite" if self._database.is_sqlite else "postgresql"
            )
            if run is None
            else None,
            read_only=self._services.registration.read_only,
            scope="this process",
        )

    async def _gates(self, run: str | None) -> tuple[reply_types.FleetGate, list[reply_types.AdapterState]]:
        """Those that hold turns of the run; an open gate of the run's is shown as the fleet's if that is shut."""
        if self._pauses is None:
            return _without_gates(self._services.fleet.fleet.version), []
        gate, adapters = await self._pauses.fleet(run), await self._pauses.adapters(run)
        if run is None or gate["paused"]:
            return gate, adapters
        whole = await self._pauses.fleet(None)
        if whole["paused"]:
            of_gate = ("paused", "mode", "since", "lease_left_s")
            shut = {name: value for name, value in whole.items() if name in of_gate}
            gate = cast(reply_types.FleetGate, {**gate, **shut})
        return gate, adapters

    def _newest(self, connection: Connection, run: str | None) -> int | None:
        if run is None:
            return self._sessions.newest_version(connection)
        return self._sessions.newest_versions(connection, [run]).get(run)

    def _is_of(self, session_id: str, run: str | None) -> bool:
        """Is a session that waits at a gate of this process the run's?"""
        session = self._services.cache.known(session_id)
        return run is None or (session is not None and session.config.of_run == run)


def _without_gates(version: int) -> reply_types.FleetGate:
    never: dict[str, Any] = dict.fromkeys(("lease_left_s", "weight_version", "held_for"))
    none: dict[str, Any] = {"paused_adapters": [], "paused_runs": []}
    return as_reply(reply_types.FleetGate, OPEN, paused=False, held=0, in_flight=0, version=version, **never, **none)
