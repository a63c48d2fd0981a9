"""Pausing an adapter or the whole fleet, for a trainer that changes weights: first the gate, then the engines.

    pause an adapter   the gate is shut, on disk; its generations are aborted, and once more a moment later
    pause the fleet    the gate is shut, on disk; every engine is told to pause
    resume the fleet   every engine is told to go on; the gate is opened; every engine is told again
    a lease runs out   as a resume, by every process; one of them writes the event

A process that dies between two steps leaves a gate that says what is wanted: the same order again does the rest, and
the lease the opening. Engines are told until the gate stands as it did when that began: of two orders that meet, in
two processes, the one that was written last prevails at the engines as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from app.crash_points import reach
from app.domain.fleet import (
    OPEN,
    AdapterPaused,
    AdapterResumed,
    Fleet,
    FleetEvent,
    FleetPaused,
    FleetResumed,
    Gate,
    PauseMode,
)
from app.domain.rids import rid_of
from app.errors import AppError, NotFound
from app.fleet.engines import Engines
from app.fleet.gates import Gates
from app.fleet.member import Member
from app.fleet.state import POLL_S, STALE_S, FleetState
from app.store import fleet as store
from app.store.ports import Database
from app.tasks import cancelled
from app.upstream.control import EngineControl

log = logging.getLogger("turnlog.pauses")

AGAIN_S = STALE_S + 2 * POLL_S
"""After which generations are looked for once more: no turn goes by what was known STALE_S ago, and its request has
reached the engine."""

TRY_AGAIN_S = 1.0
"""Between tries to open a gate that the store could not take."""


class Told(msgspec.Struct, frozen=True):
    """How an engine took an order; `aborted` counts the generations that it was asked to end."""

    ok: bool
    error: str | None = None
    aborted: int = 0


class Swept(msgspec.Struct, frozen=True):
    """The generations, by rid, that were to be aborted, and how each engine took it."""

    aborted: list[str]
    engines: dict[str, Told]


class AdapterState(msgspec.Struct, frozen=True):
    """`since` is when the gate last changed, in seconds since the epoch. `held` are turns that wait in this process,
    `in_flight` those that have a claim in any."""

    name: str
    paused: bool
    closings: int
    since: float | None
    lease_left_s: float | None
    version: str | None
    held: int
    in_flight: int


class FleetGate(msgspec.Struct, frozen=True):
    """As `AdapterState`, of all turns. `version` is that of the fleet's log."""

    paused: bool
    mode: PauseMode | None
    closings: int
    since: float | None
    lease_left_s: float | None
    held: int
    in_flight: int
    paused_adapters: list[str]
    version: int


class Pauses:
    """Runs from `start` to `stop`, so that no gate stays shut for longer than its lease."""

    def __init__(
        self, *, fleet: FleetState, gates: Gates, engines: Engines, control: EngineControl, database: Database
    ) -> None:
        self._fleet = fleet
        self._gates = gates
        self._engines = engines
        self._control = control
        self._database = database
        self._moved = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        fleet.listen(lambda before, now: self._moved.set())

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-leases")

    async def stop(self) -> None:
        await cancelled(self._watching)

    async def pause_adapter(self, name: str, lease_s: float) -> Swept:
        """Shut an adapter's gate, or keep it shut for longer, and abort its generations, whichever process has them.

        Raises StoreUnavailable, StoreFull: then it is not known to be shut.
        """

        def shut(fleet: Fleet) -> FleetEvent:
            gate = fleet.adapters.get(name, OPEN)
            return AdapterPaused(name, _closings(gate), gate.until or 0.0, gate.version)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        return await self._sweep(name)

    async def resume_adapter(self, name: str, version: str | None) -> None:
        """Open an adapter's gate; one never heard of is known from now on. `version` is that of its weights.

        Weights that changed without a word of their version have an unknown one. Raises StoreUnavailable, StoreFull.
        """

        def opened(fleet: Fleet) -> FleetEvent | None:
            gate = fleet.adapters.get(name)
            if gate is None:
                return AdapterResumed(name, 0, "known", version)
            if not gate.is_shut and version in (None, gate.version):
                return None
            return AdapterResumed(name, gate.closings, version=version)

        await self._fleet.append(opened)

    async def pause_fleet(self, mode: PauseMode, lease_s: float) -> dict[str, Told]:
        """Shut the fleet's gate, or keep it shut for longer, and have the engines pause. Raises as `pause_adapter`."""

        def shut(fleet: Fleet) -> FleetEvent:
            return FleetPaused(_closings(fleet.gate), fleet.gate.until or 0.0, mode)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        return await self._tell()

    async def resume_fleet(self) -> dict[str, Told]:
        """Have the engines go on and open the fleet's gate, also where an engine does not take it.

        One engine of many that fails must not idle the others; asked again, each is told again. Raises as
        `pause_adapter`.
        """
        if (await self._fleet.refresh()).gate.is_shut:
            await self._each(self._go_on)
            reach("before_gate_opened")
            await self._fleet.append(lambda fleet: FleetResumed(fleet.gate.closings) if fleet.gate.is_shut else None)
        return await self._tell()

    async def adapter(self, name: str) -> AdapterState:
        """Raises NotFound, StoreUnavailable."""
        found = [one for one in await self.adapters() if one.name == name]
        if not found:
            raise NotFound("no adapter of this name was ever paused or resumed")
        return found[0]

    async def adapters(self) -> list[AdapterState]:
        """By name. Raises StoreUnavailable."""
        fleet = await self._fleet.refresh()
        held, in_flight = self._gates.held(), await self._database.read(store.open_counts)
        return [
            AdapterState(
                name=name,
                paused=gate.is_shut,
                closings=gate.closings,
                since=gate.since,
                lease_left_s=self._lease_left(gate),
                version=gate.version,
                held=held[name],
                in_flight=in_flight.get(name, 0),
            )
            for name, gate in sorted(fleet.adapters.items())
        ]

    async def fleet(self) -> FleetGate:
        """Raises StoreUnavailable."""
        fleet = await self._fleet.refresh()
        in_flight = await self._database.read(store.open_counts)
        return FleetGate(
            paused=fleet.gate.is_shut,
            mode=fleet.gate.mode,
            closings=fleet.gate.closings,
            since=fleet.gate.since,
            lease_left_s=self._lease_left(fleet.gate),
            held=self._gates.held().total(),
            in_flight=sum(in_flight.values()),
            paused_adapters=sorted(name for name, gate in fleet.adapters.items() if gate.is_shut),
            version=fleet.version,
        )

    def _lease_left(self, gate: Gate) -> float | None:
        return round(self._fleet.left(gate), 3) if gate.is_shut else None

    async def _sweep(self, name: str) -> Swept:
        """Abort an adapter's generations, and those that another process began before it knew of the gate."""
        passed = self._fleet.fleet.closings(name)
        outcomes: dict[str, dict[str, str | None]] = {url: {} for url in self._engines.members}
        rids = await self._abort(name, outcomes)
        if rids or not self._fleet.is_alone:
            await asyncio.sleep(max(AGAIN_S, 2 * self._fleet.stale_s))
            # What was let through meanwhile is none of this pause's business.
            if self._fleet.fleet.closings(name) == passed and self._gates.is_shut(name):
                rids = list(dict.fromkeys([*rids, *await self._abort(name, outcomes)]))
        return Swept(rids, {url: _told(found) for url, found in outcomes.items()})

    async def _abort(self, name: str, outcomes: dict[str, dict[str, str | None]]) -> list[str]:
        """Tell the engine that has a generation, or all where that is another process's; returns the rids."""
        found = await self._database.read(lambda connection: store.generating(connection, name))
        rids = [rid_of(session_id, fence) for session_id, fence in found]
        orders: dict[str, list[str]] = {}
        for rid in rids:
            engine_of = self._engines.engine_of(rid)
            for url in self._engines.members if engine_of is None else (engine_of,):
                orders.setdefault(url, []).append(rid)
        answers = await asyncio.gather(*(self._control.abort(url, some) for url, some in orders.items()))
        for url, answer in zip(orders, answers, strict=True):
            outcomes.setdefault(url, {}).update(answer)
        return rids

    async def _tell(self) -> dict[str, Told]:
        """Have the engines do what the fleet's gate says, until it has not changed while they were told."""
        gate = self._fleet.fleet.gate
        while True:
            mode = gate.mode if gate.is_shut else None
            told = await self._each(self._go_on if mode is None else _pausing(self._control, mode))
            now = (await self._fleet.refresh()).gate
            if (now.is_shut, now.closings, now.mode) == (gate.is_shut, gate.closings, gate.mode):
                return told
            gate = now

    async def _go_on(self, member: Member) -> str | None:
        return await self._control.resume(member.url, member.dialect)

    async def _each(self, order: Callable[[Member], Awaitable[str | None]]) -> dict[str, Told]:
        members = list(self._engines.members.values())
        errors = await asyncio.gather(*(order(member) for member in members))
        return {member.url: Told(error is None, error) for member, error in zip(members, errors, strict=True)}

    async def _watch(self) -> None:
        """Open each gate when its lease has run out: a trainer that has died holds nobody up for ever."""
        while True:
            self._moved.clear()
            try:
                async with asyncio.timeout(self._soonest()):
                    await self._moved.wait()
                continue
            except TimeoutError:
                pass
            try:
                await self._expire()
            except AppError as error:
                log.warning("a gate whose lease has run out could not be opened yet: %s", error)
                await asyncio.sleep(TRY_AGAIN_S)
            except Exception:
                log.exception("an unexpected fault in opening a gate whose lease has run out")
                await asyncio.sleep(TRY_AGAIN_S)

    def _soonest(self) -> float | None:
        fleet = self._fleet.fleet
        gates = [gate for gate in (fleet.gate, *fleet.adapters.values()) if gate.is_shut]
        return min(map(self._fleet.left, gates), default=None)

    async def _expire(self) -> None:
        """Raises StoreUnavailable, StoreFull."""
        await self._fleet.read_clock()
        fleet = self._fleet.fleet
        for name, gate in fleet.adapters.items():
            if self._is_due(gate):
                await self._expire_adapter(name, gate)
        if self._is_due(fleet.gate):
            await self._expire_fleet(fleet.gate)

    def _is_due(self, gate: Gate) -> bool:
        return gate.is_shut and self._fleet.left(gate) <= 0

    async def _expire_adapter(self, name: str, due: Gate) -> None:
        def opened(fleet: Fleet) -> FleetEvent | None:
            return AdapterResumed(name, due.closings, "lease_expired") if fleet.adapters.get(name) == due else None

        if await self._fleet.append(opened) is not None:
            log.warning("adapter %r: the pause's lease has run out, its gate is open again", name)

    async def _expire_fleet(self, due: Gate) -> None:
        """Every process tells the engines, lest the one that opens the gate dies before it has.

        Where a trainer has shut it again meanwhile, or made its lease longer, that was said too early.
        """
        await self._each(self._go_on)
        opened = await self._fleet.append(
            lambda fleet: FleetResumed(due.closings, "lease_expired") if fleet.gate == due else None
        )
        if opened is not None:
            log.warning("the fleet: the pause's lease has run out, its gate is open again")
        elif not self._fleet.fleet.gate.is_shut:
            return
        for url, told in (await self._tell()).items():
            if not told.ok:
                log.warning("%s could not be told what the fleet's gate is: %s", url, told.error)


def _closings(gate: Gate) -> int:
    return gate.closings if gate.is_shut else gate.closings + 1


def _pausing(control: EngineControl, mode: PauseMode) -> Callable[[Member], Awaitable[str | None]]:
    return lambda member: control.pause(member.url, mode, member.dialect)


def _told(outcomes: Mapping[str, str | None]) -> Told:
    error = next((error for error in outcomes.values() if error is not None), None)
    return Told(error is None, error, len(outcomes))
