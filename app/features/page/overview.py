"""The service's current figures, for the head of the page, and those of its weight versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection, and_, case, func, or_, select

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

MAX_VERSIONS = 100


class HeadCounts(NamedTuple):
    """Sessions by status; `changed`: open ones that changed since a given time; `bytes`: the database's."""

    open: int
    closed: int
    erased: int
    changed: int
    bytes: int


def counts(connection: Connection, since: float) -> HeadCounts:
    """Reads every head."""
    changed = and_(sessions.c.status == "open", sessions.c.turns > 0, sessions.c.updated_at >= since)
    query = select(sessions.c.status, func.count(), func.sum(case((changed, 1), else_=0))).group_by(sessions.c.status)
    by_state = {row[0]: (row[1], row[2]) for row in connection.execute(query)}
    opened, closed, erased = (by_state.get(status, (0, 0)) for status in ("open", "closed", "erased"))
    return HeadCounts(opened[0], closed[0], erased[0], opened[1], database_bytes(connection))


class VersionRow(msgspec.Struct, frozen=True):
    """The sessions of a weight version, which is that of their newest weights. `mean_reward`: of the rewarded ones."""

    version: int
    sessions: int
    open: int
    turns: int
    rewarded: int
    mean_reward: float | None
    updated_at: float


def versions(connection: Connection) -> list[VersionRow]:
    """The newest MAX_VERSIONS weight versions, newest first."""
    head = sessions.c
    sums = (
        func.count(),
        func.sum(case((head.status == "open", 1), else_=0)),
        func.sum(head.turns),
        func.count(head.reward),
        func.avg(head.reward),
        func.max(head.updated_at),
    )
    query = select(head.weight_version, *sums).where(head.weight_version.is_not(None)).group_by(head.weight_version)
    newest = query.order_by(head.weight_version.desc()).limit(MAX_VERSIONS)
    return [VersionRow(*row) for row in connection.execute(newest)]


def claims(connection: Connection, since: float) -> tuple[int, int]:
    """The open turns, and how many are of sessions otherwise unchanged since a given time."""
    new = and_(open_turns.c.opened_at >= since, or_(sessions.c.updated_at < since, sessions.c.turns == 0))
    query = select(func.count(), func.sum(case((new, 1), else_=0))).select_from(
        open_turns.join(sessions, sessions.c.session_id == open_turns.c.session_id)
    )
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


class Overviews:
    """Makes overviews for all browsers."""

    def __init__(self, services: Services, pauses: Pauses | None) -> None:
        self._services = services
        self._database = services.database
        self._sessions = services.session_list
        self._pauses = pauses
        self._lock = asyncio.Lock()
        self._latest: tuple[float, Overview] | None = None
        self._counted: tuple[HeadCounts, float] | None = None
        self._due_at = 0.0

    async def now(self) -> Overview:
        """The overview, at most a second old. Raises StoreUnavailable."""
        async with self._lock:
            moment = time.monotonic()
            if self._latest is None or moment - self._latest[0] > MAX_AGE_S:
                self._latest = moment, await self._read()
            return self._latest[1]

    async def _read(self) -> Overview:
        at = self._services.clock()
        began = time.monotonic()
        if self._counted is None or began >= self._due_at:
            self._counted = await self._database.read(partial(counts, since=at - ACTIVE_S)), at
            ended = time.monotonic()
            self._due_at = ended + COUNT_PAUSE * (ended - began)
        heads, counted_at = self._counted
        (in_flight, newly_active), newest = await self._database.read(
            lambda connection: (claims(connection, at - ACTIVE_S), self._sessions.newest_version(connection))
        )
        at_gates = self._sessions.at_gates()
        unclaimed = sum(not has_claim for has_claim in at_gates.values())
        recent = self._services.metrics.recent.summary()
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
            turns_per_s=recent.turns_per_s,
            overhead_ms=Percentiles(recent.overhead_p50_ms, recent.overhead_p99_ms),
            engine_ms=Percentiles(recent.engine_p50_ms, recent.engine_p99_ms),
            errors=recent.errors,
            errors_total=recent.errors_total,
            weight_version=newest,
            gate=_without_gates(self._services.fleet.fleet.version)
            if self._pauses is None
            else await self._pauses.fleet(None),
            adapters=[] if self._pauses is None else await self._pauses.adapters(None),
            database=DatabaseSize(
                heads.bytes, self._database.log_file_bytes(), "sqlite" if self._database.is_sqlite else "postgresql"
            ),
            read_only=self._services.registration.read_only,
            scope="this process",
        )


def _without_gates(version: int) -> reply_types.FleetGate:
    never: dict[str, Any] = dict.fromkeys(("lease_left_s", "weight_version", "held_for"))
    none: dict[str, Any] = {"paused_adapters": [], "paused_runs": []}
    return as_reply(reply_types.FleetGate, OPEN, paused=False, held=0, in_flight=0, version=version, **never, **none)
