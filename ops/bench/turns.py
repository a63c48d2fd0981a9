"""Turns a second, server CPU per turn and latency under load, and where the CPU goes."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.client import Connection
from ops.bench.load import Load, Tally, short_turns
from ops.bench.measure import cpu_s, percentile, report
from ops.bench.profile import top_frames
from ops.bench.stand import Stand, stand

WARM_UP_S = 2.0
PROFILE_S = 5.0


class _Writer(msgspec.Struct):
    """The writer's counters in `/health`."""

    operations: int
    transactions: int
    durable_transactions: int


class _Health(msgspec.Struct):
    writer: _Writer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turns-per-session", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="afterwards, sample the server under the same load")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")
    parser.add_argument("--database-url", help="another store than a new SQLite file; must be empty")


async def main(arguments: argparse.Namespace) -> int:
    with stand(arguments.folder, arguments.database_url) as made:
        figures = await _measured(made, arguments)
    name = f"turns-{arguments.clients}x{arguments.request_bytes}"
    report(name, figures)
    return 1 if figures["errors"] else 0


async def _measured(made: Stand, arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(
        made.server.base_url,
        short_turns(arguments.request_bytes, arguments.turns_per_session),
        clients=arguments.clients,
        turns_per_session=arguments.turns_per_session,
    )
    await load.create_ahead(arguments.clients)
    warm = await load.run(WARM_UP_S)
    pace = len(warm.latencies) / warm.seconds
    await load.create_ahead(pace * arguments.seconds)
    before, cpu_before = await _writer(made), cpu_s(made.server.pid)
    tally = await load.run(arguments.seconds)
    after, cpu_after = await _writer(made), cpu_s(made.server.pid)
    figures = _figures(arguments, tally, cpu_after - cpu_before, before, after)
    if arguments.profile:
        await load.create_ahead(pace * PROFILE_S)
        running = asyncio.create_task(load.run(PROFILE_S + 1))
        figures["profile"] = await top_frames(made.server.pid, PROFILE_S, made.folder)
        await running
    return figures


def _figures(
    arguments: argparse.Namespace, tally: Tally, cpu: float, before: _Writer, after: _Writer
) -> dict[str, Any]:
    turns = len(tally.latencies)
    syncs = after.durable_transactions - before.durable_transactions
    return {
        "clients": arguments.clients,
        "turns": turns,
        "turns per second": turns / tally.seconds,
        "server CPU ms per turn": cpu * 1000 / max(turns, 1),
        "server CPU share": cpu / tally.seconds,
        "latency p50 ms": percentile(tally.latencies, 50) * 1000,
        "latency p99 ms": percentile(tally.latencies, 99) * 1000,
        "commits per fsync": turns / max(syncs, 1),
        "operations per transaction": (after.operations - before.operations)
        / max(after.transactions - before.transactions, 1),
        "request bytes, mean": tally.request_bytes // max(turns, 1),
        "reply bytes, mean": tally.reply_bytes // max(turns, 1),
        "sessions created within": tally.created_within,
        "errors": tally.errors,
    }


async def _writer(made: Stand) -> _Writer:
    async with await Connection.connect(made.server.base_url) as connection:
        response = await connection.request("GET", "/health")
    return msgspec.json.decode(response.body, type=_Health).writer
