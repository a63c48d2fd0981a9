"""Pauses an adapter or the whole fleet while a trainer changes weights: first the gate, then the engines.

    pause an adapter   the gate is shut on disk; its generations are aborted, and once more a moment later
    pause the fleet    the gate is shut on disk; every engine is told to pause
    resume the fleet   every engine is told to continue; the gate is opened; every engine is told again
    a lease runs out   as a resume, by every process; one of them writes the event

Each of these is also done for one run: its gates hold its turns alone, and its own engines alone are told. An engine
that serves several runs is not paused for one: the run's generations there are aborted, in every mode.

If a process dies between two steps, the gate on disk still says what is wanted: repeating the request does the rest,
and the lease ends a forgotten pause. Engines are told until the gate has not changed meanwhile, so that of two
concurrent requests the one written last prevails at the engines too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

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
    GateSet,
    PauseMode,
)
from app.domain.session import rid_of
from app.errors import AppError, NotFound, PauseEnded
from app.features.gates.gates import Gates
from app.fleet.engines import Engines
from app.fleet.member import Member
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
    """Pauses and resumes, of a run's turns alone or (`run` None) of all. Between `start` and `stop` it opens gates
    whose lease has run out.

    `updated` are the versions of weights that were changed while turns were held back, for the resume that follows.
    """

    def __init__(
        self, *, fleet: FleetState, gates: Gates, engines: Engines, control: EngineControl, database: Database
    ) -> None:
        self._fleet = fleet
        self.gates = gates
        self.updated: dict[str | None, str] = {}
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

    async def pause_adapter(self, run: str | None, name: str, lease_s: float) -> SweepResult:
        """Shut an adapter's gate or extend its lease, and abort the adapter's generations of all processes.

        Raises StoreUnavailable, StoreFull: the gate may or may not be shut then.
        """

        def shut(fleet: Fleet) -> FleetEvent:
            gate = fleet.gates_of(run).adapter(name)
            return AdapterPaused(name, _closings(gate), gate.until or 0.0, gate.version, run=run)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        return await self._sweep(run, name, self._engines.serving(run))

    async def renew(self, run: str | None, name: str | None, closings: int, lease_s: float) -> None:
        """Extend the lease of the pause that shut this gate for the `closings`-th time, of an adapter or (None) the
        fleet. No engine is told: it may be in the middle of an update. Raises PauseEnded, and as `pause_adapter`."""

        def extended(fleet: Fleet) -> FleetEvent | None:
            gates = fleet.gates_of(run)
            gate = gates.fleet if name is None else gates.adapter(name)
            if gate.until is None or gate.closings != closings:
                return None
            if name is None:
                return FleetPaused(closings, gate.until, gate.mode or "abort", gate.version, run=run)
            return AdapterPaused(name, closings, gate.until, gate.version, run=run)

        if await self._fleet.append(extended, lease_s=lease_s) is None:
            what = "the fleet" if name is None else f"adapter {name:.128}"
            raise PauseEnded(f"{what}{_of(run)}: pause {closings} has ended and cannot be renewed")

    async def resume_adapter(self, run: str | None, name: str, version: str | None) -> None:
        """Open an adapter's gate; an unknown adapter becomes known. `version` is its weight version.

        Without `version`, a paused adapter's version is unknown afterwards. Raises StoreUnavailable, StoreFull.
        """

        def opened(fleet: Fleet) -> FleetEvent | None:
            gate = fleet.gates_of(run).adapters.get(name)
            if gate is None:
                return AdapterResumed(name, 0, "known", version, run=run)
            if not gate.is_shut and version in (None, gate.version):
                return None
            return AdapterResumed(name, gate.closings, version=version, run=run)

        await self._fleet.append(opened)

    async def pause_fleet(self, run: str | None, mode: PauseMode, lease_s: float) -> dict[str, Told]:
        """Shut the fleet's or the run's gate or extend its lease, and tell its engines to pause. Raises as
        `pause_adapter`."""

        def shut(fleet: Fleet) -> FleetEvent:
            gate = fleet.gates_of(run).fleet
            return FleetPaused(_closings(gate), gate.until or 0.0, mode, gate.version, run=run)

        await self._fleet.append(shut, lease_s=lease_s)
        reach("after_gate_shut")
        told = await self._tell_engines(run)
        shared = [member for member in self._engines.serving(run) if member.run is None]
        if run is not None and shared:
            told |= (await self._sweep(run, None, shared)).engines
        return told

    async def resume_fleet(self, run: str | None, version: str | None = None) -> dict[str, Told]:
        """Tell the engines to continue, and open the fleet's or the run's gate even if an engine fails.

        One failing engine must not idle the others; a repeated request tells all again. `version` is the weight version
        of engines that cannot say theirs; without it, that is unknown after a pause. Raises as `pause_adapter`.
        """

        def opened(fleet: Fleet) -> FleetEvent | None:
            gate = fleet.gates_of(run).fleet
            if not gate.is_shut and version in (None, gate.version):
                return None
            return FleetResumed(gate.closings, version=version, run=run)

        if (await self._fleet.refresh()).gates_of(run).fleet.is_shut:
            await self._tell_open(run)
            reach("before_gate_opened")
        await self._fleet.append(opened)
        return await self._tell_engines(run)

    async def adapter(self, run: str | None, name: str) -> AdapterState:
        """Raises NotFound, StoreUnavailable."""
        adapters = [one for one in await self.adapters(run) if one["name"] == name]
        if not adapters:
            raise NotFound("no adapter of this name was ever paused or resumed")
        return adapters[0]

    async def adapters(self, run: str | None) -> list[AdapterState]:
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
                held=_count(held, run, name),
                in_flight=_count(in_flight, run, name),
            )
            for name, gate in sorted(fleet.gates_of(run).adapters.items())
        ]

    async def fleet(self, run: str | None) -> FleetGate:
        """Raises StoreUnavailable."""
        fleet = await self._fleet.refresh()
        in_flight = await self._database.read(store.open_counts)
        gates = fleet.gates_of(run)
        paused_runs = [name for name, of_run in fleet.runs.items() if of_run.fleet.is_shut and run in (None, name)]
        return as_reply(
            FleetGate,
            gates.fleet,
            paused=gates.fleet.is_shut,
            lease_left_s=self._lease_left(gates.fleet),
            held=_count(self.gates.held(), run),
            in_flight=_count(in_flight, run),
            paused_adapters=sorted(name for name, gate in gates.adapters.items() if gate.is_shut),
            paused_runs=sorted(paused_runs),
            version=fleet.version,
            weight_version=gates.fleet.version,
            held_for=next((one.reason for one in fleet.holding(run)), None),
        )

    def _lease_left(self, gate: Gate) -> float | None:
        return round(self._fleet.left(gate), 3) if gate.is_shut else None

    async def _sweep(self, run: str | None, name: str | None, members: Sequence[Member]) -> SweepResult:
        """Abort the generations that a gate holds back, of an adapter or (None) all, at these engines, twice: another
        process may have begun some before it knew of the gate."""

        def gate() -> Gate:
            gates = self._fleet.fleet.gates_of(run)
            return gates.fleet if name is None else gates.adapter(name)

        passed = gate().closings
        outcomes: dict[str, dict[str, str | None]] = {member.url: {} for member in members}
        rids = await self._abort(run, name, outcomes)
        if rids or not self._fleet.is_alone:
            await asyncio.sleep(max(SECOND_SWEEP_S, 2 * self._fleet.stale_s))
            # Turns that passed after a resume are not this pause's business.
            if gate().is_shut and gate().closings == passed:
                rids = list(dict.fromkeys([*rids, *await self._abort(run, name, outcomes)]))
        told: dict[str, Told] = {}
        for url, outcome in outcomes.items():
            error = next((error for error in outcome.values() if error is not None), None)
            told[url] = Told(ok=error is None, error=error, aborted=len(outcome))
        return SweepResult(rids, told)

    async def _abort(self, run: str | None, name: str | None, outcomes: dict[str, dict[str, str | None]]) -> list[str]:
        """Abort at the engine that has a generation, or, if another process sent it, at all of `outcomes` that serve
        its run; returns the rids."""
        claims = await self._database.read(partial(store.generating, run=run, adapter=name))
        rids = []
        orders: dict[str, list[str]] = {}
        for claim in claims:
            rids.append(rid := rid_of(claim.session_id, claim.fence, claim.incarnation))
            engine = self._engines.engine_of(rid)
            serving = [url for url in outcomes if self._engines.may_serve(url, claim.run)]
            for url in serving if engine is None else (engine,):
                orders.setdefault(url, []).append(rid)
        members = self._engines.members
        known = {url: members[url].dialect if url in members else None for url in orders}
        answers = await asyncio.gather(*(self._control.abort(url, some, known[url]) for url, some in orders.items()))
        for url, answer in zip(orders, answers, strict=True):
            outcomes.setdefault(url, {}).update(answer)
        return rids

    def _members(self, run: str | None) -> list[Member]:
        """The engines that are paused with the fleet, or with a run."""
        return [member for member in self._engines.members.values() if run in (None, member.run)]

    async def _tell_engines(self, run: str | None) -> dict[str, Told]:
        """Tell the engines what their gates say, until these have not changed meanwhile."""
        before = self._fleet.fleet
        while True:
            members = self._members(run)
            told = await self._tell(members, before)
            now = await self._fleet.refresh()
            if all(_order(now, member) == _order(before, member) for member in members):
                return told
            before = now

    async def _tell_open(self, run: str | None) -> dict[str, Told]:
        """Tell the engines what their gates will say when that of the fleet or of the run is open."""
        fleet = self._fleet.fleet
        open_then = GateSet(OPEN, fleet.gates_of(run).adapters)
        if run is None:
            fleet = msgspec.structs.replace(fleet, gates=open_then)
        else:
            fleet = msgspec.structs.replace(fleet, runs={**fleet.runs, run: open_then})
        return await self._tell(self._members(run), fleet)

    async def _tell(self, members: Sequence[Member], fleet: Fleet) -> dict[str, Told]:
        """Tell each engine to pause or to continue, as its gates say."""
        control = self._control
        modes = [_order(fleet, one)[-1] for one in members]
        errors = await asyncio.gather(
            *(
                control.resume(one.url, one.dialect) if mode is None else control.pause(one.url, mode, one.dialect)
                for one, mode in zip(members, modes, strict=True)
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
            try:
                async with asyncio.timeout(min(map(self._fleet.left, self._fleet.fleet.shut_gates), default=None)):
                    await self._gates_changed.wait()
                continue
            except TimeoutError:
                pass
            try:
                await self._expire()
            except AppError as error:
                log.warning("a gate whose lease has expired could not be opened yet: %s; retrying", error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("unexpected error while opening a gate whose lease has expired")
                await asyncio.sleep(RETRY_S)

    async def _expire(self) -> None:
        """Raises StoreUnavailable, StoreFull."""
        await self._fleet.read_clock()
        fleet = self._fleet.fleet
        for run in (None, *fleet.runs):
            gates = fleet.gates_of(run)
            for name, gate in gates.adapters.items():
                if gate.is_shut and self._fleet.left(gate) <= 0:
                    await self._expire_adapter(run, name, gate)
            if gates.fleet.is_shut and self._fleet.left(gates.fleet) <= 0:
                await self._expire_fleet(run, gates.fleet)

    async def _expire_adapter(self, run: str | None, name: str, due: Gate) -> None:
        def opened(now: Fleet) -> FleetEvent | None:
            if now.gates_of(run).adapters.get(name) != due:
                return None
            return AdapterResumed(name, due.closings, "lease_expired", run=run)

        if await self._fleet.append(opened) is not None:
            log.warning("adapter %r%s: the pause's lease has expired, its gate is open again", name, _of(run))

    async def _expire_fleet(self, run: str | None, due: Gate) -> None:
        """Every process tells the engines, in case the one that opens the gate dies before it has.

        If a trainer has shut the gate again or extended its lease meanwhile, the engines are told to pause again.
        """
        await self._tell_open(run)
        opened = await self._fleet.append(
            lambda fleet: (
                FleetResumed(due.closings, "lease_expired", run=run) if fleet.gates_of(run).fleet == due else None
            )
        )
        if opened is not None:
            log.warning("the fleet%s: the pause's lease has expired, its gate is open again", _of(run))
        elif not self._fleet.fleet.gates_of(run).fleet.is_shut:
            return
        for url, told in (await self._tell_engines(run)).items():
            if not told["ok"]:
                log.warning("%s could not be told the state of the fleet's gate: %s", url, told["error"])


def _closings(gate: Gate) -> int:
    return gate.closings if gate.is_shut else gate.closings + 1


def _order(fleet: Fleet, member: Member) -> tuple[int, PauseMode | None]:
    """How often the gates at which an engine pauses were shut, and how it pauses now; None: it goes on."""
    gates = [fleet.gates.fleet] if member.run is None else [fleet.gates.fleet, fleet.gates_of(member.run).fleet]
    return sum(gate.closings for gate in gates), next((gate.mode for gate in gates if gate.is_shut), None)


def _count(counts: Mapping[tuple[str, str | None], int], run: str | None, adapter: str | None = None) -> int:
    """The turns of a run and an adapter; None: of any."""
    return sum(count for (one, name), count in counts.items() if run in (None, one) and adapter in (None, name))


def _of(run: str | None) -> str:
    return "" if run is None else f" of run {run}"
