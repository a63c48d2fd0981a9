"""Turns per second on PostgreSQL with several API processes, compared with SQLite and with plain commits.

One run measures all of them in sequence on one disk, with a PostgreSQL that syncs. Database, servers, simulator and
clients share all cores, or the database has some of its own (`--database-cores`). Their CPU figures show which is the
limit: `ceiling` is the turns a second at which the CPU of the database would be used up, on its own cores or on one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from sqlalchemy import func, select

from app.store.engine import Database
from app.store.schema import turns
from ops.bench.measure import percentile, save_figures, table
from ops.bench.primary import SETTINGS, Primary, counted, plain_url, primary
from ops.bench.sessions import Script, short_turns
from ops.bench.stand import Cores, Side, folder_for_bench, pinned, simulator, started
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

TURNS_PER_SESSION = 8
BARE_SETUP = (
    "CREATE TABLE IF NOT EXISTS bare (id bigint GENERATED ALWAYS AS IDENTITY, data bytea NOT NULL)",
    "ALTER TABLE bare ALTER COLUMN data SET STORAGE EXTERNAL",
)
BARE_INSERT = "INSERT INTO bare (data) SELECT unnest($1::bytea[])"
REPORT_DELAY_S = 1.0
"""PostgreSQL's backends report their counters within this time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--database-cores", type=int, default=0, help="cores that only the database has; 0: it shares all"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--connections", type=int, nargs="+", default=[1, 16, 64], help="connections for the plain commits"
    )


async def main(arguments: argparse.Namespace) -> int:
    print("PostgreSQL with", ", ".join(f"{name}={value}" for name, value in SETTINGS.items()))
    allowed = sorted(os.sched_getaffinity(0))
    own = allowed[: arguments.database_cores]
    rest = set(allowed[len(own) :])
    everywhere = Cores(rest, rest)
    script = short_turns(arguments.request_bytes, TURNS_PER_SESSION)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        with pinned(set(own or allowed)):
            database = stack.enter_context(primary(arguments.folder))
        engine = stack.enter_context(simulator(everywhere))
        url = database.new_database()
        bare = [await _plain_commits(database, url, count, 1, arguments) for count in arguments.connections]
        bare.append(await _plain_commits(database, url, 16, 16, arguments))
        table(bare)
        for number in range(arguments.rounds):
            for count in (None, *arguments.processes):
                store = None if count is None else database
                row = await measure_turns(store, engine, count or 1, arguments, everywhere, script)
                rows.append({"round": number + 1, **row})
    best = max(float(row["commits/s"]) for row in bare[:-1])
    rows = [{**row, "ceiling": _ceiling(row, len(own)), "of bare commits": row["turns/s"] / best} for row in rows]
    table(rows)
    name = f"postgres-{arguments.clients}x{arguments.request_bytes}" + (f"-own{len(own)}" if own else "")
    save_figures(name, {"settings": SETTINGS, "bare": bare, "turns": rows})
    return 1 if any(row["errors"] or row["recorded"] != row["answered"] for row in rows) else 0


def _ceiling(row: Mapping[str, Any], cores: int) -> float | None:
    """Turns a second at which the database's CPU would be used up."""
    each = row["database ms/turn"]
    return None if each is None else max(cores, 1) * 1000 / each


async def _plain_commits(
    database: Primary, url: str, connections: int, rows: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure durable inserts through plain connections, without HTTP, engine or log: the upper limit for turns."""
    opened = [await asyncpg.connect(plain_url(url)) for _ in range(connections)]
    data = [os.urandom(arguments.request_bytes)] * rows
    latencies: list[float] = []
    try:
        for statement in BARE_SETUP:
            await opened[0].execute(statement)
        before, cpu = await counted(url), database.cpu_s()
        began = time.perf_counter()
        until = began + arguments.seconds / 2

        async def client(insert: asyncpg.prepared_stmt.PreparedStatement) -> None:
            while (asked := time.perf_counter()) < until:
                await insert.fetch(data)
                latencies.append(time.perf_counter() - asked)

        await asyncio.gather(*[client(await one.prepare(BARE_INSERT)) for one in opened])
        took, cpu = time.perf_counter() - began, database.cpu_s() - cpu
    finally:
        for one in opened:
            await one.close()
    grown = (await counted(url)).since(before)
    return {
        "connections": connections,
        "rows": rows,
        "commits/s": len(latencies) / took,
        "p50 ms": percentile(latencies, 50) * 1000,
        "p99 ms": percentile(latencies, 99) * 1000,
        "commits a sync": grown.commits / max(grown.syncs, 1),
        "database ms/commit": cpu * 1000 / max(len(latencies), 1),
    }


async def measure_turns(
    database: Primary | None,
    engine: SimulatorProcess,
    processes: int,
    arguments: argparse.Namespace,
    cpu_sets: Cores,
    script: Script,
    turns_per_session: int = TURNS_PER_SESSION,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure turns; returns a row of the table. `database` None means SQLite."""
    url = None if database is None else database.new_database()
    with folder_for_bench(arguments.folder) as folder, contextlib.ExitStack() as stack:
        servers = [
            ServerProcess(folder, upstreams=[engine.base_url], database_url=url, environment=environment)
            for _ in range(processes)
        ]
        servers[0].migrate()
        for server in servers:
            stack.enter_context(started(server, cpu_sets))
        side = Side(servers, script, clients=arguments.clients, turns_per_session=turns_per_session)
        await side.warm_up()
        await side.create_ahead(arguments.seconds)
        before = None if url is None else await counted(url)
        cpu = 0.0 if database is None else database.cpu_s()
        found = await side.run_period(arguments.seconds)
        row = {"store": "SQLite" if url is None else "PostgreSQL", "processes": processes, **found.figures()}
        if database is not None and url is not None and before is not None:
            used = database.cpu_s() - cpu
            row["database ms/turn"] = used * 1000 / max(found.turns, 1)
            row["database CPU"] = used / found.seconds
            await asyncio.sleep(REPORT_DELAY_S)
            grown = (await counted(url)).since(before)
            row["transactions a turn"] = grown.commits / max(found.turns, 1)
            row["WAL KiB a turn"] = grown.wal_bytes / max(found.turns, 1) / 1024
        else:
            row.update(dict.fromkeys(("database ms/turn", "database CPU", "transactions a turn", "WAL KiB a turn")))
        return {**row, "answered": side.answered, "recorded": await _committed_turns(servers)}


async def _committed_turns(servers: Sequence[ServerProcess]) -> int:
    """The number of committed turns in the store."""
    database = Database(servers[0].environment["TURNLOG_DATABASE_URL"])
    try:
        return await database.read(lambda c: c.execute(select(func.count()).select_from(turns)).scalar_one())
    finally:
        await database.close()
