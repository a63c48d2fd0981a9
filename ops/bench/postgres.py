"""Turns a second on PostgreSQL with several API processes, beside SQLite and the bare database's own commits.

One run measures all of them, one after the other, on one disk and a PostgreSQL that syncs. Nothing is pinned:
database, servers, simulator and clients share all cores, and the CPU of each says which of them is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import func, select

from app.store.engine import Database
from app.store.schema import turns
from ops.bench import commits
from ops.bench.load import Load, Tally, short_turns
from ops.bench.measure import cpu_s, foreign_cpu_s, keep, percentile, table
from ops.bench.primary import SETTINGS, Counted, Primary, Watch, primary
from ops.bench.profile import top_frames
from ops.bench.stand import Cores, folder_for_bench, simulator
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

TURNS_PER_SESSION = 8
WARM_UP_S = 2.0
PROFILE_S = 6.0
LOOK_EVERY_S = 0.05
WAITS_SHOWN = 8
GROUPED = ((16, 16), (4, 64))
"""Connections, and rows a transaction, of the bare database's grouped commits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4, 16, 64], help="of the bare commits")
    parser.add_argument("--only-postgres", action="store_true", help="neither SQLite nor the bare commits")
    parser.add_argument("--profile", action="store_true", help="afterwards, sample a server under the same load")
    parser.add_argument("--folder", type=Path, help="where the databases are put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    print("PostgreSQL with", ", ".join(f"{name}={value}" for name, value in SETTINGS.items()))
    print(f"{len(os.sched_getaffinity(0))} cores for all; CPU is in cores: 1.0 is one of them, busy all the time\n")
    bare: list[dict[str, Any]] = []
    found: list[_Measured] = []
    everywhere = Cores(os.sched_getaffinity(0), os.sched_getaffinity(0))
    with primary(arguments.folder) as database, simulator(everywhere) as engine:
        if not arguments.only_postgres:
            bare = await _bare_commits(database, arguments)
            table(bare)
            found.append(await _sqlite(engine, arguments))
        for count in arguments.processes:
            found.append(await _postgres(database, engine, count, arguments))  # noqa: PERF401 - one after the other
    rows = [{**one.row, **_beside(one.row, bare)} for one in found]
    print()
    table(rows)
    for one in found:
        print(f"\n{one.row['store']}, {one.row['processes']} processes")
        print("\n".join(f"  {line}" for line in one.more))
    figures = {"settings": SETTINGS, "bare": bare, "turns": rows, "more": [one.more for one in found]}
    print(f"\nwritten to {keep(f'postgres-{arguments.clients}x{arguments.request_bytes}', figures)}")
    return 1 if any(row["errors"] or row["recorded"] != row["answered"] for row in rows) else 0


async def _bare_commits(database: Primary, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What the database does without Turnlog: rows of a request's size, one by one and grouped."""
    url = database.new_database()
    rows: list[dict[str, Any]] = []
    async with Watch.of(url) as watch:
        for connections, grouped in [*((count, 1) for count in arguments.connections), *GROUPED]:
            before, cpu = await watch.counted(), database.cpu_s()
            done = await commits.elsewhere(
                url,
                connections=connections,
                rows=grouped,
                row_bytes=arguments.request_bytes,
                seconds=arguments.seconds / 2,
            )
            cpu, counted = database.cpu_s() - cpu, (await watch.counted()).since(before)
            rows.append(
                {
                    "connections": connections,
                    "rows": grouped,
                    "commits/s": done.commits_per_s,
                    "rows/s": done.commits_per_s * grouped,
                    "p50 ms": done.p50_ms,
                    "p99 ms": done.p99_ms,
                    "commits a sync": counted.commits / max(counted.syncs, 1),
                    "database ms/commit": cpu * 1000 / counted.commits,
                    "database CPU": cpu / (done.seconds + commits.WARM_UP_S),
                    "client CPU": done.cpu_s / done.seconds,
                }
            )
    return rows


def _beside(row: dict[str, Any], bare: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How turns compare with the bare commits.

    `of the ceiling` is turns a second by commits a second, though the ceiling had all cores to itself and its client,
    and the turns share them with servers, simulator and clients. `by database CPU` is what the database would
    do of turns, by what it would do of commits, where it has its cores to itself.
    """
    if not bare:
        return {}
    best = max((one for one in bare if one["rows"] == 1), key=lambda one: float(one["commits/s"]))
    database_ms = row["database ms/turn"]
    return {
        "of the ceiling": row["turns/s"] / best["commits/s"],
        "by database CPU": None if database_ms is None else best["database ms/commit"] / database_ms,
    }


class _Measured(NamedTuple):
    """A line of the table, and what is said of it below."""

    row: dict[str, Any]
    more: list[str]


async def _sqlite(engine: SimulatorProcess, arguments: argparse.Namespace) -> _Measured:
    with folder_for_bench(arguments.folder) as folder:
        servers = [ServerProcess(folder, upstreams=[engine.base_url])]
        async with _Fleet.started(servers, engine, None, arguments) as fleet:
            return await fleet.measured(None, folder)


async def _postgres(
    database: Primary, engine: SimulatorProcess, processes: int, arguments: argparse.Namespace
) -> _Measured:
    url = database.new_database()
    with folder_for_bench(arguments.folder) as folder:
        servers = [ServerProcess(folder, upstreams=[engine.base_url], database_url=url) for _ in range(processes)]
        async with _Fleet.started(servers, engine, database, arguments) as fleet, Watch.of(url) as watch:
            return await fleet.measured(watch, folder)


class _Used(NamedTuple):
    """CPU seconds of each who takes part, up to a moment or in between."""

    servers: float
    database: float
    simulator: float
    clients: float
    others: float

    def since(self, before: _Used) -> _Used:
        return _Used(*(after - earlier for after, earlier in zip(self, before, strict=True)))


class _Fleet:
    """API processes on one store, and the clients that are spread over them."""

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        engine: SimulatorProcess,
        database: Primary | None,
        arguments: argparse.Namespace,
    ) -> None:
        self._servers = servers
        self._engine = engine
        self._database = database
        self._arguments = arguments
        script = short_turns(arguments.request_bytes, TURNS_PER_SESSION)
        share, more = divmod(arguments.clients, len(servers))
        self._loads = [
            Load(server.base_url, script, clients=share + (number < more), turns_per_session=TURNS_PER_SESSION)
            for number, server in enumerate(servers)
        ]

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        servers: Sequence[ServerProcess],
        engine: SimulatorProcess,
        database: Primary | None,
        arguments: argparse.Namespace,
    ) -> AsyncIterator[_Fleet]:
        servers[0].migrate()
        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            yield cls(servers, engine, database, arguments)

    async def measured(self, watch: Watch | None, folder: Path) -> _Measured:
        """Warm up, measure, count what was committed, and profile where that is wanted."""
        await self._create_ahead(self._arguments.clients)
        warm, took = await self._load(WARM_UP_S)
        pace = _turns(warm) / took
        await self._create_ahead(pace * self._arguments.seconds)
        counted, used = await watch.counted() if watch else None, self._used()
        async with _looking(watch):
            tallies, took = await self._load(self._arguments.seconds)
        used = self._used().since(used)
        more = [f"{count} times {what}" for tally in tallies for what, count in tally.errors.items()]
        if watch is not None and counted is not None:
            more += _said((await watch.counted()).since(counted), watch.waits, _turns(tallies))
        row = {**self._row(tallies, used, took), "recorded": await self._recorded()}
        if self._arguments.profile:
            more += await self._profile(pace, folder)
        return _Measured(row, more)

    def _row(self, tallies: Sequence[Tally], used: _Used, took: float) -> dict[str, Any]:
        count = _turns(tallies)
        latencies = [latency for tally in tallies for latency in tally.latencies]
        return {
            "store": "SQLite" if self._database is None else "PostgreSQL",
            "processes": len(self._servers),
            "turns/s": count / took,
            "p50 ms": percentile(latencies, 50) * 1000,
            "p99 ms": percentile(latencies, 99) * 1000,
            "server ms/turn": used.servers * 1000 / max(count, 1),
            "database ms/turn": used.database * 1000 / max(count, 1) if self._database else None,
            "servers CPU": used.servers / took,
            "database CPU": used.database / took if self._database else None,
            "simulator CPU": used.simulator / took,
            "clients CPU": used.clients / took,
            "others CPU": used.others / took,
            "errors": sum(sum(tally.errors.values()) for tally in tallies),
            "answered": sum(load.answered for load in self._loads),
        }

    def _used(self) -> _Used:
        pids = [self._engine.pid, *(server.pid for server in self._servers)]
        if self._database is None:
            base, everyone = 0.0, pids
        else:
            base, everyone = self._database.cpu_s(), [*pids, self._database.pid]
        engine, *servers = map(cpu_s, pids)
        return _Used(sum(servers), base, engine, time.process_time(), foreign_cpu_s(*everyone))

    async def _create_ahead(self, count: float) -> None:
        await asyncio.gather(*(load.create_ahead(count / len(self._loads)) for load in self._loads))

    async def _load(self, seconds: float) -> tuple[list[Tally], float]:
        """All clients at work, and how long that was."""
        tallies = await asyncio.gather(*(load.run(seconds) for load in self._loads))
        return tallies, max(tally.seconds for tally in tallies)

    async def _recorded(self) -> int:
        """Rows of committed turns."""
        database = Database(self._servers[0].environment["TURNLOG_DATABASE_URL"])
        try:
            return await database.read(lambda c: c.execute(select(func.count()).select_from(turns)).scalar_one())
        finally:
            await database.close()

    async def _profile(self, pace: float, folder: Path) -> list[str]:
        await self._create_ahead(pace * PROFILE_S)
        running = asyncio.create_task(self._load(PROFILE_S + 1))
        frames = await top_frames(self._servers[0].pid, PROFILE_S, folder)
        await running
        return frames


def _turns(tallies: Sequence[Tally]) -> int:
    """All that ended, also those that were in flight when the time was over."""
    return sum(len(tally.latencies) + tally.late for tally in tallies)


@contextlib.asynccontextmanager
async def _looking(watch: Watch | None) -> AsyncIterator[None]:
    """Look at what the backends wait for, meanwhile."""
    if watch is None:
        yield
        return

    async def look() -> None:
        while True:
            await watch.look()
            await asyncio.sleep(LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _said(counted: Counted, waits: dict[str, int], count: int) -> list[str]:
    """What the database counted, by turns, and where its backends were seen."""
    seen = sum(waits.values())
    common = sorted(waits.items(), key=lambda item: -item[1])[:WAITS_SHOWN]
    return [
        f"transactions a turn {counted.commits / max(count, 1):.3f}, turns a sync {count / max(counted.syncs, 1):.1f}",
        f"WAL a turn {counted.wal_bytes / max(count, 1) / 1024:.1f} KiB in {counted.wal_records / max(count, 1):.0f} "
        f"records, of which full pages {counted.full_pages / max(count, 1):.2f}",
        f"backends at work: {', '.join(f'{what} {many / max(seen, 1):.0%}' for what, many in common)}",
    ]
