"""Turns per second, server CPU and latency under load; with --before, compared with the server of another commit."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import math
import secrets
import statistics
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ops.bench.measure import percentile, report
from ops.bench.primary import primary
from ops.bench.profile import top_frames
from ops.bench.sessions import Script, short_turns
from ops.bench.sizes import SIZES
from ops.bench.stand import (
    Period,
    Side,
    cores,
    folder_for_bench,
    simulator,
    started,
    turnlog,
    writer_counters,
)
from ops.server import ROOT, ServerProcess

PROFILE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--size", choices=SIZES, help="size of a reply, instead of --request-bytes")
    parser.add_argument("--seconds", type=float, help="duration; default 10, with --before 1.5 for each period")
    parser.add_argument("--turns-per-session", type=int, default=8)
    parser.add_argument("--token", action="store_true", help="run the server with an admin token")
    parser.add_argument(
        "--spread", action="store_true", help="run all processes on both cores, instead of the server on one"
    )
    parser.add_argument("--profile", action="store_true", help="afterwards, profile the server under the same load")
    parser.add_argument("--database-url", help="an empty store to use instead of a new SQLite file")
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=16, help="number of compared pairs (with --before)")
    parser.add_argument(
        "--postgres", action="store_true", help="with --before: use a new PostgreSQL server, a database for each side"
    )


async def main(arguments: argparse.Namespace) -> int:
    figures = await (_compared(arguments) if arguments.before else _measured(arguments))
    report(f"turns-{arguments.clients}x{arguments.size or arguments.request_bytes}", figures)
    return 1 if figures["errors"] else 0


async def _script(arguments: argparse.Namespace, engine_url: str) -> Script:
    if arguments.size is None:
        return short_turns(arguments.request_bytes, arguments.turns_per_session)
    return await SIZES[arguments.size].script(engine_url)


def _side(server: ServerProcess, script: Script, arguments: argparse.Namespace, token: str) -> Side:
    return Side(
        [server],
        script,
        clients=arguments.clients,
        turns_per_session=arguments.turns_per_session,
        headers=f"authorization: Bearer {token}\r\n" if token else "",
    )


def _token(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The token, and the server's setting for it."""
    token = secrets.token_urlsafe(32) if arguments.token else ""
    return token, {"TURNLOG_ADMIN_TOKEN": token} if token else {}


async def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    cpu_sets, (token, settings) = cores(arguments.spread), _token(arguments)
    seconds = arguments.seconds or 10.0
    with (
        simulator(cpu_sets) as engine,
        turnlog(engine, cpu_sets, arguments.folder, settings, arguments.database_url) as server,
    ):
        side = _side(server, await _script(arguments, engine.base_url), arguments, token)
        await side.warm_up()
        await side.create_ahead(seconds)
        before = await writer_counters(server.base_url)
        found = await side.run_period(seconds)
        after = await writer_counters(server.base_url)
        figures = {
            "clients": arguments.clients,
            **found.figures(),
            "commits per fsync": found.turns / max(after.durable_transactions - before.durable_transactions, 1),
            "operations per transaction": (after.operations - before.operations)
            / max(after.transactions - before.transactions, 1),
        }
        if arguments.profile:
            await side.create_ahead(PROFILE_S)
            running = asyncio.create_task(side.run_period(PROFILE_S + 1))
            figures |= dict(await top_frames(server.pid, PROFILE_S, server.database_path.parent))
            await running
    return figures


async def _compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the cost of a turn on another commit's server and on this tree's.

    Both servers run on one core with the same engine and settings, each with its own store. They get the same load in
    short alternating periods, and the first of each pair alternates, so that any slowdown of the machine affects both.
    A ratio compares two adjacent periods.
    """
    seconds = arguments.seconds or 1.5
    with _both_servers(arguments) as (engine_url, servers, token):
        script = await _script(arguments, engine_url)
        sides = [await _side(server, script, arguments, token).warm_up() for server in servers]
        pairs: list[tuple[Period, Period]] = []
        for number in range(arguments.rounds):
            for side in sides:
                await side.create_ahead(seconds)
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {place: await sides[place].run_period(seconds) for place in order}
            pairs.append((found[0], found[1]))
    return _ratios(pairs)


@contextlib.contextmanager
def _both_servers(arguments: argparse.Namespace) -> Iterator[tuple[str, list[ServerProcess], str]]:
    """Run the servers of the commit and of this tree; yields the engine's URL, the servers and their token."""
    cpu_sets, (token, settings) = cores(arguments.spread), _token(arguments)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        database = stack.enter_context(primary(arguments.folder)) if arguments.postgres else None
        engine = stack.enter_context(simulator(cpu_sets))
        servers = []
        for name, root in (("before", source_tree(arguments.before, folder)), ("after", ROOT)):
            (own := folder / f"{name}-store").mkdir()
            url = None if database is None else database.new_database()
            server = ServerProcess(
                own, upstreams=[engine.base_url], database_url=url, environment=settings, root=root
            ).migrate()
            stack.enter_context(started(server, cpu_sets))
            servers.append(server)
        yield engine.base_url, servers, token


def source_tree(commit: str, folder: Path) -> Path:
    """The path of a source tree: `commit` itself if it is a folder, else an extracted commit. Raises CalledProcessError
    if the repository does not have it."""
    if (Path(commit) / "app").is_dir():
        return Path(commit).resolve()
    tree = folder / "before"
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def _ratios(pairs: Sequence[tuple[Period, Period]]) -> dict[str, Any]:
    ratios = sorted(after.cpu_ms / before.cpu_ms for before, after in pairs)
    margin = math.ceil(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    interval = ratios[max(0, middle - margin) : middle + margin + 1]
    sides = dict(zip(("before", "after"), map(list, zip(*pairs, strict=True)), strict=True))
    figures: dict[str, Any] = {"rounds": len(pairs), "turns": sum(one.turns for pair in pairs for one in pair)}
    for name, side in sides.items():
        latencies = [latency for one in side for latency in one.latencies]
        figures[f"CPU ms a turn {name}, median"] = statistics.median(one.cpu_ms for one in side)
        figures[f"p50 ms {name}"] = percentile(latencies, 50) * 1000
        figures[f"p99 ms {name}"] = percentile(latencies, 99) * 1000
        figures[f"turns/s {name}, median"] = statistics.median(one.turns / one.seconds for one in side)
    return {
        **figures,
        "CPU after / before, median": statistics.median(ratios),
        "CPU after / before, the median's 95 %": [round(interval[0], 3), round(interval[-1], 3)],
        "CPU after / before, of all turns": _mean_cpu(sides["after"]) / _mean_cpu(sides["before"]),
        "sessions created within": sum(one.figures()["sessions created within"] for pair in pairs for one in pair),
        "errors": sum(sum(one.errors.values()) for pair in pairs for one in pair),
    }


def _mean_cpu(side: Sequence[Period]) -> float:
    return sum(one.cpu_s for one in side) / sum(one.turns for one in side)
