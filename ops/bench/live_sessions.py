"""Many live sessions on PostgreSQL, payloads in a bucket: sizes and costs, beside what `ops.scale` predicts.

The sessions are created by turns through the real server. The same is measured with a small number of sessions before
and after, which gives this machine's times to the prediction: also of turns whose sessions are all missing in the
cache. PostgreSQL, the S3 server, the server, the engine simulator and the clients share all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import httpx
import msgspec

from app.store import reads
from app.store.engine import Database
from ops import scale
from ops.bench.filling import EXPERTS, Filling, Turns, TurnShape, session_name
from ops.bench.measure import cpu_s, percentile, resident_bytes, save_figures, table
from ops.bench.payloads import S3Server
from ops.bench.postgres import REPORT_DELAY_S
from ops.bench.primary import Primary, counted, plain_url, primary
from ops.bench.stand import Cores, folder_for_bench, simulator
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

MIB = 1 << 20
POLL_S = 0.1

ROOMY_CACHE_BYTES = 256 * MIB
"""A cache that has room for the sessions of a small store."""

SMALL_CACHE_BYTES = MIB
"""A cache that has room for the sessions whose turns are in flight, and little more."""

WARM_UP_S = 3.0

EXPORTED_ROWS = 10_000
"""Small stores are exported as often as it takes to read so many rows."""

BASE_EXPORTS = 5
"""Exports of one session."""

QUERIES = 9

_SIZES = """
SELECT sum(pg_relation_size(c.oid))::bigint AS rows, sum(pg_indexes_size(c.oid))::bigint AS indexes,
       coalesce(sum(pg_total_relation_size(nullif(c.reltoastrelid, 0))), 0)::bigint AS toast
FROM pg_class c WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""
_CHECKPOINTS = "SELECT num_done FROM pg_stat_checkpointer"
_CLOSED = "SELECT session_id FROM sessions WHERE status = 'closed'"
_SIZE = re.compile(r"<Size>(\d+)</Size>")
_NEXT = re.compile(r"<NextContinuationToken>([^<]+)<")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=2000, help="sessions of the small stores")
    parser.add_argument("--turns", type=int, default=2, help="turns of each session")
    parser.add_argument("--new-tokens", type=int, default=150, help="new tokens of a turn's prompt")
    parser.add_argument("--output-tokens", type=int, default=50)
    parser.add_argument("--clients", type=int, default=128, help="clients that fill")
    parser.add_argument("--load-clients", type=int, default=16, help="clients of the measured turns")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured turns, and of the janitor's closing")
    parser.add_argument("--cache-mib", type=float, default=256.0, help="session cache of the server, in MiB")
    parser.add_argument("--fill-minutes", type=float, help="measure what is there after this time")


async def main(arguments: argparse.Namespace) -> int:
    everywhere = Cores(os.sched_getaffinity(0), os.sched_getaffinity(0))
    with (
        primary(arguments.folder) as database,
        simulator(everywhere) as engine,
        folder_for_bench(arguments.folder) as folder,
        S3Server(folder) as s3,
    ):
        before, whole, after = [
            _Stand(database, engine, s3, folder, name, arguments) for name in ("before", "whole", "after")
        ]
        samples = [await before.sample(arguments.sample)]
        found = await whole.measure(arguments.sessions)
        samples.append(await after.sample(arguments.sample))
    run = scale.Run(whole.fleet(found), samples, found)
    table(run.compared())
    others = [name for name in found if name not in scale.predict(run.fleet, scale.Costs())]
    table([{"figure": name, "samples": [one[name] for one in samples], "measured": found[name]} for name in others])
    save_figures(f"sessions-{arguments.sessions}", msgspec.to_builtins(run))
    return 1 if found["errors"] else 0


class _Stand:
    """The servers, and the sessions so far."""

    def __init__(
        self,
        database: Primary,
        engine: SimulatorProcess,
        s3: S3Server,
        folder: Path,
        name: str,
        arguments: argparse.Namespace,
    ) -> None:
        self._database = database
        self._s3 = s3
        self._arguments = arguments
        self._prefix = name
        self._url = database.new_database()
        self._cache_bytes = int(arguments.cache_mib * MIB) if name == "whole" else ROOMY_CACHE_BYTES
        environment = {
            **s3.bucket(),
            "TURNLOG_PAYLOADS": f"s3://payloads/{name}",
            "TURNLOG_REPLAY": "routed_experts",
            "TURNLOG_MOE_LAYERS": str(EXPERTS["layers"]),
            "TURNLOG_MOE_TOPK": str(EXPERTS["top_k"]),
            "TURNLOG_CACHE_BYTES": str(self._cache_bytes),
        }
        make = partial(ServerProcess, folder, upstreams=[engine.base_url], database_url=self._url)
        self._server = make(environment=environment).migrate()
        missing = {**environment, "TURNLOG_CACHE_BYTES": str(SMALL_CACHE_BYTES)}
        self._missing = make(environment=missing, port=self._server.port)
        self._closing = make(environment={**environment, "TURNLOG_IDLE_CLOSE_S": "1"})
        self._shape = TurnShape(arguments.new_tokens, arguments.output_tokens)
        self._filling = Filling(self._server.base_url, self._shape, arguments.turns, arguments.clients)

    def fleet(self, measured: Mapping[str, Any]) -> scale.Fleet:
        """What was filled, as the calculator's input."""
        turns = measured["filling: turns"] / measured["sessions"]
        bits = math.log2(EXPERTS["experts"])
        return scale.Fleet(
            sessions=measured["sessions"],
            turns=turns,
            new_tokens=measured["tokens a session"] / turns - self._shape.output_tokens,
            output_tokens=self._shape.output_tokens,
            payload_bytes=EXPERTS["layers"] * EXPERTS["top_k"] * bits / 8,
            cache_bytes=self._cache_bytes,
            load_turns=measured["turns"],
            checkpoints=measured["filling: checkpoints"],
        )

    async def sample(self, count: int) -> dict[str, Any]:
        """As `measure`, and the same turns on a server whose cache misses all of their sessions."""
        figures = await self.measure(count)
        with self._missing:
            await self._filling.run(WARM_UP_S, self._arguments.load_clients)
            await self._checkpoint()
            found = await self._load(self._missing)
        return {**figures, **{f"{scale.MISSED}{name}": value for name, value in found.items()}}

    async def measure(self, count: int) -> dict[str, Any]:
        """Fill up to `count` sessions and measure."""
        minutes = self._arguments.fill_minutes
        until = None if minutes is None else time.monotonic() + 60 * minutes
        with self._server:
            filled = await self._fill(count, until)
            figures = {"sessions": self._filling.count, **filled, **await self._sizes(), **_cached(self._server)}
            figures |= await self._load(self._server)
            figures |= await self._export()
            figures |= await self._restart()
        figures |= await self._queries()
        return {**figures, **await self._janitor(), "errors": self._filling.errors}

    async def _fill(self, count: int, until: float | None) -> dict[str, Any]:
        before = await self._value(_CHECKPOINTS)
        found, used = await self._measured(self._server, self._filling.fill_up_to(count, until))
        turns = len(found.latencies)
        return {
            "filling: turns": turns,
            "filling: turns/s": turns / found.seconds,
            "filling: checkpoints": await self._value(_CHECKPOINTS) - before,
            "tokens a session": self._filling.tokens / max(self._filling.count, 1),
            **{f"filling: {name}": value for name, value in used.items()},
        }

    async def _value(self, query: str) -> int:
        connection = await asyncpg.connect(plain_url(self._url))
        try:
            found: int = await connection.fetchval(query)
            return found
        finally:
            await connection.close()

    async def _load(self, server: ServerProcess) -> dict[str, Any]:
        """Turns of random sessions."""
        arguments = self._arguments
        before = _lookups(server)
        found, used = await self._measured(server, self._filling.run(arguments.seconds, arguments.load_clients))
        hits, misses = (after - earlier for after, earlier in zip(_lookups(server), before, strict=True))
        return {
            "turns": len(found.latencies),
            "turns/s": len(found.latencies) / found.seconds,
            "turns that miss the cache": misses / max(hits + misses, 1),
            **_latency(found),
            **used,
        }

    async def _measured(
        self, server: ServerProcess, turns: Coroutine[Any, Any, Turns]
    ) -> tuple[Turns, dict[str, float]]:
        """What the turns cost each."""
        before = await counted(self._url), self._cpu_ms(server)
        found = await turns
        cpu = {name: after - before[1][name] for name, after in self._cpu_ms(server).items()}
        await asyncio.sleep(REPORT_DELAY_S)
        grown = (await counted(self._url)).since(before[0])
        count = max(len(found.latencies), 1)
        return found, {
            **{f"{name} CPU ms a turn": ms / count for name, ms in cpu.items()},
            "WAL KiB a turn": grown.wal_bytes / count / 1024,
            "full pages of it KiB": grown.full_pages * 8 / count,
            "transactions a turn": grown.commits / count,
        }

    def _cpu_ms(self, server: ServerProcess) -> dict[str, float]:
        return {
            "server": cpu_s(server.pid) * 1000,
            "database": self._database.cpu_s() * 1000,
            "storage": cpu_s(self._s3.pid) * 1000,
        }

    async def _checkpoint(self) -> None:
        connection = await asyncpg.connect(plain_url(self._url))
        try:
            await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    async def _sizes(self) -> dict[str, Any]:
        await self._checkpoint()
        connection = await asyncpg.connect(plain_url(self._url))
        try:
            rows, indexes, toast = await connection.fetchrow(_SIZES)
        finally:
            await connection.close()
        objects = _objects(self._s3.base_url, self._prefix)
        return {
            "database MiB": (rows + indexes + toast) / MIB,
            "of it indexes MiB": indexes / MIB,
            "bucket MiB": sum(objects) / MIB,
            "objects": len(objects),
        }

    async def _export(self) -> dict[str, Any]:
        """The whole export, and one of a single session, while turns go on."""
        url = f"{self._server.base_url}/export"
        one = f"{url}?session_id={session_name(0)}"
        whole = max(1, EXPORTED_ROWS // self._filling.count)
        stop = asyncio.Event()
        going_on = asyncio.create_task(self._filling.run_until(stop, self._arguments.load_clients))
        try:
            await _download(one)  # the first one imports what exports need
            base = [await _download(one) for _ in range(BASE_EXPORTS)]
            cpu = cpu_s(self._server.pid)
            found = [await _download(url) for _ in range(whole)]
            cpu = cpu_s(self._server.pid) - cpu
        finally:
            stop.set()
        seconds = sum(one.seconds for one in found)
        turns = await going_on
        return {
            "export of one s": fmean(one.seconds for one in base),
            "export s": seconds / whole,
            "export rows": found[0].lines,
            "export MiB": fmean(one.size for one in found) / MIB,
            "export: turns/s meanwhile": len(turns.latencies) / turns.seconds,
            "export: server CPU": cpu / seconds,
            **{f"export: {name} meanwhile": value for name, value in _latency(turns).items()},
            "server's memory then MiB": resident_bytes(self._server.pid) / MIB,
        }

    async def _restart(self) -> dict[str, Any]:
        """After `kill -9`."""
        self._server.kill()
        began = time.perf_counter()
        self._server.start()
        up = time.perf_counter() - began
        await self._filling.first_turn()
        turn = time.perf_counter() - began
        return {
            "restart until /health s": up,
            "restart until a turn s": turn,
            "memory after a restart MiB": resident_bytes(self._server.pid) / MIB,
        }

    async def _queries(self) -> dict[str, Any]:
        """Milliseconds of the janitor's search for idle sessions, if there are none: the best of some."""
        database = Database(self._url)
        times: list[float] = []
        search = partial(reads.idle_sessions, since=time.time() - 86400, after="", limit=50)
        try:
            for _ in range(QUERIES):
                began = time.perf_counter()
                await database.read(search)
                times.append((time.perf_counter() - began) * 1000)
        finally:
            await database.close()
        return {"janitor: no idle session, ms": min(times)}

    async def _janitor(self) -> dict[str, Any]:
        """Close idle sessions for a moment. The closed ones are not among the live sessions any more."""
        seconds = self._arguments.seconds
        connection = await asyncpg.connect(plain_url(self._url))
        try:
            with self._closing:
                before = known = len(await connection.fetch(_CLOSED))
                while before == known:
                    await asyncio.sleep(POLL_S)
                    before = len(await connection.fetch(_CLOSED))
                await asyncio.sleep(seconds)
                after = len(await connection.fetch(_CLOSED))
            closed = [row[0] for row in await connection.fetch(_CLOSED)]
        finally:
            await connection.close()
        self._filling.forget(closed)
        return {"janitor: sessions closed a second": (after - before) / seconds}


def _latency(found: Turns) -> dict[str, float]:
    return {f"p{percent} ms": percentile(found.latencies, percent) * 1000 for percent in (50, 99)}


def _objects(base_url: str, prefix: str) -> list[int]:
    """Sizes of the objects of one store."""
    sizes: list[int] = []
    token: str | None = ""
    while token is not None:
        query = {"list-type": "2", "prefix": f"{prefix}/", **({"continuation-token": token} if token else {})}
        text = httpx.get(f"{base_url}/payloads", params=query, timeout=60).raise_for_status().text
        sizes += map(int, _SIZE.findall(text))
        found = _NEXT.search(text)
        token = found[1] if found else None
    return sizes


class _Download(NamedTuple):
    """Bytes and lines of a reply, and the seconds that it took."""

    size: int
    lines: int
    seconds: float


async def _download(url: str) -> _Download:
    size = lines = 0
    began = time.perf_counter()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=MIB) as session,
        session.get(url, raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            size += len(piece)
            lines += piece.count(b"\n")
    return _Download(size, lines, time.perf_counter() - began)


def _cached(server: ServerProcess) -> dict[str, float]:
    """Memory of a session in the server's cache."""
    size, count = _metrics(server, "turnlog_cache_bytes", "turnlog_cache_sessions")
    return {"cache: KiB a session": size / max(count, 1) / 1024}


def _lookups(server: ServerProcess) -> list[float]:
    """How often a turn found its session's messages in the cache, and how often it had to read them."""
    return _metrics(
        server, 'turnlog_cache_hits_total{content="messages"}', 'turnlog_cache_misses_total{content="messages"}'
    )


def _metrics(server: ServerProcess, *names: str) -> list[float]:
    """Of a metric that is not there yet, 0."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).raise_for_status().text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return [float(found.get(name, 0.0)) for name in names]
