"""The bare database: durable inserts of a row through plain asyncpg connections, in a process of its own.

`python -m ops.bench.commits --url … --connections 16 --rows 1` prints what it did as JSON. It is the ceiling
that `ops.bench postgres` compares Turnlog with: no HTTP, no engine, no log, one table without an index.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time

import asyncpg
import msgspec
import uvloop

from ops.bench.measure import percentile
from ops.bench.primary import plain_url
from ops.server import ROOT

TABLE = "CREATE TABLE IF NOT EXISTS bare (id bigint GENERATED ALWAYS AS IDENTITY, data bytea NOT NULL)"
RAW = "ALTER TABLE bare ALTER COLUMN data SET STORAGE EXTERNAL"
INSERT = "INSERT INTO bare (data) SELECT unnest($1::bytea[])"
WARM_UP_S = 0.5


class Commits(msgspec.Struct, frozen=True):
    """What some connections did; `cpu_s` is this process's own."""

    connections: int
    rows: int
    commits_per_s: float
    p50_ms: float
    p99_ms: float
    seconds: float
    cpu_s: float


async def commits(url: str, *, connections: int, rows: int, row_bytes: int, seconds: float) -> Commits:
    """Each connection inserts `rows` rows in a transaction, waits for it and begins again."""
    opened = [await asyncpg.connect(plain_url(url)) for _ in range(connections)]
    row = [os.urandom(row_bytes)] * rows
    try:
        await opened[0].execute(TABLE)
        await opened[0].execute(RAW)
        inserts = [await one.prepare(INSERT) for one in opened]
        latencies: list[float] = []

        async def client(insert: asyncpg.prepared_stmt.PreparedStatement, until: float) -> None:
            while (began := time.perf_counter()) < until:
                await insert.fetch(row)
                latencies.append(time.perf_counter() - began)

        for wanted in (WARM_UP_S, seconds):
            latencies.clear()
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(client(insert, began + wanted) for insert in inserts))
        took = time.perf_counter() - began
    finally:
        for one in opened:
            await one.close()
    p50, p99 = (percentile(latencies, percent) * 1000 for percent in (50, 99))
    return Commits(connections, rows, len(latencies) / took, p50, p99, took, time.process_time() - cpu)


async def elsewhere(url: str, *, connections: int, rows: int, row_bytes: int, seconds: float) -> Commits:
    """`commits` in a process of its own. Raises subprocess.CalledProcessError."""
    options = {"url": url, "connections": connections, "rows": rows, "row-bytes": row_bytes, "seconds": seconds}
    command = [sys.executable, "-m", "ops.bench.commits", *(f"--{name}={value}" for name, value in options.items())]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "ops.bench.commits")
    return msgspec.json.decode(said, type=Commits)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.commits", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1, help="in a transaction")
    parser.add_argument("--row-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=5.0)
    wanted = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(
            commits(
                wanted.url,
                connections=wanted.connections,
                rows=wanted.rows,
                row_bytes=wanted.row_bytes,
                seconds=wanted.seconds,
            )
        )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
