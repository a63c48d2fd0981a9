"""Turns per second while backups are made, over those before and after each, and what each backup uploads."""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from ops.bench.measure import percentile, save_figures, table
from ops.bench.sessions import short_turns
from ops.bench.stand import Period, Side, cores, folder_for_bench, pinned, simulator, started
from ops.server import ServerProcess

MIB = 1 << 20

TURNS_PER_SESSION = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a period")
    parser.add_argument("--backups", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="size of the store at the beginning")
    parser.add_argument("--percent", type=float, default=25.0, help="how much of the time a backup may work")
    parser.add_argument("--place", help="URL of a bucket; by default a folder beside the store")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    script = short_turns(arguments.request_bytes, TURNS_PER_SESSION)
    with folder_for_bench(arguments.folder) as folder, simulator(cpu_sets) as engine:
        server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
        _fill(server.database_path, arguments.mib)
        place = arguments.place or (folder / "backups").as_uri()
        command = [sys.executable, "-m", "ops.backup", place, "--percent", str(arguments.percent), "--json"]
        with started(server, cpu_sets):
            side = Side([server], script, clients=arguments.clients, turns_per_session=TURNS_PER_SESSION)
            await side.warm_up()
            rows = []
            for number in range(arguments.backups):
                before = [await _period(side, arguments.seconds)]
                with pinned(cpu_sets.server):  # The worst case: the backup has no core of its own.
                    process = await asyncio.create_subprocess_exec(
                        *command, env=server.environment, stdout=asyncio.subprocess.PIPE
                    )
                during, made = await _while_running(process, side, arguments.seconds)
                after = [await _period(side, arguments.seconds)]
                rows.append({"backup": number + 1, **_row([*before, *after], during, made)})
    table(rows)
    save_figures("backup", {"percent": arguments.percent, "rows": rows})
    return 0


def _fill(path: Path, mib: int) -> None:
    """Content that no compression makes smaller, as most of a store's is."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE ballast (data)")
        for _ in range(mib):
            connection.execute("INSERT INTO ballast VALUES (randomblob(?))", (MIB,))


async def _period(side: Side, seconds: float) -> Period:
    await side.create_ahead(seconds)
    return await side.run_period(seconds)


async def _while_running(
    process: asyncio.subprocess.Process, side: Side, seconds: float
) -> tuple[list[Period], dict[str, Any]]:
    """The periods that lie within the run, and what it printed."""
    began = asyncio.get_running_loop().time()
    output = asyncio.create_task(process.communicate())
    periods = []
    while not output.done():
        periods.append(await _period(side, seconds))
    out, _ = await output
    took = asyncio.get_running_loop().time() - began
    return periods[:-1] or periods, {**json.loads(out), "seconds": took}


def _row(without: list[Period], during: list[Period], made: dict[str, Any]) -> dict[str, Any]:
    def rate(periods: list[Period]) -> float:
        return sum(one.turns for one in periods) / sum(one.seconds for one in periods)

    def p99(periods: list[Period]) -> float:
        return 1000 * percentile([latency for one in periods for latency in one.latencies], 99)

    return {
        "seconds": made["seconds"],
        "store MiB": made["bytes"] / MIB,
        "uploaded MiB": made["uploaded_bytes"] / MIB,
        "turns/s without": rate(without),
        "turns/s during": rate(during),
        "ratio": rate(during) / rate(without),
        "p99 ms without": p99(without),
        "p99 ms during": p99(during),
        "errors": sum(len(one.errors) for one in [*without, *during]),
    }
