"""`turnlog serve --workers N`: sessions whose turns come over one connection each, and over any connection of a pool.

Over any connection a turn reaches any process, which may not have the session in memory. PostgreSQL, the servers, the
engine simulator and the clients share all cores, so the figures to compare are those of CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.bench.client import Connection
from ops.bench.filling import Turns
from ops.bench.measure import cpu_s, percentile, save_figures, table
from ops.bench.postgres import REPORT_DELAY_S, TURNS_PER_SESSION
from ops.bench.primary import Primary, counted, primary
from ops.bench.sessions import Script, error_code, short_turns
from ops.bench.stand import Cores, folder_for_bench, simulator
from ops.server import PORT, OwnProcess, ServerProcess
from ops.simulator.process import SimulatorProcess

WARM_UP_S = 2.0
PATHS = ("own", "any")
"""The connection of a session's turns: its own, or any of the pool."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--connections", type=int, help="of the pool; by default one for each client")
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)


async def main(arguments: argparse.Namespace) -> int:
    everywhere = Cores(os.sched_getaffinity(0), os.sched_getaffinity(0))
    script = short_turns(arguments.request_bytes, TURNS_PER_SESSION)
    rows: list[dict[str, Any]] = []
    with primary(arguments.folder) as database, simulator(everywhere) as engine:
        for number in range(arguments.rounds):
            for workers in arguments.workers:
                found = await _measure(database, engine, workers, arguments, script)
                rows += [{"round": number + 1, "workers": workers, **row} for row in found]
    table(rows)
    save_figures(f"workers-{arguments.clients}x{arguments.request_bytes}", rows)
    return 1 if any(row["errors"] for row in rows) else 0


class Workers(OwnProcess):
    """`turnlog serve --workers N`."""

    def __init__(self, server: ServerProcess, workers: int, folder: Path) -> None:
        command = [sys.executable, "-m", "turnlog.cli", "serve", "--port", PORT, "--workers", str(workers)]
        super().__init__(command, folder / f"workers-{workers}.log", environment=server.environment)


async def _measure(
    database: Primary, engine: SimulatorProcess, workers: int, arguments: argparse.Namespace, script: Script
) -> list[dict[str, Any]]:
    url = database.new_database()
    rows: list[dict[str, Any]] = []
    with folder_for_bench(arguments.folder) as folder:
        settings = ServerProcess(folder, upstreams=[engine.base_url], database_url=url)
        for path in PATHS:
            with Workers(settings, workers, folder) as server:
                async with _Pool(server.base_url, script, arguments, path) as load:
                    await load.run(WARM_UP_S)
                    before, cpu, own = await counted(url), database.cpu_s(), cpu_s(server.pid)
                    found = await load.run(arguments.seconds)
                    cpu, own = database.cpu_s() - cpu, cpu_s(server.pid) - own
                    await asyncio.sleep(REPORT_DELAY_S)
                    grown = (await counted(url)).since(before)
                turns = max(len(found.latencies), 1)
                rows.append(
                    {
                        "connection": path,
                        "turns/s": turns / found.seconds,
                        "p50 ms": percentile(found.latencies, 50) * 1000,
                        "p99 ms": percentile(found.latencies, 99) * 1000,
                        "server CPU ms a turn": own * 1000 / turns,
                        "database CPU ms a turn": cpu * 1000 / turns,
                        "transactions a turn": grown.commits / turns,
                        "errors": sum(load.errors.values()),
                    }
                )
    return rows


class _Pool:
    """So many sessions at a time as there are clients, over the connections of a pool."""

    def __init__(self, base_url: str, script: Script, arguments: argparse.Namespace, path: str) -> None:
        self.errors: dict[str, int] = {}
        self._base_url = base_url
        self._script = script
        self._clients: int = arguments.clients
        self._connections: int = max(arguments.connections or 0, arguments.clients)
        self._is_shared = path == "any"
        self._name = f"{path}-{time.time_ns()}"
        self._names: Iterator[int] = itertools.count()
        self._idle: asyncio.Queue[Connection] = asyncio.Queue()
        self._until = 0.0

    async def __aenter__(self) -> _Pool:
        for _ in range(self._connections):
            self._idle.put_nowait(await Connection.connect(self._base_url))
        return self

    async def __aexit__(self, *raised: object) -> None:
        while not self._idle.empty():
            self._idle.get_nowait().close()

    async def run(self, seconds: float) -> Turns:
        found = Turns()
        began = time.perf_counter()
        self._until = began + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(found))
        found.seconds = time.perf_counter() - began
        return found

    async def _client(self, found: Turns) -> None:
        connection = await self._idle.get()
        while time.perf_counter() < self._until:
            name = f"{self._name}-{next(self._names)}"
            await connection.json("POST", "/sessions", {"session_id": name})
            conversation = self._script.begin()
            while conversation.turns < TURNS_PER_SESSION and time.perf_counter() < self._until:
                if self._is_shared:
                    self._idle.put_nowait(connection)
                    connection = await self._idle.get()
                began = time.perf_counter()
                body = conversation.body()
                response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", body)
                if response.status != 200:
                    code = f"{response.status} {error_code(response.body)}"
                    self.errors[code] = self.errors.get(code, 0) + 1
                    break
                found.latencies.append(time.perf_counter() - began)
                conversation.answered(self._script.wire.added(response.body))
        self._idle.put_nowait(connection)
