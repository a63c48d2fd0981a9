"""How fast servers are, in short periods that alternate between them, and what they need."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from ops.bench.client import Broken, Connection
from ops.bench.load import REQUESTED_FIELDS, SIZES, Source, short_turns, timed_turn
from ops.bench.measure import percentile, resident_bytes
from ops.bench.peers.protocol import Peer
from ops.bench.peers.traces import Traces
from ops.bench.primary import Database
from ops.bench.stand import Side
from ops.server import OwnProcess

MEMORY_TURNS, MEMORY_CLIENTS = 3200, 64
MEMORY = "MiB after 3,200 turns"
MEMORY_LIMIT_S = 30.0
MEMORY_PERIOD_S = 0.5
DIRECT_TURNS = 60
"""Requests to the engine itself after each period of a single client."""

HEALTH_INTERVAL_S = 0.02
WARM_UP_S = 0.5


class Running(NamedTuple):
    """A started server, the engine behind it, and the database if that is another process."""

    peer: Peer
    process: OwnProcess
    engine_url: str
    database: Database | None


class Case(NamedTuple):
    """A load; `figures` has the names in the table of what is taken from its periods."""

    clients: int
    script: Source
    turns_per_session: int
    figures: Mapping[str, str]
    with_direct: bool = False
    with_health: bool = False


_SMALL = short_turns(2048, 8)._replace(more=REQUESTED_FIELDS)
_LARGE = SIZES["1.3MiB"]
_AGENTS = Traces()
CASES: Mapping[str, Case] = {
    "1": Case(
        1,
        _SMALL,
        8,
        {"turns/s": "turns/s, 1 client", "added p50 ms": "added p50 ms", "added p99 ms": "added p99 ms"},
        with_direct=True,
    ),
    "16": Case(16, _SMALL, 8, {"turns/s": "turns/s, 16 clients"}),
    "64": Case(
        64,
        _SMALL,
        8,
        {
            "turns/s": "turns/s, 64 clients",
            "server CPU ms a turn": "CPU ms a turn",
            "database CPU ms a turn": "its database's",
            "health p95 ms": "health p95 ms",
        },
        with_health=True,
    ),
    "256": Case(256, _SMALL, 8, {"turns/s": "turns/s, 256 clients"}),
    "agents": Case(
        16,
        _AGENTS,
        _AGENTS.turns_per_session,
        {"turns/s": "recorded agents, 16 clients: turns/s", "server CPU ms a turn": "recorded agents: CPU ms a turn"},
    ),
    "1.3MiB": Case(
        _LARGE.clients,
        _LARGE.script(),
        _LARGE.turns_per_session,
        {"turns/s": "1.3 MiB, 64 clients: turns/s", "server CPU ms a turn": "1.3 MiB: CPU ms a turn"},
    ),
}

Figures = dict[str, Any]


def side(running: Running, case: Case) -> Side:
    return Side(
        [running.process],
        case.script,
        clients=case.clients,
        turns_per_session=case.turns_per_session,
        opens=running.peer.open,
        database=running.database,
    )


async def memory(running: Running) -> Figures:
    """Take MEMORY_TURNS turns, or as many as are done in MEMORY_LIMIT_S. Raises Broken, OSError."""
    load = side(running._replace(database=None), CASES["64"])
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
    return {"MiB at the start": before / 2**20, MEMORY: after / 2**20, "turns": turns}


async def measured(servers: Mapping[str, Running], case: Case, *, rounds: int, seconds: float) -> dict[str, Figures]:
    """The median of each figure of the rounds, for each server; of one that failed, why."""
    sides = {name: side(running, case) for name, running in servers.items()}
    periods: dict[str, list[Figures]] = defaultdict(list)
    failed: dict[str, Figures] = {}
    for number in range(-1, rounds):
        for name in sorted(sides.keys() - failed.keys(), reverse=number % 2 == 1):
            try:
                if number < 0:
                    await sides[name].warm_up(min(WARM_UP_S, seconds))
                else:
                    periods[name].append(await _period(servers[name], sides[name], case, seconds))
            except* (Broken, OSError) as errors:
                failed[name] = {"failed": repr(errors.exceptions[0])}
    return {
        name: {
            ours: statistics.median(one[theirs] for one in own)
            for theirs, ours in case.figures.items()
            if theirs in own[0]
        }
        | {"errors": sum(one["errors"] for one in own), "rounds": own}
        for name, own in periods.items()
        if name not in failed
    } | failed


async def _period(running: Running, side: Side, case: Case, seconds: float) -> Figures:
    await side.create_ahead(seconds)
    health: list[float] = []
    async with _asking_health(running, health) if case.with_health else contextlib.nullcontext():
        figures = (await side.run_period(seconds)).figures()
    if case.with_health:
        figures["health p95 ms"] = percentile(health, 95) * 1000
    if case.with_direct:
        direct = await _direct_s(running.engine_url, case.script)
        for percent in (50, 99):
            figures[f"added p{percent} ms"] = figures[f"p{percent} ms"] - percentile(direct, percent) * 1000
    return figures


@contextlib.asynccontextmanager
async def _asking_health(running: Running, seconds: list[float]) -> AsyncIterator[None]:
    """Ask the server's lightest route again and again meanwhile; `seconds` gets the time of each."""

    async def ask() -> None:
        async with await Connection.connect(running.process.base_url) as connection:
            while True:
                began = time.perf_counter()
                await connection.request("GET", running.peer.health)
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(HEALTH_INTERVAL_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


async def _direct_s(engine_url: str, script: Source) -> Sequence[float]:
    """Latencies of the same requests at the engine itself."""
    async with await Connection.connect(engine_url) as connection:
        body = next(script.dialogues()).body()
        return [(await timed_turn(connection, script.wire.route, body))[1] for _ in range(DIRECT_TURNS)]
