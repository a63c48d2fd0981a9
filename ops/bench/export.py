"""Speed, CPU and memory of `/export` for each format on a full store, beside a plain read of the same bytes."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from sqlalchemy import Connection, text

from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.schema import sessions
from ops.bench.load import question_bytes
from ops.bench.measure import MIB, Figures, Peak, cpu_s, save_figures, stat, table
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, simulator, started
from ops.bench.stored import copy_up_to, play
from ops.server import ServerProcess

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

PLAYED = 2048
"""Number of different turns that all sessions have. It exceeds the rows of a Parquet row group; otherwise Parquet would
compress repetitions that only the benchmark has. The simulator's 8,191 logprobs come again in any case."""

PAGE = 64
"""Sessions that the plain read reads at once, as an export does."""

READS = {
    "SELECT seq, at, type, version, data FROM events WHERE session_id BETWEEN :first AND :last": 1,
    "SELECT turn, tokens, exchange FROM turns WHERE session_id BETWEEN :first AND :last": 2,
    "SELECT number, data FROM blobs WHERE session_id BETWEEN :first AND :last": 1,
}
"""The queries of the plain read, and how many of their last columns are content."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each turn: half new prompt, half output")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="formats and shapes to measure")
    parser.add_argument(
        "--server-cores",
        nargs="+",
        type=int,
        default=[1, 2],
        help="measure with the server on so many cores; the client has the second one",
    )
    parser.add_argument("--store", type=Path, help="keep the filled store in this folder, and use it if it is there")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    with pinned(cpu_sets.others), contextlib.ExitStack() as stack:
        folder = arguments.store or stack.enter_context(folder_for_bench(arguments.folder))
        server = await _filled(folder, cpu_sets, arguments)
        stored = await _stored_bytes(server)
        print(f"{arguments.sessions} sessions x {arguments.turns} turns: {stored / MIB:.0f} MiB", flush=True)
        rows = [
            await _export(server, form, arguments.sessions, stored, _for_server(cpu_sets, count))
            for form in arguments.forms
            for count in arguments.server_cores
        ]
    table(rows)
    save_figures(f"export-{arguments.sessions}x{arguments.turns}x{arguments.tokens}", rows)
    return 0


def _for_server(cpu_sets: Cores, count: int) -> Cores:
    every = sorted(cpu_sets.server) + sorted(cpu_sets.others - cpu_sets.server)
    return Cores(set(every[:count]), cpu_sets.others)


async def _filled(folder: Path, cpu_sets: Cores, arguments: argparse.Namespace) -> ServerProcess:
    """A server with a store in the folder, which is filled unless it is there."""
    if (folder / "turnlog.db").exists():
        return ServerProcess(folder).migrate()
    folder.mkdir(parents=True, exist_ok=True)
    half = arguments.tokens // 2
    size = question_bytes(half)
    sim = msgspec.json.encode({"completion_tokens": half, "tool_calls": False, "reasoning": False})
    played = min(-(-PLAYED // arguments.turns), arguments.sessions)
    with simulator(cpu_sets) as engine:
        server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
        with started(server, cpu_sets):
            await play(server.base_url, played, arguments.turns, question_bytes=size, sim=sim, ended=True)
    copy_up_to(server.database_path, arguments.sessions)
    return ServerProcess(folder)


def _database(server: ServerProcess) -> Database:
    return Database(server.environment["TURNLOG_DATABASE_URL"], points=StorePoints())


async def _stored_bytes(server: ServerProcess) -> int:
    """The bytes of content that an export has to read."""
    database = _database(server)
    try:
        return await database.read(lambda connection: _read_page(connection, {"first": "", "last": "~"}))
    finally:
        await database.close()


async def _export(server: ServerProcess, form: str, count: int, stored: int, cpu_sets: Cores) -> Figures:
    """Measure one export by a new server, and one plain read. MB are 10^6 bytes, of the store's content and of the
    output. The ratio of CPU times holds also where other programs have a share of the cores."""
    format, shape = form.split()
    cpu = time.process_time()
    read_s = await _plain_read(server, stored)
    read_cpu = time.process_time() - cpu
    with started(server, cpu_sets):
        await download(server, format=format, shape=shape, limit="1")
        cpu = _cpu_s(server.pid)
        with Peak(server.pid) as peak:
            began = time.perf_counter()
            downloaded = await download(server, format=format, shape=shape)
            seconds = time.perf_counter() - began
        cpu = _cpu_s(server.pid) - cpu
    if format == "ndjson" and downloaded.lines != count:
        raise Incomplete(f"{form}: {downloaded.lines} rows of {count} sessions")
    return {
        "form": form,
        "cores": len(cpu_sets.server),
        "rows/s": count / seconds,
        "seconds": seconds,
        "output MB/s": downloaded.size / seconds / 1e6,
        "of the plain read's pace": read_s / seconds,
        "CPU us a row": cpu / count * 1e6,
        "plain CPU us": read_cpu / count * 1e6,
        "peak MiB": peak.most / MIB,
        "before MiB": peak.before / MIB,
    }


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, those that have ended too."""
    fields = stat(pid)
    return cpu_s(pid) + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Incomplete(Exception):
    """A read or an export did not contain everything."""


class Downloaded(NamedTuple):
    size: int
    lines: int  # of NDJSON


async def download(server: ServerProcess, **query: str) -> Downloaded:
    """Read an export and discard it. Raises aiohttp.ClientError if it ends early."""
    size = lines = 0
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as session,
        session.get(f"{server.base_url}/export", params=query, raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            size += len(piece)
            lines += piece.count(b"\n")
    return Downloaded(size, lines)


async def _plain_read(server: ServerProcess, stored: int) -> float:
    """Seconds to read every row that an export needs through `Database.read`, PAGE sessions at a time.

    Nothing is decoded, and the server does not run meanwhile. Raises Incomplete.
    """
    database = _database(server)
    query = sessions.select().with_only_columns(sessions.c.session_id).order_by(sessions.c.session_id).limit(PAGE)
    size, last = 0, ""
    began = time.perf_counter()
    try:
        while True:
            page = query.where(sessions.c.session_id > last)
            names = await database.read(lambda c: c.execute(page).scalars().all())  # noqa: B023
            if not names:
                break
            bounds, last = {"first": names[0], "last": names[-1]}, names[-1]
            size += await database.read(lambda c: _read_page(c, bounds))  # noqa: B023
        seconds = time.perf_counter() - began
    finally:
        await database.close()
    if size != stored:
        raise Incomplete(f"the plain read found {size} bytes, not {stored}")
    return seconds


def _read_page(connection: Connection, bounds: dict[str, str]) -> int:
    """Read the rows of the sessions from `first` to `last`; returns the bytes of content."""
    size = 0
    for query, columns in READS.items():
        for row in connection.execute(text(query), bounds):
            size += sum(len(content or b"") for content in row[-columns:])
    return size
