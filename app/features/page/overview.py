"""The service's current figures, for the head of the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from app.features.page import reads
from app.features.page.reads import HeadCounts
from app.fleet.state import FleetState
from app.metrics import RecentTurnStats
from app.sessions.recovery import Registration
from app.sessions.session_list import SessionList
from app.store.engine import Database
from app.store.sessions import database_bytes
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.features.gates.pauses import Pauses

MAX_AGE_S = 0.9
"""Maximum age of an overview: all browsers share one a second."""

COUNT_PAUSE = 20
"""Sessions are counted again after COUNT_PAUSE times the duration of the last count: to count a million of them every
second would need a whole core."""

ACTIVE_S = 60.0
"""A session is active if its last turn is not older than this."""


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
    newest.

    `read_only` says why this process cannot serve turns yet after its start, else null.
    """

    at: float
    sessions: SessionCounts
    turns_per_s: float
    overhead_ms: Percentiles
    engine_ms: Percentiles
    errors: Mapping[str, int]
    errors_total: Mapping[str, int]
    weight_version: int | None
    gate: reply_types.FleetGate
    adapters: list[reply_types.AdapterState]
    database: DatabaseSize
    read_only: str | None
    scope: str


class _Counted(msgspec.Struct, frozen=True):
    counts: HeadCounts
    bytes: int
    at: float
    due_at: float


class Overviews:
    """Makes overviews for all browsers. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        database: Database,
        sessions: SessionList,
        fleet: FleetState,
        pauses: Pauses | None,
        recent: RecentTurnStats,
        registration: Registration,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._fleet = fleet
        self._pauses = pauses
        self._recent = recent
        self._registration = registration
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: tuple[float, Overview] | None = None
        self._counted: _Counted | None = None

    async def now(self) -> Overview:
        """The overview, at most a second old. Raises StoreUnavailable."""
        async with self._lock:
            moment = time.monotonic()
            if self._latest is None or moment - self._latest[0] > MAX_AGE_S:
                self._latest = moment, await self._read()
            return self._latest[1]

    async def _read(self) -> Overview:
        at = self._clock()
        counted = await self._count(at)
        claims, newest = await self._database.read(
            lambda connection: (
                reads.claims(connection, at - ACTIVE_S),
                self._sessions.newest_version(connection),
            )
        )
        at_gates = self._sessions.at_gates()
        unclaimed = sum(not has_claim for has_claim in at_gates.values())
        recent = self._recent.summary()
        return Overview(
            at=at,
            sessions=SessionCounts(
                open=counted.counts.open,
                closed=counted.counts.closed,
                erased=counted.counts.erased,
                running=max(0, claims.all - (len(at_gates) - unclaimed)),
                paused=len(at_gates),
                idle=max(0, counted.counts.open - claims.all - unclaimed),
                active=counted.counts.changed + claims.newly_active,
                counted_at=counted.at,
            ),
            turns_per_s=recent.turns_per_s,
            overhead_ms=Percentiles(recent.overhead_p50_ms, recent.overhead_p99_ms),
            engine_ms=Percentiles(recent.engine_p50_ms, recent.engine_p99_ms),
            errors=recent.errors,
            errors_total=recent.errors_total,
            weight_version=newest,
            gate=self._without_gates() if self._pauses is None else await self._pauses.fleet(),
            adapters=[] if self._pauses is None else await self._pauses.adapters(),
            database=DatabaseSize(
                counted.bytes, self._database.log_file_bytes(), "sqlite" if self._database.is_sqlite else "postgresql"
            ),
            read_only=self._registration.read_only,
            scope="this process",
        )

    def _without_gates(self) -> reply_types.FleetGate:
        return reply_types.FleetGate(
            paused=False,
            mode=None,
            closings=0,
            since=None,
            lease_left_s=None,
            held=0,
            in_flight=0,
            paused_adapters=[],
            version=self._fleet.fleet.version,
            weight_version=None,
            held_for=None,
        )

    async def _count(self, at: float) -> _Counted:
        """The count of sessions and the database's size, from memory if they are recent enough."""
        began = time.monotonic()
        if self._counted is None or began >= self._counted.due_at:
            counts = await self._database.read(partial(reads.counts, since=at - ACTIVE_S))
            size = await self._database.read(database_bytes)
            ended = time.monotonic()
            self._counted = _Counted(counts, size, at, ended + COUNT_PAUSE * (ended - began))
        return self._counted
