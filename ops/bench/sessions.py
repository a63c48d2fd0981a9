"""Many live sessions on PostgreSQL, replay payloads in a bucket: sizes, memory, and what a turn costs.

The sessions are created by turns through the real server; then random ones of them go on. PostgreSQL, the S3 server,
the server, the engine simulator and the clients share all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import httpx
import msgspec

from ops.bench.client import Broken, Connection
from ops.bench.load import Conversation, Tally, error_code, opening_messages, question_bytes, reply_message
from ops.bench.measure import MIB, Figures, cpu_s, percentile, report, resident_bytes
from ops.bench.payloads import S3Server
from ops.bench.primary import Database, primary
from ops.bench.stand import Cores, folder_for_bench, simulator
from ops.server import ServerProcess

EXPERTS = {"layers": 4, "top_k": 2, "experts": 64}
"""Shape of a token's routing payload: 8 ids, stored as 8 bytes before compression."""

KEPT = 16384
"""Sessions whose conversation is remembered, so that they can go on: more than are continued in one measurement, so
that none is found in a cache because it was continued a moment ago."""

QUESTIONS = 64
RETRIES = 5

_SIZES = """
SELECT sum(pg_total_relation_size(c.oid))::bigint, sum(pg_indexes_size(c.oid))::bigint
FROM pg_class c WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=2, help="turns of each session")
    parser.add_argument("--new-tokens", type=int, default=150, help="new tokens of a turn's prompt")
    parser.add_argument("--output-tokens", type=int, default=50)
    parser.add_argument("--clients", type=int, default=128, help="clients that fill")
    parser.add_argument("--load-clients", type=int, default=16, help="clients of the measured turns")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured turns")
    parser.add_argument("--cache-mib", type=float, default=256.0, help="session cache of the server, in MiB")


async def main(arguments: argparse.Namespace) -> int:
    everywhere = Cores(os.sched_getaffinity(0), os.sched_getaffinity(0))
    with (
        primary(arguments.folder) as postgres,
        simulator(everywhere) as engine,
        folder_for_bench(arguments.folder) as folder,
        S3Server(folder) as s3,
    ):
        database = postgres.new_database()
        environment = {
            **s3.bucket(),
            "TURNLOG_REPLAY": "routed_experts",
            "TURNLOG_MOE_LAYERS": str(EXPERTS["layers"]),
            "TURNLOG_MOE_TOPK": str(EXPERTS["top_k"]),
            "TURNLOG_CACHE_BYTES": str(int(arguments.cache_mib * MIB)),
        }
        upstreams = [engine.base_url]
        server = ServerProcess(folder, upstreams=upstreams, database_url=database.url, environment=environment)
        sessions = _Sessions(server.migrate().base_url, arguments)
        with server:
            figures = await _measured("filling: ", server, database, sessions.fill(arguments.sessions))
            await database.row("CHECKPOINT")
            size, indexes = await database.row(_SIZES)
            figures |= {"database MiB": size / MIB, "of it indexes MiB": indexes / MIB, **_cached(server)}
            figures["server's memory MiB"] = resident_bytes(server.pid) / MIB
            figures |= await _measured("", server, database, sessions.go_on())
            figures |= await _restarted(server, sessions)
    report(f"sessions-{arguments.sessions}", {**figures, "errors": sessions.errors})
    return 1 if sessions.errors else 0


class _Sessions:
    """The live sessions of a server. Their ids are in no order, as those of real sessions. `errors`: replies that were
    repeated."""

    def __init__(self, base_url: str, arguments: argparse.Namespace) -> None:
        self.errors = 0
        self._base_url = base_url
        self._arguments = arguments
        self._rng = random.Random(1)
        output = arguments.output_tokens
        self._sim = msgspec.json.encode(
            {"completion_tokens": output, "tool_calls": False, "reasoning": False, "experts": EXPERTS}
        )
        size = question_bytes(arguments.new_tokens)
        self._questions = [opening_messages(size, seed=number)[0] for number in range(QUESTIONS)]
        self._kept: dict[str, Conversation] = {}

    async def fill(self, count: int) -> Tally:
        """Create the sessions, each with its turns."""
        turns, numbers = Tally(), iter(range(count))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._arguments.clients):
                group.create_task(self._fill(numbers, turns))
        turns.seconds = time.perf_counter() - began
        return turns

    async def _fill(self, numbers: Iterator[int], turns: Tally) -> None:
        async with await Connection.connect(self._base_url) as connection:
            for number in numbers:
                # as random as a server's own id, so that neighbours in an index are not neighbours in time
                name = f"live-{hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()}"
                await connection.json("POST", "/sessions", {"session_id": name})
                conversation = Conversation([self._question(number)], self._sim)
                for _ in range(self._arguments.turns):
                    await self._turn(connection, name, conversation, turns)
                # reservoir sampling: each session is as likely to be kept
                if len(self._kept) < KEPT or self._rng.randrange(number) < KEPT:
                    self._kept[name] = conversation
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]

    async def go_on(self) -> Tally:
        """Further turns of random sessions; at most one client uses a session at a time."""
        names = sorted(self._kept)
        self._rng.shuffle(names)
        turns = Tally()
        clients, began = self._arguments.load_clients, time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._go_on(names[number::clients], turns, began + self._arguments.seconds))
        turns.seconds = time.perf_counter() - began
        return turns

    async def _go_on(self, names: Sequence[str], turns: Tally, until: float) -> None:
        async with await Connection.connect(self._base_url) as connection:
            while names:
                for name in names:
                    if time.perf_counter() >= until:
                        return
                    await self._turn(connection, name, self._kept[name], turns)

    async def first_turn(self) -> None:
        """A further turn of one session."""
        name = self._rng.choice(sorted(self._kept))
        async with await Connection.connect(self._base_url) as connection:
            await self._turn(connection, name, self._kept[name], Tally())

    async def _turn(self, connection: Connection, name: str, conversation: Conversation, turns: Tally) -> None:
        body = conversation.body()
        for attempt in range(RETRIES):
            began = time.perf_counter()
            response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", body)
            if response.status == 200:
                turns.latencies.append(time.perf_counter() - began)
                conversation.answered(reply_message(response.body), self._question(conversation.turns + 1))
                return
            self.errors += 1
            await asyncio.sleep(0.1 * 2**attempt)
        raise Broken(f"session {name}: {response.status} {error_code(response.body)}")

    def _question(self, number: int) -> bytes:
        return self._questions[number % QUESTIONS]


async def _measured(
    name: str, server: ServerProcess, database: Database, running: Coroutine[Any, Any, Tally]
) -> Figures:
    """What the turns cost each."""
    hits = _lookups(server)
    async with database.work() as works:
        cpu = cpu_s(server.pid)
        turns = await running
        cpu = cpu_s(server.pid) - cpu
    hits = [after - earlier for after, earlier in zip(_lookups(server), hits, strict=True)]
    count = max(len(turns.latencies), 1)
    figures = {
        "turns": count,
        "turns/s": count / turns.seconds,
        "p50 ms": percentile(turns.latencies, 50) * 1000,
        "p99 ms": percentile(turns.latencies, 99) * 1000,
        "server CPU ms a turn": cpu * 1000 / count,
        **works[0].figures(count),
        "full pages of its WAL KiB": works[0].full_pages * 8 / count,
        "turns that miss the cache": hits[1] / max(sum(hits), 1),
    }
    return {f"{name}{what}": value for what, value in figures.items()}


async def _restarted(server: ServerProcess, sessions: _Sessions) -> Figures:
    """After `kill -9`."""
    server.kill()
    began = time.perf_counter()
    server.start()
    up = time.perf_counter() - began
    await sessions.first_turn()
    return {
        "restart until /health s": up,
        "restart until a turn s": time.perf_counter() - began,
        "memory after a restart MiB": resident_bytes(server.pid) / MIB,
    }


def _cached(server: ServerProcess) -> dict[str, float]:
    """Memory of a session in the server's cache."""
    size, count = _metrics(server, "turnlog_cache_bytes", "turnlog_cache_sessions")
    return {"cache: KiB a session": size / max(count, 1) / 1024}


def _lookups(server: ServerProcess) -> list[float]:
    """How often a turn found its session's messages in the cache, and how often it had to read them."""
    name = 'turnlog_cache_{}_total{{content="messages"}}'
    return _metrics(server, name.format("hits"), name.format("misses"))


def _metrics(server: ServerProcess, *names: str) -> list[float]:
    """Of a metric that is not there yet, 0."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).raise_for_status().text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return [float(values.get(name, 0.0)) for name in names]
