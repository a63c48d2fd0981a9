"""Does a turn on PostgreSQL cost the same with 10,000 live sessions as with a hundred?

Sessions are filled in by a real server's own turns, on a PostgreSQL that syncs. At each number of them: turns under
load and what the database looked at for one, first turns of sessions that no process has in memory, the export of
all, and the queries of the sweep and the janitor. Rows that a turn reads in sequential scans would grow with the
number of sessions; rows found by an index, and blocks, may grow with an index's depth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from sqlalchemy import Connection as CoreConnection

from app.store import reads
from app.store import statements as sql
from app.store.engine import Database
from ops.bench.client import Connection
from ops.bench.latency import timed
from ops.bench.load import Conversation, Load, reply_message, short_turns
from ops.bench.measure import cpu_s, foreign_cpu_s, keep, percentile
from ops.bench.primary import Primary, Watch, primary
from ops.bench.stand import cores, folder_for_bench, simulator
from ops.server import ServerProcess

CLIENTS = 64
TURNS = 3
"""Of each session that is filled in."""

TURNS_PER_SESSION = 8
"""Of those that the load adds while it measures."""

REQUEST_BYTES = 2048
KEPT = 256
"""Sessions at each step whose conversation is remembered, so that it can go on."""

WARM_UP_S = 1.0
REPEAT = 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 10_000], help="live ones, step by step")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load at each step")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    places = cores(spread=True)
    with (
        primary(arguments.folder) as database,
        folder_for_bench(arguments.folder) as folder,
        simulator(places) as engine,
    ):
        url = database.new_database()
        server = ServerProcess(folder, upstreams=[engine.base_url], database_url=url).migrate()
        filled = _Filled(server)
        async with Watch.of(url) as watch:
            for count in sorted(arguments.sessions):
                await filled.upto(count)
                await watch.tidy()
                rows.append(await _step(filled, database, watch, arguments))
    print("\n".join(f"{name:<42}" + "".join(f"{_shown(row[name]):>14}" for row in rows) for name in rows[0]))
    print(f"written to {keep('sessions', rows)}")
    return 1 if any(row["errors"] for row in rows) else 0


async def _step(filled: _Filled, database: Primary, watch: Watch, arguments: argparse.Namespace) -> dict[str, Any]:
    size = await watch.database_bytes()
    begun = time.perf_counter()
    with running(filled.server):
        start_s = time.perf_counter() - begun
    before = await watch.scanned()
    with running(filled.server):
        loaded, done = await _load(filled.server, database, arguments.seconds)
    scanned = (await watch.scanned()).since(before)
    with running(filled.server):
        begun_cpu = _Cpu.of(filled.server, database)
        cold = await filled.cold_turns()
        cold_cpu = _Cpu.of(filled.server, database).since(begun_cpu, len(cold))
    with running(filled.server):
        begun_cpu = _Cpu.of(filled.server, database)
        rows, seconds = await _export(filled.server.base_url)
        export_cpu = _Cpu.of(filled.server, database).since(begun_cpu, rows)
    return {
        "sessions": filled.count,
        "database MiB": size / 2**20,
        "process start to /health s": start_s,
        **loaded,
        "rows a turn by sequential scans of": {name: rows / done for name, rows in scanned.sequential.items() if rows},
        "rows a turn by indexes": scanned.by_index / done,
        "blocks a turn, of tables": scanned.table_blocks / done,
        "blocks a turn, of indexes": scanned.index_blocks / done,
        "turn of a session in no memory, p50 ms": percentile(cold, 50) * 1000,
        "server CPU ms of it": cold_cpu.server,
        "database CPU ms of it": cold_cpu.database,
        "export rows/s": rows / seconds,
        "server CPU ms an exported row": export_cpu.server,
        "database CPU ms an exported row": export_cpu.database,
        **await _queries(filled.server.environment["TURNLOG_DATABASE_URL"]),
    }


@contextlib.contextmanager
def running(server: ServerProcess) -> Iterator[None]:
    """For so long; its connections' counters have reached the database when it has stopped."""
    server.start()
    try:
        yield
    finally:
        server.stop()


class _Filled:
    """The live sessions of a store, and how some of their conversations go on."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.count = 0
        self._script = short_turns(REQUEST_BYTES, TURNS)
        self._kept: dict[str, Conversation] = {}

    async def upto(self, count: int) -> None:
        """Sessions of `TURNS` turns until there are so many."""
        names = iter([f"filled-{number}" for number in range(self.count, count)])
        every = max(1, (count - self.count) // KEPT)
        with running(self.server):
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._fill(names, every))
        self.count = count

    async def _fill(self, names: Iterator[str], every: int) -> None:
        async with await Connection.connect(self.server.base_url) as connection:
            for name in names:
                await connection.json("POST", "/sessions", {"session_id": name})
                conversation = self._script.begin()
                for _ in range(TURNS):
                    await self._turn(connection, name, conversation)
                if int(name.rpartition("-")[2]) % every == 0:
                    self._kept[name] = conversation

    async def cold_turns(self) -> list[float]:
        """Seconds of one turn in each of the sessions that are remembered, one after the other, of a new process."""
        names = random.Random(1).sample(sorted(self._kept), min(KEPT, len(self._kept)))
        async with await Connection.connect(self.server.base_url) as connection:
            return [await self._turn(connection, name, self._kept[name]) for name in names]

    async def _turn(self, connection: Connection, name: str, conversation: Conversation) -> float:
        reply, seconds = await timed(connection, f"/sessions/{name}/v1/chat/completions", conversation.body())
        conversation.answered(reply_message(reply))
        return seconds


async def _load(server: ServerProcess, database: Primary, seconds: float) -> tuple[dict[str, Any], int]:
    """Figures of new sessions' turns, and how many turns there were with those of the warm-up."""
    load = Load(
        server.base_url,
        short_turns(REQUEST_BYTES, TURNS_PER_SESSION),
        clients=CLIENTS,
        turns_per_session=TURNS_PER_SESSION,
    )
    await load.create_ahead(CLIENTS)
    await load.run(WARM_UP_S)
    await load.create_ahead(load.answered / WARM_UP_S * seconds)
    before, others = _Cpu.of(server, database), foreign_cpu_s(database.pid)
    tally = await load.run(seconds)
    count = len(tally.latencies) + tally.late
    used, others = _Cpu.of(server, database).since(before, count), foreign_cpu_s(database.pid) - others
    figures = {
        "turns/s": count / tally.seconds,
        "p50 ms": percentile(tally.latencies, 50) * 1000,
        "p99 ms": percentile(tally.latencies, 99) * 1000,
        "server CPU ms a turn": used.server,
        "database CPU ms a turn": used.database,
        "others CPU": others / tally.seconds,
        "errors": sum(tally.errors.values()),
    }
    return figures, load.answered


class _Cpu(NamedTuple):
    """CPU milliseconds of the server and the database up to a moment, or of one thing of many."""

    server: float
    database: float

    @classmethod
    def of(cls, server: ServerProcess, database: Primary) -> _Cpu:
        return cls(cpu_s(server.pid) * 1000, database.cpu_s() * 1000)

    def since(self, before: _Cpu, count: int) -> _Cpu:
        return _Cpu((self.server - before.server) / count, (self.database - before.database) / count)


async def _export(base_url: str) -> tuple[int, float]:
    """Rows of the whole store as NDJSON, and seconds."""
    rows = 0
    began = time.perf_counter()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as session,
        session.get(f"{base_url}/export", raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            rows += piece.count(b"\n")
    return rows, time.perf_counter() - began


class _Query(NamedTuple):
    name: str
    run: Callable[[CoreConnection], object]


async def _queries(url: str) -> dict[str, float]:
    """Milliseconds of what runs beside the traffic: the best of some."""
    long_ago = time.time() - 86400
    queries = (
        _Query("sweep of dead turns", _dead_turns),
        _Query("janitor: closed sessions", lambda c: reads.closed_sessions(c, long_ago, (0.0, ""), 50, holding=True)),
        _Query("janitor: idle sessions, none is", lambda c: reads.idle_sessions(c, long_ago, "", 50)),
        _Query("list of sessions, newest 100", _newest),
        _Query("export's next 64 places", _places),
    )
    database = Database(url)
    try:
        return {f"{query.name}, ms": await _best(database, query) for query in queries}
    finally:
        await database.close()


def _dead_turns(connection: CoreConnection) -> object:
    return connection.execute(sql.dead_open_turns, {"after": "", "most": 200, "lease_s": 8.0}).all()


def _newest(connection: CoreConnection) -> object:
    return reads.list_heads(connection, status="open", group_id=None, before=None, limit=100)


def _places(connection: CoreConnection) -> object:
    return reads.changed_sessions(connection, after=reads.Position(0, 0), upto=reads.END, limit=64)


async def _best(database: Database, query: _Query) -> float:
    times: list[float] = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        await database.read(query.run)
        times.append(time.perf_counter() - began)
    return min(times) * 1000


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:.2f}" for name, count in value.items()) or "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
