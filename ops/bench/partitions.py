"""Partitions of PostgreSQL's log: what reads and commits of one session cost over many, and DROP against DELETE.

Plain statements over tables like `events`: nothing of the service but its statements' shape is measured. Each count of
partitions has the same rows, those of a session in one partition; the clients take turns between the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import asyncpg

from ops.bench.measure import save_figures, table
from ops.bench.primary import plain_url, primary

COLUMNS = """session_id varchar(128) NOT NULL, seq bigint NOT NULL, data bytea NOT NULL,
    tx bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint, position bigint NOT NULL DEFAULT nextval('places'),
    part integer NOT NULL DEFAULT {last}"""
INDEXES = (
    "ALTER TABLE {name} ADD PRIMARY KEY (session_id, seq), ALTER COLUMN data SET STORAGE EXTERNAL",
    "CREATE INDEX ON {name} (tx, position)",
)
FILL = """INSERT INTO {name} (session_id, seq, data, tx, part)
    SELECT 's' || s, e, $1::bytea, s, 1 + s % {parts} FROM generate_series(1, {sessions}) s, generate_series(1, 6) e"""
READ = "SELECT seq, data FROM {name} WHERE session_id = $1 ORDER BY seq"
CLAIM = """UPDATE heads SET version = version + 1 WHERE session_id = $1
    AND EXISTS (SELECT FROM {name} e WHERE e.session_id = heads.session_id AND e.seq = $2)"""
APPEND = "INSERT INTO {name} (session_id, seq, data) VALUES ($1, $2, $3)"
ORDER = "SELECT session_id, seq FROM {name} WHERE (tx, position) > ($1, 0) ORDER BY tx, position LIMIT 100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=int, nargs="+", default=[0, 1, 8, 30, 100], help="0: a plain table")
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=600, help="of an event")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")


async def main(arguments: argparse.Namespace) -> int:
    with primary(arguments.folder) as database:
        url = plain_url(database.new_database())
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE SEQUENCE places")
        await connection.execute("CREATE TABLE heads (session_id text PRIMARY KEY, version bigint NOT NULL)")
        await connection.execute(
            "INSERT INTO heads SELECT 's' || s, 6 FROM generate_series(1, $1) s", arguments.sessions
        )
        rows = []
        for parts in arguments.parts:
            await _fill(connection, parts, arguments)
            await connection.execute("VACUUM ANALYZE heads")
            rows.append({"partitions": parts, **await _rates(url, f"log_{parts}", arguments)})
        table(rows)
        gone = [await _dropped(connection, arguments), await _deleted(connection, arguments)]
        table(gone)
        await connection.close()
    save_figures("partitions", {"rates": rows, "gone": gone})
    return 0


async def _fill(connection: Any, parts: int, arguments: argparse.Namespace) -> None:
    name = f"log_{parts}"
    columns = COLUMNS.format(last=parts)
    await connection.execute(f"CREATE TABLE {name} ({columns}){' PARTITION BY LIST (part)' if parts else ''}")
    for number in range(1, parts + 1):
        await connection.execute(f"CREATE TABLE {name}_{number} PARTITION OF {name} FOR VALUES IN ({number})")
    for one in [f"{name}_{number}" for number in range(1, parts + 1)] or [name]:
        for statement in INDEXES:
            await connection.execute(statement.format(name=one))
    filling = FILL.format(name=name, parts=parts or 1, sessions=arguments.sessions)
    await connection.execute(filling, os.urandom(arguments.bytes))
    await connection.execute(f"VACUUM ANALYZE {name}")
    await connection.execute("CHECKPOINT")


async def _rates(url: str, name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Operations a second of all clients together: reads of a session, pages in order, and commits."""
    clients = [await asyncpg.connect(url) for _ in range(arguments.clients)]
    fill = os.urandom(arguments.bytes)

    async def read(client: Any, number: int) -> None:
        await client.fetch(READ.format(name=name), f"s{1 + number % arguments.sessions}")

    async def page(client: Any, number: int) -> None:
        await client.fetch(ORDER.format(name=name), number % arguments.sessions)

    async def commit(client: Any, number: int) -> None:
        session = f"s{1 + number % arguments.sessions}"
        async with client.transaction():
            await client.execute(CLAIM.format(name=name), session, 6)
            await client.execute(APPEND.format(name=name), session, 7 + number // arguments.sessions, fill)

    found = {}
    for label, work in (("reads/s", read), ("pages/s", page), ("commits/s", commit)):
        counts = await asyncio.gather(
            *(_repeat(client, work, at, len(clients), arguments.seconds) for at, client in enumerate(clients))
        )
        found[label] = sum(counts) / arguments.seconds
    for client in clients:
        await client.close()
    return found


async def _repeat(client: Any, work: Any, at: int, step: int, seconds: float) -> int:
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        await work(client, at + count * step)
        count += 1
    return count


async def _dropped(connection: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    await _fill_as(connection, "dropped", arguments)
    before, began = await _wal(connection), time.perf_counter()
    await connection.execute("DROP TABLE dropped")
    return {"how": "DROP", "ms": 1000 * (time.perf_counter() - began), "WAL MiB": await _wal(connection) - before}


async def _deleted(connection: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    await _fill_as(connection, "deleted", arguments)
    before, began = await _wal(connection), time.perf_counter()
    await connection.execute("DELETE FROM deleted")
    await connection.execute("VACUUM deleted")
    took = 1000 * (time.perf_counter() - began)
    return {"how": "DELETE, VACUUM", "ms": took, "WAL MiB": await _wal(connection) - before}


async def _fill_as(connection: Any, name: str, arguments: argparse.Namespace) -> None:
    await connection.execute(f"CREATE TABLE {name} ({COLUMNS.format(last=1)})")
    for statement in INDEXES:
        await connection.execute(statement.format(name=name))
    filling = FILL.format(name=name, parts=1, sessions=arguments.sessions)
    await connection.execute(filling, os.urandom(arguments.bytes))
    await connection.execute("CHECKPOINT")


async def _wal(connection: Any) -> float:
    return float(await connection.fetchval("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn) / 1048576"))
