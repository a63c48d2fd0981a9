"""The fleet as a fold of its log: its engines, and which gates are shut.

State that belongs to no session has one log. Each event has a `key` and holds that key's whole state, so the last event
of each key is enough. A gate holds turns back: the fleet's gate all turns, an adapter's gate its own. `closings` only
grow; comparing them shows later whether a gate was shut meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

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

    `draining`: turns in flight there finish, new ones go elsewhere. `removed`: as if it were not in the settings.
    """

    KEY = ("engine", "url")

    url: str
    state: Literal["serving", "draining", "removed"] = "serving"


class AdapterPaused(FleetEvent, frozen=True):
    """The gate of an adapter is shut, until `until` at the latest (seconds since the epoch, the database's clock)."""

    KEY = ("adapter", "name")

    name: str
    closings: int
    until: float
    version: str | None = None


class AdapterResumed(FleetEvent, frozen=True):
    """The gate of an adapter is open, also initially (`known`). `version` is its weight version, if given."""

    KEY = ("adapter", "name")

    name: str
    closings: int
    reason: Literal["resumed", "lease_expired", "known"] = "resumed"
    version: str | None = None


class FleetPaused(FleetEvent, frozen=True):
    """The gate of the whole fleet is shut; see `AdapterPaused`."""

    KEY = ("fleet", None)

    closings: int
    until: float
    mode: PauseMode = "abort"
    version: str | None = None


class FleetResumed(FleetEvent, frozen=True):
    """The gate of the whole fleet is open. `version` is the weight version of engines that cannot say
    theirs, if given."""

    KEY = ("fleet", None)

    closings: int
    reason: Literal["resumed", "lease_expired"] = "resumed"
    version: str | None = None


class TurnsHeld(FleetEvent, frozen=True):
    """All turns are held back for a checkpoint, until `TurnsFreed`; engines are not told.

    `drain`: it is about to be made; turns with a claim go on. `restore`: the store is being taken back to it, and
    `before` names the checkpoint that keeps the present state. Process `incarnation` does it; if that is dead, another
    one frees the turns after a `drain` and finishes a `restore`.
    """

    KEY = ("checkpoint", None)

    checkpoint: str
    reason: Literal["drain", "restore"]
    incarnation: int
    before: str | None = None


class TurnsFreed(FleetEvent, frozen=True):
    """The turns that were held back for a checkpoint go on."""

    KEY = ("checkpoint", None)

    checkpoint: str


class VersionRegressed(FleetEvent, frozen=True):
    """An engine's weight version went from `before` back to `after`: an old checkpoint, or an update that failed."""

    KEY = ("regressed", "engine")

    engine: str
    before: str
    after: str


class EngineDied(FleetEvent, frozen=True):
    """A process found an engine dead, for this reason; noted for webhooks alone."""

    KEY = ("died", "url")

    url: str
    reason: str


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
    )
}

describe(*TYPES.values())


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


class Regression(msgspec.Struct, frozen=True):
    """An engine's weight version went from `before` back to `after`; noticed at `at`."""

    before: str
    after: str
    at: float


class Fleet(msgspec.Struct, frozen=True):
    """The state after event `version`. `engines` are those set by an operator; `gate` is the fleet's. `died`: when an
    engine was last noted as dead."""

    version: int = 0
    engines: dict[str, EngineListed] = {}
    adapters: dict[str, Gate] = {}
    gate: Gate = OPEN
    regressed: dict[str, Regression] = {}
    held: TurnsHeld | None = None
    died: dict[str, float] = {}

    def gates(self, adapter: str | None) -> tuple[Gate, Gate]:
        """The gates that a turn of this adapter must pass: the fleet's and its own."""
        return self.gate, OPEN if adapter is None else self.adapters.get(adapter, OPEN)

    def is_shut(self, adapter: str | None, *, has_claim: bool = False) -> bool:
        """Must a turn of this adapter wait? A turn that `has_claim` goes on while others drain."""
        if self.gate.until is not None:
            return True
        if self.held is not None and not (has_claim and self.held.reason == "drain"):
            return True
        own = None if adapter is None else self.adapters.get(adapter)
        return own is not None and own.until is not None

    def closings(self, adapter: str | None) -> tuple[int, int]:
        """Compare with a later value to see whether one of these gates was shut meanwhile."""
        fleet, own = self.gates(adapter)
        return fleet.closings, own.closings

    def was_shut_after(self, moment: float) -> bool:
        """Was any gate shut after `moment` (seconds since the epoch), or is it now?"""
        gates = [gate for gate in (self.gate, *self.adapters.values()) if gate.closings]
        return self.held is not None or any(
            gate.is_shut or (gate.since is not None and gate.since > moment) for gate in gates
        )

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
        case AdapterPaused():
            gate = Gate(event.closings, event.until, placed.at, version=event.version)
            changes = {"adapters": {**fleet.adapters, event.name: gate}}
        case AdapterResumed():
            gate = Gate(event.closings, None, placed.at, version=event.version)
            changes = {"adapters": {**fleet.adapters, event.name: gate}}
        case FleetPaused():
            changes = {"gate": Gate(event.closings, event.until, placed.at, event.mode, event.version)}
        case FleetResumed():
            changes = {"gate": Gate(event.closings, None, placed.at, version=event.version)}
        case VersionRegressed():
            regression = Regression(event.before, event.after, placed.at)
            changes = {"regressed": {**fleet.regressed, event.engine: regression}}
        case TurnsHeld():
            changes = {"held": event}
        case TurnsFreed():
            changes = {"held": None}
        case EngineDied():
            changes = {"died": {**fleet.died, event.url: placed.at}}
    return msgspec.structs.replace(fleet, version=placed.seq, **changes)


def fold(events: Iterable[Placed]) -> Fleet:
    """The state after these events, in order; the last of each key is enough."""
    fleet = Fleet()
    for placed in events:
        fleet = apply(fleet, placed)
    return fleet
