"""How fast `/export` gives a full store in each format, in how much memory, beside the plain read of the same bytes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from sqlalchemy import Connection, text

from app.store.engine import Database
from app.store.schema import sessions
from ops.bench import client
from ops.bench.latency import timed
from ops.bench.load import Conversation, opening_messages
from ops.bench.measure import cpu_s, foreign_cpu_s, keep, table
from ops.bench.profile import top_frames
from ops.bench.sampler import Sampler
from ops.bench.sizes import MIB
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, simulator
from ops.bench.stored import StoredTurn, write_sessions
from ops.server import ServerProcess
from workers import codec
from workers.codec import Facts, Wire

FORMS = (
    "ndjson turnlog",
    "parquet turnlog",
    "safetensors turnlog",
    "msgpack turnlog",
    "ndjson slime",
    "parquet slime",
    "ndjson trl",
    "parquet trl",
)
AIMS = {"ndjson": 0.25, "parquet": 0.5, "safetensors": 0.5}
"""Of the plain read's pace."""

AIM_MIB = 300

POOL = 2048
"""Different turns, of which sessions are put together: more than a Parquet row group holds, or it would compress
what only the benchmark repeats."""

QUESTION_BYTES_PER_TOKEN = 4.9
"""Of the simulator's vocabulary, about."""

TEMPLATE_TOKENS = 10
PAGE = 64
"""Sessions read at a time by the plain read, as an export does."""

READS = (
    "SELECT * FROM sessions WHERE session_id BETWEEN :first AND :last",
    "SELECT session_id, seq, at, type, version, data FROM events WHERE session_id BETWEEN :first AND :last "
    "ORDER BY session_id, seq",
    "SELECT session_id, turn, facts, wire FROM turns WHERE session_id BETWEEN :first AND :last",
    "SELECT session_id, number, data FROM blobs WHERE session_id BETWEEN :first AND :last",
)
PROFILE_S = 8.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10, help="of each session")
    parser.add_argument("--tokens", type=int, default=500, help="of each turn: half new prompt, half output")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="format and shape")
    parser.add_argument("--profile", action="store_true", help="afterwards, sample the server during each export again")
    parser.add_argument("--spread", action="store_true", help="all processes on both cores; else the server has one")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    places = cores(arguments.spread)
    with folder_for_bench(arguments.folder) as folder, simulator(places) as engine:
        count = min(POOL, arguments.sessions * arguments.turns)
        pool = await _pool(folder, engine.base_url, places, arguments.tokens, count)
        store = await _filled(folder, pool, arguments.sessions, arguments.turns)
        print(f"{arguments.sessions} sessions x {arguments.turns} turns: {store.said()}", flush=True)
        exports = [await _export(store, form, arguments, places) for form in arguments.forms]
        profiles = {form: await _profile(store, form, places) for form in arguments.forms if arguments.profile}
    table(exports)
    for form, frames in profiles.items():
        print("\n  ".join((form, *frames)))
    name = f"export-{arguments.sessions}x{arguments.turns}x{arguments.tokens}{'-spread' if arguments.spread else ''}"
    print(f"written to {keep(name, {'store': store.figures(), 'exports': exports, 'profiles': profiles})}")
    return 0


class _Store(NamedTuple):
    """A full store; sizes in bytes, `stored` is what an export has to read of its rows, `file` the database."""

    folder: Path
    sessions: int
    tokens: int
    facts: int
    wire: int
    events: int
    stored: int
    file: int

    def said(self) -> str:
        parts = (
            f"{name} {getattr(self, name) / MIB:.0f} MiB" for name in ("facts", "wire", "events", "stored", "file")
        )
        return f"{self.tokens / 1e6:.1f} M tokens; {', '.join(parts)}"

    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "folder"}


async def _pool(folder: Path, engine_url: str, places: Cores, tokens: int, count: int) -> list[StoredTurn]:
    """Turns as the service stores them: each was one, by a server that was asked a question of its own.

    Only their logprobs are drawn anew, with the 32 bits that engines give: the simulator's are few, and compress.
    """
    sample = folder / "pool"
    sample.mkdir()
    half = tokens // 2
    sim = msgspec.json.encode({"completion_tokens": half, "tool_calls": False, "reasoning": False})
    server = ServerProcess(sample, upstreams=[engine_url]).migrate()
    with pinned(places.server):
        server.start()
    try:
        async with await client.Connection.connect(server.base_url) as connection:
            for number in range(count):
                size = int((half - TEMPLATE_TOKENS) * QUESTION_BYTES_PER_TOKEN)
                await connection.json("POST", "/sessions", {"session_id": f"pool-{number}"})
                body = Conversation(opening_messages(size, seed=number), sim).body()
                await timed(connection, f"/sessions/pool-{number}/v1/chat/completions", body)
    finally:
        server.stop()
    database = Database(server.environment["TURNLOG_DATABASE_URL"])
    try:
        frames = await database.read(lambda c: c.execute(text("SELECT facts, wire FROM turns")).all())
    finally:
        await database.close()
    rng = np.random.default_rng(1)
    return [
        StoredTurn.of(_with_logprobs(codec.unpack(facts, Facts), rng), codec.unpack(wire, Wire))
        for facts, wire in frames
    ]


def _with_logprobs(facts: Facts, rng: np.random.Generator) -> Facts:
    drawn = -rng.exponential(0.5, len(facts.logprobs) // 8).astype(np.float32)
    return msgspec.structs.replace(facts, logprobs=drawn.astype("<f8").tobytes())


async def _filled(folder: Path, pool: Sequence[StoredTurn], count: int, turns: int) -> _Store:
    rng = random.Random(1)

    def every() -> Iterator[tuple[str, Sequence[StoredTurn]]]:
        for number in range(count):
            yield f"filled-{number:06}", rng.choices(pool, k=turns)

    database = Database(ServerProcess(folder).migrate().environment["TURNLOG_DATABASE_URL"])
    await database.open()
    try:
        await write_sessions(database, every(), b'{"model":"simulator","temperature":1.0}', ended=True)
        store = await database.read(lambda connection: _sizes(connection, folder))
    finally:
        await database.close()
    return store._replace(file=(folder / "turnlog.db").stat().st_size)


def _sizes(connection: Connection, folder: Path) -> _Store:
    facts, wire = connection.execute(text("SELECT sum(length(facts)), sum(length(wire)) FROM turns")).one()
    log: int = connection.execute(text("SELECT sum(length(data)) FROM events")).scalar_one()
    blobs: int = connection.execute(text("SELECT sum(length(data)) FROM blobs")).scalar_one()
    count: int = connection.execute(text("SELECT count(*) FROM sessions")).scalar_one()
    committed = (
        "SELECT sum(data ->> 'suffix_tokens' + data ->> 'output_tokens') FROM events WHERE type = 'TurnCommitted'"
    )
    tokens: int = connection.execute(text(committed)).scalar_one()
    return _Store(folder, count, tokens, facts, wire, log, facts + wire + log + blobs, 0)


async def _export(store: _Store, form: str, arguments: argparse.Namespace, places: Cores) -> dict[str, Any]:
    """One export by a new server, and one plain read. MB are 10^6 bytes, of the store's content and of the output."""
    format, shape = form.split()
    read_s = await _plain_read(store)
    with _server(store, places) as server:
        await _drained(server, format, shape, limit=1)
        foreign, cpu = foreign_cpu_s(), cpu_s(server.pid)
        with Sampler(server.pid) as sampler:
            began = time.perf_counter()
            got = await _drained(server, format, shape)
            seconds = time.perf_counter() - began
            samples = sampler.samples()
        cpu, foreign = cpu_s(server.pid) - cpu, foreign_cpu_s() - foreign
    if format == "ndjson" and got.lines != store.sessions:
        raise Incomplete(f"{form}: {got.lines} rows of {store.sessions} sessions")
    return {
        "form": form,
        "rows/s": store.sessions / seconds,
        "seconds": seconds,
        "output MB/s": got.size / seconds / 1e6,
        "stored MB/s": store.stored / seconds / 1e6,
        "plain read MB/s": store.stored / read_s / 1e6,
        "ratio": read_s / seconds,
        "aim": AIMS.get(format),
        "server CPU": cpu / seconds,
        "peak MiB": samples.peak.total / MIB,
        "anonymous MiB": samples.peak.anonymous / MIB,
        "before MiB": samples.first.total / MIB,
        "aim MiB": AIM_MIB,
        "others CPU": foreign / seconds,
    }


class Incomplete(Exception):
    """An export that did not hold all rows."""


class _Got(NamedTuple):
    size: int
    lines: int


async def _drained(server: ServerProcess, format: str, shape: str, limit: int | None = None) -> _Got:
    """Read an export and keep nothing of it. Raises aiohttp.ClientError where it breaks off."""
    parameters = {"format": format, "shape": shape, **({} if limit is None else {"limit": str(limit)})}
    size = lines = 0
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as session,
        session.get(f"{server.base_url}/export", params=parameters, raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            size += len(piece)
            if format == "ndjson":
                lines += piece.count(b"\n")
    return _Got(size, lines)


@contextlib.contextmanager
def _server(store: _Store, places: Cores) -> Iterator[ServerProcess]:
    server = ServerProcess(store.folder)
    with pinned(places.server):
        server.start()
    try:
        yield server
    finally:
        server.stop()


async def _plain_read(store: _Store) -> float:
    """Seconds to read every row that an export needs through `Database.read`, a page of sessions at a time.

    Nothing is decoded. The server does not run meanwhile.
    """
    database = Database(ServerProcess(store.folder).environment["TURNLOG_DATABASE_URL"])
    query = sessions.select().with_only_columns(sessions.c.session_id).order_by(sessions.c.session_id)
    found = size = 0
    began = time.perf_counter()
    try:
        last = ""
        while True:
            page = query.where(sessions.c.session_id > last).limit(PAGE)
            names = await database.read(lambda c: c.execute(page).scalars().all())  # noqa: B023
            if not names:
                break
            bounds = {"first": names[0], "last": names[-1]}
            size += await database.read(lambda c: _read_page(c, bounds))  # noqa: B023
            found += len(names)
            last = names[-1]
        seconds = time.perf_counter() - began
    finally:
        await database.close()
    if found != store.sessions or size != store.stored:
        raise Incomplete(f"the plain read found {size} bytes of {found} sessions, not {store.stored}")
    return seconds


def _read_page(connection: Connection, bounds: dict[str, str]) -> int:
    """Bytes of content."""
    rows = [connection.execute(text(query), bounds).all() for query in READS]
    _, events, turns, blobs = rows
    size = sum(len(row[-1]) for row in events) + sum(len(row[-1]) for row in blobs)
    return size + sum(len(row[-2]) + len(row[-1]) for row in turns)


async def _profile(store: _Store, form: str, places: Cores) -> list[str]:
    """The frames with the largest self time while the export runs, again and again for as long as it takes."""
    format, shape = form.split()
    with _server(store, places) as server:
        sampling = asyncio.create_task(top_frames(server.pid, PROFILE_S, store.folder))
        while not sampling.done():
            await _drained(server, format, shape)
        return await sampling
