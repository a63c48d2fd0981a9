"""Archives: what closed sessions take in an SQLite file before and after they left it, and whether they come back."""

from __future__ import annotations

import argparse
import hashlib
import re
import time
from typing import Any

import aiohttp

from app.store.engine import Database
from app.store.sessions import database_bytes
from ops.bench.export import Incomplete
from ops.bench.measure import report
from ops.bench.stand import folder_for_bench
from ops.bench.stored import fill
from ops.server import ServerProcess

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3, help="turns of each session")


async def main(arguments: argparse.Namespace) -> int:
    with folder_for_bench(arguments.folder) as folder:
        server = ServerProcess(folder).migrate()
        await fill(server.environment["TURNLOG_DATABASE_URL"], arguments.sessions, arguments.turns, ended=True)
        (archives := folder / "archives").mkdir()
        timeout = aiohttp.ClientTimeout(total=None)
        with server:
            async with aiohttp.ClientSession(server.base_url, timeout=timeout, raise_for_status=True) as http:
                before = await _rows(http)
                figures: dict[str, Any] = {"sessions": arguments.sessions, "database MiB": await _used(server)}
                began = time.perf_counter()
                body: dict[str, Any] = {"to": archives.as_uri(), "older_than_s": 0, "after": None}
                archived = 0
                while body["after"] is not None or not archived:
                    async with http.post("/archives", json=body) as response:
                        step = await response.json()
                    archived, body["after"] = archived + step["archived"], step["after"]
                figures |= {"archived/s": archived / (time.perf_counter() - began), "after MiB": await _used(server)}
                files = sorted(archives.iterdir(), key=lambda file: file.stat().st_mtime)
                figures |= {"files": len(files), "files MiB": sum(file.stat().st_size for file in files) / MIB}
                if archived != arguments.sessions or await _rows(http):
                    raise Incomplete(f"{archived} of {arguments.sessions} sessions left")
                began = time.perf_counter()
                for file in files:
                    async with http.post("/archives/import", json={"file": file.as_uri()}):
                        pass
                figures["imported/s"] = archived / (time.perf_counter() - began)
                if await _rows(http) != before:
                    raise Incomplete("the rows are not those of before")
    report(f"archive-{arguments.sessions}x{arguments.turns}", {**figures, "rows": "equal"})
    return 0


async def _rows(http: aiohttp.ClientSession) -> dict[bytes, bytes]:
    """The digest of each row of an export, by its session; but for the cursor, which says where the row stands."""
    rows: dict[bytes, bytes] = {}
    async with http.get("/export", read_bufsize=1 << 24) as response:
        async for line in response.content:
            session_id = line[: line.index(b",")]
            rows[session_id] = hashlib.sha256(re.sub(rb'"cursor":"[^"]*"', b"", line)).digest()
    return rows


async def _used(server: ServerProcess) -> float:
    """MiB of the file's pages that are in use."""
    database = Database(server.environment["TURNLOG_DATABASE_URL"])
    try:
        used: int = await database.read(database_bytes)
    finally:
        await database.close()
    return used / MIB
