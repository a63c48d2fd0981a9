"""Archives closed sessions: time, size, what is left in the database, and an export before and after."""

from __future__ import annotations

import argparse
import hashlib
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import duckdb

from ops.bench.export import Incomplete, fill_with, made_turns
from ops.bench.measure import cpu_s, save_figures, table
from ops.bench.sizes import MIB
from ops.bench.stand import cores, folder_for_bench, simulator, started
from ops.server import ServerProcess

POOL = 512
"""Different turns of which the sessions are composed."""

CONTENT = ("events", "turns", "blobs", "chunks", "refused_replies")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each turn: half new prompt, half output")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores(True)
    with folder_for_bench(arguments.folder) as folder, simulator(cpu_sets) as engine:
        pool = await made_turns(folder, engine.base_url, cpu_sets, arguments.tokens, POOL)
        bucket = folder / "bucket"
        server = ServerProcess(folder, environment={"TURNLOG_PAYLOADS": f"file://{bucket}"}).migrate()
        await fill_with(server, pool, arguments.sessions, arguments.turns)
        with started(server, cpu_sets):
            before = await _export(server)
            size = _used_bytes(server)
            cpu, began = cpu_s(server.pid), time.perf_counter()
            archived = await _archive(server)
            seconds, cpu = time.perf_counter() - began, cpu_s(server.pid) - cpu
            left = _rows(server)
            after = await _export(server)
        if archived != arguments.sessions or before.digest != after.digest:
            raise Incomplete(f"{archived} of {arguments.sessions} sessions, exports {before.digest}, {after.digest}")
        tokens, query_s = _tokens(bucket)
        rows = [
            {
                "sessions": archived,
                "sessions/s": archived / seconds,
                "server CPU": cpu / seconds,
                "database MiB": size / MIB,
                "afterwards MiB": _used_bytes(server) / MIB,
                "content rows left": left,
                "archive MiB": _bytes(bucket / "archive/sessions") / MIB,
                "samples MiB": _bytes(bucket / "archive/samples") / MIB,
                "export": "equal",
                "export MiB": before.size / MIB,
                "rows/s before": archived / before.seconds,
                "rows/s after": archived / after.seconds,
                "query tokens/s": tokens / query_s,
            }
        ]
    table(rows)
    save_figures(f"archive-{arguments.sessions}x{arguments.turns}x{arguments.tokens}", rows)
    return 0


class _Exported(NamedTuple):
    digest: str
    size: int
    seconds: float


async def _export(server: ServerProcess) -> _Exported:
    """The whole export, hashed. Raises aiohttp.ClientError if it ends early."""
    digest, size = hashlib.sha256(), 0
    began = time.perf_counter()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as session,
        session.get(f"{server.base_url}/export", raise_for_status=True) as response,
    ):
        async for piece in response.content.iter_any():
            digest.update(piece)
            size += len(piece)
    return _Exported(digest.hexdigest(), size, time.perf_counter() - began)


async def _archive(server: ServerProcess) -> int:
    """Archive everything; how many sessions were."""
    archived: int = 0
    after: object = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), raise_for_status=True) as session:
        while True:
            async with session.post(f"{server.base_url}/archives", json={"after": after}) as response:
                step = await response.json()
            archived, after = archived + step["archived"], step["after"]
            if after is None:
                return archived


def _rows(server: ServerProcess) -> int:
    """Rows of events and content in the database."""
    with sqlite3.connect(server.database_path) as database:
        return sum(database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in CONTENT)


def _used_bytes(server: ServerProcess) -> int:
    """Bytes of the database without free pages."""
    with sqlite3.connect(server.database_path) as database:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _tokens(bucket: Path) -> tuple[int, float]:
    """Tokens in the loss of all samples by a query over the files, and its seconds."""
    began = time.perf_counter()
    query = f"SELECT sum(len(tokens)), sum(list_sum(loss_mask::INT[])) FROM '{bucket}/archive/samples/*.parquet'"
    [[tokens, _]] = duckdb.sql(query).fetchall()
    return int(tokens), time.perf_counter() - began
