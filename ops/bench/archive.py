"""Archives closed sessions: time, size, what is left in the database, and an export before and after."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import duckdb
from sqlalchemy import Connection, text

from app.store.engine import Database
from ops.bench.export import Incomplete, fill_with, made_turns
from ops.bench.measure import cpu_s, save_figures, table
from ops.bench.primary import primary
from ops.bench.sizes import MIB
from ops.bench.stand import cores, folder_for_bench, simulator, started
from ops.server import ServerProcess

POOL = 512
"""Different turns of which the sessions are composed."""

CONTENT = ("events", "turns", "blobs", "chunks", "refused_replies")

PRAGMAS = ("page_count", "freelist_count", "page_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3, help="turns of each session")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each turn: half new prompt, half output")
    parser.add_argument("--postgres", action="store_true")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores(True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engine = stack.enter_context(simulator(cpu_sets))
        url = stack.enter_context(primary(folder)).new_database() if arguments.postgres else None
        pool = await made_turns(folder, engine.base_url, cpu_sets, arguments.tokens, POOL)
        bucket = folder / "bucket"
        environment = {"TURNLOG_PAYLOADS": f"file://{bucket}"}
        server = ServerProcess(folder, database_url=url, environment=environment).migrate()
        await fill_with(server, pool, arguments.sessions, arguments.turns)
        with started(server, cpu_sets):
            before = await _export(server)
            size = await _look(server, _used_bytes)
            cpu, began = cpu_s(server.pid), time.perf_counter()
            archived = await _archive(server)
            seconds, cpu = time.perf_counter() - began, cpu_s(server.pid) - cpu
            left = await _look(server, _rows)
            deleted = await _look(server, _used_bytes)
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
                "rows deleted MiB": deleted / MIB,
                "afterwards MiB": await _look(server, _used_bytes) / MIB,
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
    kind = "archive-postgres" if arguments.postgres else "archive"
    save_figures(f"{kind}-{arguments.sessions}x{arguments.turns}x{arguments.tokens}", rows)
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


async def _look(server: ServerProcess, look: Callable[[Connection], int]) -> int:
    database = Database(server.environment["TURNLOG_DATABASE_URL"])
    try:
        return await database.read(look)
    finally:
        await database.close()


def _rows(connection: Connection) -> int:
    """Rows of events and content in the database."""
    return sum(connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in CONTENT)


def _used_bytes(connection: Connection) -> int:
    """Bytes of the database; on SQLite without free pages, which are used again."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    of = {name: connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in PRAGMAS}
    return int((of["page_count"] - of["freelist_count"]) * of["page_size"])


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _tokens(bucket: Path) -> tuple[int, float]:
    """Tokens in the loss of all samples by a query over the files, and its seconds."""
    began = time.perf_counter()
    query = f"SELECT sum(len(tokens)), sum(list_sum(loss_mask::INT[])) FROM '{bucket}/archive/samples/*.parquet'"
    [[tokens, _]] = duckdb.sql(query).fetchall()
    return int(tokens), time.perf_counter() - began
