"""Pauses an adapter or the whole fleet while a trainer changes weights: first the gate, then the engines.

    pause an adapter   the gate is shut on disk; its generations are aborted, and once more a moment later
    pause the fleet    the gate is shut on disk; every engine is told to pause
    resume the fleet   every engine is told to continue; the gate is opened; every engine is told again
    a lease runs out   as a resume, by every process; one of them writes the event

If a process dies between two steps, the gate on disk still says what is wanted: repeating the request does the rest,
and the lease ends a forgotten pause. Engines are told until the gate has not changed meanwhile, so that of two
concurrent requests the one written last prevails at the engines too.
"""

from __future__ import annotations

import asyncio
import logging

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
from app.domain.session import rid_of
from app.errors import AppError, NotFound
from app.features.gates.gates import Gates
from app.fleet.engines import Engines
from app.fleet.state import POLL_S, STALE_S, FleetState
from app.process import cancelled
from app.sessions.as_reply import as_reply
from app.store import fleet as store
from app.store.ports import Database
from app.upstream.control import EngineControl
from turnlog.replies import AdapterState, FleetGate, Told

log = logging.getLogger("turnlog.pauses")

SECOND_SWEEP_S = STALE_S + 2 * POLL_S
"""Pause before generations are aborted a second time. By then no process uses a state from before the gate was shut,
and every request has reached its engine."""

RETRY_S = 1.0
"""Pause before a failed write of an opened gate is retried."""


class SweepResult(msgspec.Struct, frozen=True):
    """The rids of the aborted generations, and the outcome at each engine."""

    aborted: list[str]
    engines: dict[str, Told]


class Pauses:
    """Pauses and resumes. Between `start` and `stop` it opens gates whose lease has run out.

    `updated` is the version of weights that were changed while turns were held back, for the resume that follows.
    """

    def __init__(
        self, *, fleet: FleetState, gates: Gates, engines: Engines, control: EngineControl, database: Database
    ) -> None:
        self._fleet = fleet
        self.gates = gates
        self.updated: str | None = None
        self._engines = engines
        self._control = control
        self._database = database
        self._gates_changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        fleet.listen(lambda before, now: self._gates_changed.set())

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-leases")

    async def stop(self) -> None:
        await cancelled(self._watching)

    async def pause_adapter(self, name: str, lease_s: float) -> SweepResult:
        """Shut an adapter's gate or extend its lease, and abort the adapter's generations of all processes.

        Raises StoreUnavailable, StoreFull: the gate may or may not be shut then.
        """

        def shut(fleet: Fleet) -> FleetEvent:
            gate = fleet.adapters.get(name, OPEN)
            return AdapterPaused(name, _closings(gate), gate.until or 0.0, gate.version)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        return await self._sweep(name)

    async def resume_adapter(self, name: str, version: str | None) -> None:
        """Open an adapter's gate; an unknown adapter becomes known. `version` is its weight version.

        Without `version`, a paused adapter's version is unknown afterwards. Raises StoreUnavailable, StoreFull.
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
        """Shut the fleet's gate or extend its lease, and tell the engines to pause. Raises as `pause_adapter`."""

        def shut(fleet: Fleet) -> FleetEvent:
            return FleetPaused(_closings(fleet.gate), fleet.gate.until or 0.0, mode, fleet.gate.version)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        return await self._tell_engines()

    async def resume_fleet(self, version: str | None = None) -> dict[str, Told]:
        """Tell the engines to continue, and open the fleet's gate even if an engine fails.

        One failing engine must not idle the others; a repeated request tells all again. `version` is the weight version
        of engines that cannot say theirs; without it, that is unknown after a pause. Raises as `pause_adapter`.
        """

        def opened(fleet: Fleet) -> FleetEvent | None:
            gate = fleet.gate
            if not gate.is_shut and version in (None, gate.version):
                return None
            return FleetResumed(gate.closings, version=version)

        if (await self._fleet.refresh()).gate.is_shut:
            await self._for_each_engine(None)
            reach("before_gate_opened")
        await self._fleet.append(opened)
        return await self._tell_engines()

    async def adapter(self, name: str) -> AdapterState:
        """Raises NotFound, StoreUnavailable."""
        adapters = [one for one in await self.adapters() if one["name"] == name]
        if not adapters:
            raise NotFound("no adapter of this name was ever paused or resumed")
        return adapters[0]

    async def adapters(self) -> list[AdapterState]:
        """By name. Raises StoreUnavailable."""
        fleet = await self._fleet.refresh()
        held, in_flight = self.gates.held(), await self._database.read(store.open_counts)
        return [
            as_reply(
                AdapterState,
                gate,
                name=name,
                paused=gate.is_shut,
                lease_left_s=self._lease_left(gate),
                held=held[name],
                in_flight=in_flight.get(name, 0),
            )
            for name, gate in sorted(fleet.adapters.items())
        ]

    async def fleet(self) -> FleetGate:
        """Raises StoreUnavailable."""
        fleet = await self._fleet.refresh()
        in_flight = await self._database.read(store.open_counts)
        return as_reply(
            FleetGate,
            fleet.gate,
            paused=fleet.gate.is_shut,
            lease_left_s=self._lease_left(fleet.gate),
            held=self.gates.held().total(),
            in_flight=sum(in_flight.values()),
            paused_adapters=sorted(name for name, gate in fleet.adapters.items() if gate.is_shut),
            version=fleet.version,
            weight_version=fleet.gate.version,
            held_for=None if fleet.held is None else fleet.held.reason,
        )

    def _lease_left(self, gate: Gate) -> float | None:
        return round(self._fleet.left(gate), 3) if gate.is_shut else None

    async def _sweep(self, name: str) -> SweepResult:
        """Abort an adapter's generations, twice: another process may have begun some before it knew of the gate."""
        passed = self._fleet.fleet.closings(name)
        outcomes: dict[str, dict[str, str | None]] = {url: {} for url in self._engines.members}
        rids = await self._abort(name, outcomes)
        if rids or not self._fleet.is_alone:
            await asyncio.sleep(max(SECOND_SWEEP_S, 2 * self._fleet.stale_s))
            # Turns that passed after a resume are not this pause's business.
            if self._fleet.fleet.closings(name) == passed and self.gates.is_shut(name):
                rids = list(dict.fromkeys([*rids, *await self._abort(name, outcomes)]))
        told: dict[str, Told] = {}
        for url, outcome in outcomes.items():
            error = next((error for error in outcome.values() if error is not None), None)
            told[url] = Told(ok=error is None, error=error, aborted=len(outcome))
        return SweepResult(rids, told)

    async def _abort(self, name: str, outcomes: dict[str, dict[str, str | None]]) -> list[str]:
        """Abort at the engine that has a generation, or at all if another process sent it; returns the rids."""
        generating = await self._database.read(lambda connection: store.generating(connection, name))
        rids = [rid_of(*claim) for claim in generating]
        orders: dict[str, list[str]] = {}
        for rid in rids:
            engine = self._engines.engine_of(rid)
            for url in self._engines.members if engine is None else (engine,):
                orders.setdefault(url, []).append(rid)
        members = self._engines.members
        known = {url: members[url].dialect if url in members else None for url in orders}
        answers = await asyncio.gather(*(self._control.abort(url, some, known[url]) for url, some in orders.items()))
        for url, answer in zip(orders, answers, strict=True):
            outcomes.setdefault(url, {}).update(answer)
        return rids

    async def _tell_engines(self) -> dict[str, Told]:
        """Tell the engines what the fleet's gate says, until it has not changed meanwhile."""
        gate = self._fleet.fleet.gate
        while True:
            mode = gate.mode if gate.is_shut else None
            told = await self._for_each_engine(mode)
            now = (await self._fleet.refresh()).gate
            if (now.is_shut, now.closings, now.mode) == (gate.is_shut, gate.closings, gate.mode):
                return told
            gate = now

    async def _for_each_engine(self, mode: PauseMode | None) -> dict[str, Told]:
        """Tell every engine to pause in this mode; None: to continue."""
        members, control = list(self._engines.members.values()), self._control
        errors = await asyncio.gather(
            *(
                control.resume(one.url, one.dialect) if mode is None else control.pause(one.url, mode, one.dialect)
                for one in members
            )
        )
        return {
            member.url: Told(ok=error is None, error=error, aborted=0)
            for member, error in zip(members, errors, strict=True)
        }

    async def _watch(self) -> None:
        """Open each gate when its lease has run out, so that a dead trainer stops nothing for ever."""
        while True:
            self._gates_changed.clear()
            fleet = self._fleet.fleet
            shut = [gate for gate in (fleet.gate, *fleet.adapters.values()) if gate.is_shut]
            try:
                async with asyncio.timeout(min(map(self._fleet.left, shut), default=None)):
                    await self._gates_changed.wait()
                continue
            except TimeoutError:
                pass
            try:
                await self._expire()
            except AppError as error:
                log.warning("a gate whose lease has run out could not be opened yet: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("an unexpected fault in opening a gate whose lease has run out")
                await asyncio.sleep(RETRY_S)

    async def _expire(self) -> None:
        """Raises StoreUnavailable, StoreFull."""
        await self._fleet.read_clock()
        fleet = self._fleet.fleet
        due = {name: gate for name, gate in fleet.adapters.items() if gate.is_shut and self._fleet.left(gate) <= 0}
        for name, gate in due.items():

            def opened(now: Fleet, name: str = name, gate: Gate = gate) -> FleetEvent | None:
                return AdapterResumed(name, gate.closings, "lease_expired") if now.adapters.get(name) == gate else None

            if await self._fleet.append(opened) is not None:
                log.warning("adapter %r: the pause's lease has run out, its gate is open again", name)
        if fleet.gate.is_shut and self._fleet.left(fleet.gate) <= 0:
            await self._expire_fleet(fleet.gate)

    async def _expire_fleet(self, due: Gate) -> None:
        """Every process tells the engines, in case the one that opens the gate dies before it has.

        If a trainer has shut the gate again or extended its lease meanwhile, the engines are told to pause again.
        """
        await self._for_each_engine(None)
        opened = await self._fleet.append(
            lambda fleet: FleetResumed(due.closings, "lease_expired") if fleet.gate == due else None
        )
        if opened is not None:
            log.warning("the fleet: the pause's lease has run out, its gate is open again")
        elif not self._fleet.fleet.gate.is_shut:
            return
        for url, told in (await self._tell_engines()).items():
            if not told["ok"]:
                log.warning("%s could not be told what the fleet's gate is: %s", url, told["error"])


def _closings(gate: Gate) -> int:
    return gate.closings if gate.is_shut else gate.closings + 1
