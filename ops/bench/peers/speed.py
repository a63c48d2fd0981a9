"""How fast servers are, in short periods that alternate between them, and what they need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import NamedTuple

from ops.bench.client import Broken
from ops.bench.load import REQUESTED_FIELDS, SIZES, Source, short_turns
from ops.bench.measure import MIB, Figures, alternate, medians, percentile, resident_bytes
from ops.bench.peers.protocol import Peer
from ops.bench.peers.traces import Traces
from ops.bench.primary import Database
from ops.bench.stand import Side, asking, direct_s
from ops.server import OwnProcess

MEMORY_TURNS, MEMORY_CLIENTS = 3200, 64
MEMORY = "MiB after 3,200 turns"
MEMORY_LIMIT_S = 30.0
MEMORY_PERIOD_S = 0.5
WARM_UP_S = 0.5

RATE, CPU, HEALTH, ADDED = "turns/s", "server CPU ms a turn", "health p95 ms", "added p{} ms"


class Running(NamedTuple):
    """A started server, the engine behind it, and the database if that is another process. `start_s`: seconds until it
    answered."""

    peer: Peer
    process: OwnProcess
    engine_url: str
    database: Database | None
    start_s: float

    def side(self, case: Case) -> Side:
        return Side(
            [self.process],
            case.script,
            clients=case.clients,
            turns_per_session=case.turns_per_session,
            opens=self.peer.open,
            database=self.database,
        )


class Case(NamedTuple):
    """A load; `figures` has the names in the table of what is taken from its periods."""

    clients: int
    script: Source
    turns_per_session: int
    figures: Mapping[str, str]


_SMALL = short_turns(2048, 8)._replace(more=REQUESTED_FIELDS)
_LARGE = SIZES["1.3MiB"]
_AGENTS = Traces()
_ADDED = {ADDED.format(percent): ADDED.format(percent) for percent in (50, 99)}
_COSTS = {CPU: "CPU ms a turn", "database CPU ms a turn": "its database's", HEALTH: HEALTH}
_OF_AGENTS = {RATE: "recorded agents, 16 clients: turns/s", CPU: "recorded agents: CPU ms a turn"}
_OF_LARGE = {RATE: "1.3 MiB, 64 clients: turns/s", CPU: "1.3 MiB: CPU ms a turn"}
CASES: Mapping[str, Case] = {
    "1": Case(1, _SMALL, 8, {RATE: "turns/s, 1 client", **_ADDED}),
    "16": Case(16, _SMALL, 8, {RATE: "turns/s, 16 clients"}),
    "64": Case(64, _SMALL, 8, {RATE: "turns/s, 64 clients", **_COSTS}),
    "256": Case(256, _SMALL, 8, {RATE: "turns/s, 256 clients"}),
    "agents": Case(16, _AGENTS, _AGENTS.turns_per_session, _OF_AGENTS),
    "1.3MiB": Case(_LARGE.clients, _LARGE.script(), _LARGE.turns_per_session, _OF_LARGE),
}


async def memory(running: Running) -> Figures:
    """Take MEMORY_TURNS turns, or as many as are done in MEMORY_LIMIT_S. Raises Broken, OSError."""
    load = running._replace(database=None).side(CASES["64"])
    before, turns, until = resident_bytes(running.process.pid), 0, time.monotonic() + MEMORY_LIMIT_S
    seconds = MEMORY_PERIOD_S
    while turns < MEMORY_TURNS and time.monotonic() < until:
        period = await load.run_period(seconds)
        turns += period.turns
        if period.errors and not period.turns:
            break
        pace = period.turns / period.seconds
        seconds = min(MEMORY_PERIOD_S, max(MEMORY_TURNS - turns, MEMORY_CLIENTS) / max(pace, 1.0))
    after = resident_bytes(running.process.pid)
    return {"MiB at the start": before / MIB, MEMORY: after / MIB, "turns": turns}


async def measured(servers: Mapping[str, Running], case: Case, *, rounds: int, seconds: float) -> dict[str, Figures]:
    """The median of each figure of the rounds, for each server; of one that failed, why."""
    sides = {name: running.side(case) for name, running in servers.items()}
    failed: dict[str, Figures] = {}

    async def measure(name: str) -> Figures | None:
        figures = None
        if name not in failed:
            try:
                figures = await _period(servers[name], sides[name], case, seconds)
            except* (Broken, OSError) as errors:
                failed[name] = {"failed": repr(errors.exceptions[0])}
        return figures

    async def warm_up(name: str) -> None:
        try:
            await sides[name].warm_up(min(WARM_UP_S, seconds))
        except* (Broken, OSError) as errors:
            failed[name] = {"failed": repr(errors.exceptions[0])}

    await alternate(sides, 1, warm_up)
    periods = await alternate(sides, rounds, measure)
    found = {}
    for name in servers.keys() - failed.keys():
        middle = medians(periods[name])
        ours = {case.figures[theirs]: value for theirs, value in middle.items() if theirs in case.figures}
        found[name] = {**ours, "errors": sum(one["errors"] for one in periods[name]), "rounds": periods[name]}
    return found | failed


async def _period(running: Running, side: Side, case: Case, seconds: float) -> Figures:
    await side.create_ahead(seconds)
    asked = asking(running.process.base_url, running.peer.health) if HEALTH in case.figures else None
    async with asked or contextlib.nullcontext([]) as health:
        figures = (await side.run_period(seconds)).figures()
    if health:
        figures[HEALTH] = percentile(health, 95) * 1000
    if ADDED.format(50) in case.figures:
        direct = await direct_s(running.engine_url, case.script)
        for percent in (50, 99):
            figures[ADDED.format(percent)] = figures[f"p{percent} ms"] - percentile(direct, percent) * 1000
    return figures
