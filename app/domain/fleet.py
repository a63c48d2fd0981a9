"""The fleet as a fold of its log: its engines, and which gates are shut.

State that belongs to no session has one log. Each event has a `key` and holds that key's whole state, so the last event
of each key is enough. A gate holds turns back: the fleet's gate all turns, an adapter's gate its own. A run has such
gates for its own turns alone. `closings` only grow; comparing them shows later whether a gate was shut meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from app.domain.events import Event
from workers.codec import describe

PauseMode = Literal["abort", "in_place", "retract"]
"""What engines do with running generations: SGLang's `/pause_generation`."""


class FleetEvent(Event, frozen=True):
    """The base of the events in the fleet's log. `KEY`: what the event is of, and the field that says which one."""

    KEY: ClassVar[tuple[str, str | None]]

    @property
    def key(self) -> str:
        what, which = self.KEY
        return what if which is None else f"{what}:{getattr(self, which)}"


class EngineListed(FleetEvent, frozen=True):
    """An operator's setting for an engine. It overrides the server's settings and clears a weight version regression.

    `draining`: turns in flight there finish, new ones go elsewhere. `removed`: as if it were not in the settings. With
    `run` it serves that run alone, which then goes to no other engine, also when its own are removed.
    """

    KEY = ("engine", "url")

    url: str
    state: Literal["serving", "draining", "removed"] = "serving"
    run: str | None = None


class GateEvent(FleetEvent, frozen=True, kw_only=True):
    """The base of the events of gates. `run`: the gate holds that run's turns alone; None: those of all runs."""

    run: str | None = None

    @property
    def key(self) -> str:
        key = super().key
        return key if self.run is None else f"run:{self.run}/{key}"


class AdapterPaused(GateEvent, frozen=True):
    """The gate of an adapter is shut, until `until` at the latest (seconds since the epoch, the database's clock)."""

    KEY = ("adapter", "name")

    name: str
    closings: int
    until: float
    version: str | None = None


class AdapterResumed(GateEvent, frozen=True):
    """The gate of an adapter is open, also initially (`known`). `version` is its weight version, if given."""

    KEY = ("adapter", "name")

    name: str
    closings: int
    reason: Literal["resumed", "lease_expired", "known"] = "resumed"
    version: str | None = None


class FleetPaused(GateEvent, frozen=True):
    """The gate of the whole fleet, or of a run, is shut; see `AdapterPaused`."""

    KEY = ("fleet", None)

    closings: int
    until: float
    mode: PauseMode = "abort"
    version: str | None = None


class FleetResumed(GateEvent, frozen=True):
    """The gate of the whole fleet, or of a run, is open. `version` is the weight version of engines that
    cannot say theirs, if given."""

    KEY = ("fleet", None)

    closings: int
    reason: Literal["resumed", "lease_expired"] = "resumed"
    version: str | None = None


class TurnsHeld(GateEvent, frozen=True):
    """All turns, or those of a run, are held back for a checkpoint, until `TurnsFreed`; engines are not told.

    `drain`: it is about to be made; turns with a claim go on. `restore`: they are being taken back to it, and
    `before` names the checkpoint that keeps the present state. Process `incarnation` does it; if that is dead, another
    one frees the turns after a `drain` and finishes a `restore`.
    """

    KEY = ("checkpoint", None)

    checkpoint: str
    reason: Literal["drain", "restore"]
    incarnation: int
    before: str | None = None


class TurnsFreed(GateEvent, frozen=True):
    """The turns that were held back for a checkpoint go on."""

    KEY = ("checkpoint", None)

    checkpoint: str


class VersionRegressed(FleetEvent, frozen=True):
    """An engine's weight version went from `before` back to `after`: an old checkpoint, or an update that failed."""

    KEY = ("regressed", "engine")

    engine: str
    before: str
    after: str
    run: str | None = None


class EngineDied(FleetEvent, frozen=True):
    """A process found an engine dead, for this reason; noted for webhooks alone."""

    KEY = ("died", "url")

    url: str
    reason: str
    run: str | None = None


class PublicUrlSet(FleetEvent, frozen=True):
    """The address at which agents elsewhere reach the server, until `until` by the database's clock; None: it was taken
    back."""

    KEY = ("public_url", None)

    url: str | None
    until: float = 0.0


TYPES: dict[str, type[FleetEvent]] = {
    cls.__name__: cls
    for cls in (
        EngineListed,
        AdapterPaused,
        AdapterResumed,
        FleetPaused,
        FleetResumed,
        VersionRegressed,
        TurnsHeld,
        TurnsFreed,
        EngineDied,
        PublicUrlSet,
    )
}

describe(*TYPES.values())


class EngineVersions(NamedTuple):
    """The newest numeric weight versions that engines have: `own` of the runs with engines of their own, `shared` of
    those that serve the others."""

    own: Mapping[str, int | None] = {}
    shared: int | None = None

    def of(self, run: str) -> int | None:
        return self.own.get(run, self.shared)


class Placed(msgspec.Struct, frozen=True):
    """An event with its position: `seq` counts from 1 without a gap, `at` is the database's clock."""

    seq: int
    at: float
    event: FleetEvent


class Gate(msgspec.Struct, frozen=True):
    """`until` None: open. `closings` counts how often it was shut. `since` is when it last changed."""

    closings: int = 0
    until: float | None = None
    since: float | None = None
    mode: PauseMode | None = None
    version: str | None = None

    @property
    def is_shut(self) -> bool:
        return self.until is not None


OPEN = Gate()


class GateSet(msgspec.Struct, frozen=True):
    """The gates of the whole fleet, or of a run: one for all turns, `fleet`, and those of adapters."""

    fleet: Gate = OPEN
    adapters: dict[str, Gate] = {}

    def adapter(self, name: str | None) -> Gate:
        return OPEN if name is None else self.adapters.get(name, OPEN)

    @property
    def all(self) -> list[Gate]:
        return [self.fleet, *self.adapters.values()]


ALL_OPEN = GateSet()


class Regression(msgspec.Struct, frozen=True):
    """An engine's weight version went from `before` back to `after`; noticed at `at`."""

    before: str
    after: str
    at: float


Closings = tuple[int, int, int, int]
"""How often the fleet's gate, its adapter's, the run's and its adapter's had been shut when a turn passed them."""


class Fleet(msgspec.Struct, frozen=True):
    """The state after event `version`. `engines` are those set by an operator; `gates` those of the whole fleet, `runs`
    the gates of runs that have been paused or resumed. `held`: for which checkpoints turns are held, by run; None: all
    turns are. `died`: when an engine was last noted as dead. `public_url`: as it was last set; its lease may have run
    out."""

    version: int = 0
    engines: dict[str, EngineListed] = {}
    gates: GateSet = ALL_OPEN
    runs: dict[str, GateSet] = {}
    regressed: dict[str, Regression] = {}
    held: dict[str | None, TurnsHeld] = {}
    died: dict[str, float] = {}
    public_url: PublicUrlSet | None = None

    def gates_of(self, run: str | None) -> GateSet:
        """The gates of a run's turns alone; None: those of all turns."""
        return self.gates if run is None else self.runs.get(run, ALL_OPEN)

    def is_shut(self, run: str, adapter: str | None, *, has_claim: bool = False) -> bool:
        """Must a turn of this run and adapter wait? A turn that `has_claim` goes on while others drain."""
        if self.gates.fleet.until is not None:
            return True
        if self.held and any(not (has_claim and one.reason == "drain") for one in self.holding(run)):
            return True
        own = self.runs.get(run, ALL_OPEN)
        if own.fleet.until is not None:
            return True
        return adapter is not None and (self.gates.adapter(adapter).is_shut or own.adapter(adapter).is_shut)

    def holding(self, run: str | None) -> list[TurnsHeld]:
        """For which checkpoints turns of this run are held; None: of any."""
        return [one for of, one in self.held.items() if run is None or of in (None, run)]

    def closings(self, run: str, adapter: str | None) -> Closings:
        """Compare with a later value to see whether one of these gates was shut meanwhile."""
        own = self.runs.get(run, ALL_OPEN)
        if adapter is None:
            return self.gates.fleet.closings, 0, own.fleet.closings, 0
        every = self.gates
        return every.fleet.closings, every.adapter(adapter).closings, own.fleet.closings, own.adapter(adapter).closings

    def at_engine(self, run: str | None) -> tuple[int, bool]:
        """Of the gates behind which the weights of an engine change, which serves this run or (None) several: how often
        they were shut, and whether one is."""
        own = [gates.fleet for gates in self.runs.values()] if run is None else [self.gates_of(run).fleet]
        gates = [self.gates.fleet, *own]
        return sum(gate.closings for gate in gates), any(gate.is_shut for gate in gates)

    def is_engine_paused(self, run: str | None) -> bool:
        """Is an engine that serves this run, or (None) several, told to pause?"""
        return self.gates.fleet.is_shut or (run is not None and self.gates_of(run).fleet.is_shut)

    def version_of(self, run: str | None) -> str | None:
        """The weight version that a trainer gave for engines that cannot say theirs: the run's, else that of all."""
        own = self.gates_of(run).fleet.version
        return self.gates.fleet.version if own is None else own

    def adapter_version(self, run: str, name: str) -> str | None:
        """The weight version of an adapter: the run's, else that of all."""
        own = self.runs.get(run, ALL_OPEN).adapter(name).version
        return self.gates.adapter(name).version if own is None else own

    def knows_adapters(self, run: str) -> bool:
        return bool(self.gates.adapters) or bool(self.runs.get(run, ALL_OPEN).adapters)

    def knows_adapter(self, run: str, name: str) -> bool:
        """Was the adapter ever paused or resumed, for all runs or for this one?"""
        return name in self.gates.adapters or name in self.runs.get(run, ALL_OPEN).adapters

    @property
    def shut_gates(self) -> list[Gate]:
        """All gates that are shut."""
        return [gate for gates in (self.gates, *self.runs.values()) for gate in gates.all if gate.is_shut]

    def shut_after(self, moment: float) -> set[str | None]:
        """The runs of which a gate was shut after `moment` (seconds since the epoch), or is now; None: one of all runs
        was."""
        gates = [(run, gate) for run, of_one in ((None, self.gates), *self.runs.items()) for gate in of_one.all]
        shut = {run for run, gate in gates if gate.closings and (gate.is_shut or (gate.since or 0.0) > moment)}
        return shut | self.held.keys()

    @property
    def owners(self) -> set[str]:
        """The runs that have engines of their own, also removed ones: they go to no others."""
        return {engine.run for engine in self.engines.values() if engine.run is not None}

    def members(self, base_urls: tuple[str, ...]) -> list[EngineListed]:
        """The engines: those in the settings and those that an operator added, without removed ones."""
        by_url = {url: EngineListed(url) for url in base_urls} | self.engines
        return [engine for engine in by_url.values() if engine.state != "removed"]


def apply(fleet: Fleet, placed: Placed) -> Fleet:
    """The state one event later; events of other keys may be missing in between."""
    event = placed.event
    changes: dict[str, Any] = {}
    match event:
        case EngineListed():
            others = {url: regression for url, regression in fleet.regressed.items() if url != event.url}
            changes = {"engines": {**fleet.engines, event.url: event}, "regressed": others}
        case AdapterPaused() | AdapterResumed():
            until = event.until if isinstance(event, AdapterPaused) else None
            gates = fleet.gates_of(event.run)
            gate = Gate(event.closings, until, placed.at, version=event.version)
            changes = _with(fleet, event.run, GateSet(gates.fleet, {**gates.adapters, event.name: gate}))
        case FleetPaused():
            gate = Gate(event.closings, event.until, placed.at, event.mode, event.version)
            changes = _with(fleet, event.run, GateSet(gate, fleet.gates_of(event.run).adapters))
        case FleetResumed():
            gate = Gate(event.closings, None, placed.at, version=event.version)
            changes = _with(fleet, event.run, GateSet(gate, fleet.gates_of(event.run).adapters))
        case VersionRegressed():
            regression = Regression(event.before, event.after, placed.at)
            changes = {"regressed": {**fleet.regressed, event.engine: regression}}
        case TurnsHeld():
            changes = {"held": {**fleet.held, event.run: event}}
        case TurnsFreed():
            changes = {"held": {run: held for run, held in fleet.held.items() if run != event.run}}
        case EngineDied():
            changes = {"died": {**fleet.died, event.url: placed.at}}
        case PublicUrlSet():
            changes = {"public_url": event}
    return msgspec.structs.replace(fleet, version=placed.seq, **changes)


def _with(fleet: Fleet, run: str | None, gates: GateSet) -> dict[str, Any]:
    return {"gates": gates} if run is None else {"runs": {**fleet.runs, run: gates}}


def fold(events: Iterable[Placed]) -> Fleet:
    """The state after these events, in order; the last of each key is enough."""
    fleet = Fleet()
    for placed in events:
        fleet = apply(fleet, placed)
    return fleet
