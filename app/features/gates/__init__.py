"""Gates: turns are held back while a trainer changes weights, of one adapter or of the whole fleet, in all runs or one.

    routes              `/fleet`, `/adapters`, both also below `/runs/{run}`, SkyRL's names for them, and those of an
                        engine (`engine_routes.py`)
    a turn              waits at a shut gate before its claim, before it is sent, and at the last moment
                        (`TurnPoints.before_claim`, `before_engine`, `may_send`)
    engines             are told to pause, to resume and to abort   (`upstream.control`)
    health checks       an engine behind the fleet's shut gate is paused, not dead   (`domain.fleet`)

The events are in the fleet's log, which the kernel folds (`domain.fleet`); a checkpoint's drain and restore hold turns
at the same gates, with their own event. Without this feature, and without checkpoints, a turn asks no gate.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from app.domain.fleet import AdapterResumed, Fleet, FleetEvent, FleetResumed
from app.errors import AppError
from app.metrics import Family

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.gates.gates import Gates
    from app.features.gates.pauses import Pauses
    from app.services import Services

log = logging.getLogger("turnlog.pauses")

METRICS = (
    Family("turnlog_turns_gated", "gauge", "Turns that wait at a gate until a pause ends."),
    Family("turnlog_gates_shut", "largest", "Gates that hold turns back.", "scope", ("fleet", "adapter")),
    Family(
        "turnlog_gate_shut_seconds",
        "largest",
        "How long the first of the shut gates has been shut; 0 if none is.",
        "scope",
        ("fleet", "adapter"),
    ),
)


def entries() -> list[Route]:
    from app.features.gates import engine_routes, routes

    return [*routes.route.entries, *routes.skyrl.entries, *engine_routes.route.entries]


def add_to(services: Services) -> Pauses:
    from app.features.gates.pauses import Pauses

    gates = in_turns(services)
    pauses = Pauses(
        fleet=services.fleet,
        gates=gates,
        engines=services.engines,
        control=services.control,
        database=services.database,
    )

    def refresh() -> None:
        shut = gates.shut_s()
        services.metrics.set("turnlog_turns_gated", gates.held().total())
        services.metrics.set_all("turnlog_gates_shut", {scope: len(times) for scope, times in shut.items()})
        services.metrics.set_all(
            "turnlog_gate_shut_seconds", {scope: max(times, default=0.0) for scope, times in shut.items()}
        )

    services.starts.append(pauses.start)
    services.turn_ends.append(pauses.stop)
    services.refreshes.append(refresh)
    return pauses


def in_turns(services: Services) -> Gates:
    """New gates at which this process's turns wait. Also for checkpoints, where this feature is off."""
    from app.features.gates.gates import Gates

    gates = Gates(services.fleet)
    services.points.before_claim.append(gates.arrive)
    services.points.before_engine.append(gates.pass_again)
    services.points.may_send.append(gates.try_pass)
    services.waits.append(gates.stop)
    return gates


async def absent(services: Services) -> None:
    """Forget what only this feature keeps up to date: pauses, whose leases nobody ends, and reported versions."""
    fleet = services.fleet.fleet
    try:
        for run in (None, *fleet.runs):
            gates = fleet.gates_of(run)
            for name, gate in gates.adapters.items():
                if gate.is_shut or gate.version is not None:
                    await services.fleet.append(partial(_opened, run, name))
            if gates.fleet.is_shut or gates.fleet.version is not None:
                await services.fleet.append(partial(_opened, run, None))
    except AppError as error:
        log.warning("gates that an earlier process left shut could not be opened: %s", error)


def _opened(run: str | None, name: str | None, fleet: Fleet) -> FleetEvent:
    gates = fleet.gates_of(run)
    if name is None:
        return FleetResumed(gates.fleet.closings, run=run)
    return AdapterResumed(name, gates.adapter(name).closings, run=run)
