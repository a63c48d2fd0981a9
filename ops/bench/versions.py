"""Two versions of the server, and what a turn costs each: the CPU of one commit's beside that of this tree's.

Both servers run on one core, each with a store of its own, before one engine. The same load goes to one and the other
in short stretches, in turns and beginning with either, so that whatever slows the machine slows both. A ratio is that
of two stretches next to each other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.load import Load, Script, short_turns
from ops.bench.measure import percentile, report
from ops.bench.primary import primary
from ops.bench.stand import cores, folder_for_bench, pinned, simulator
from ops.server import ROOT, ServerProcess

WARM_UP_S = 2.0


def add_arguments(parser: argparse.ArgumentParser, before: str) -> None:
    """`before` is the commit that this tree is compared with unless another one is named."""
    parser.add_argument("--before", default=before, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=16, help="of one stretch each")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a stretch")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--turns-per-session", type=int, default=8)
    parser.add_argument("--postgres", action="store_true", help="a database each on a PostgreSQL of the run's own")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--folder", type=Path, help="where the databases are put: the disk that is measured")


async def compare(
    arguments: argparse.Namespace, name: str, *, settings: Mapping[str, str] | None = None, headers: str = ""
) -> int:
    """Report as `name`. `settings` are this tree's server's alone, `headers` (whole lines) are sent to both."""
    rounds = max(2, arguments.rounds // 4) if arguments.quick else arguments.rounds
    script = short_turns(arguments.request_bytes, arguments.turns_per_session)
    with _both(arguments, settings or {}) as servers:
        sides = [_Side(server, script, arguments, headers) for server in servers]
        for side in sides:
            await side.warm_up()
        stretches = [(before, after) async for before, after in _alternating(sides, rounds, arguments.seconds)]
    figures = _figures(stretches)
    report(f"{name}-postgres" if arguments.postgres else name, figures)
    return 1 if figures["errors"] else 0


@contextlib.contextmanager
def _both(arguments: argparse.Namespace, settings: Mapping[str, str]) -> Iterator[list[ServerProcess]]:
    """The servers of the commit and of this tree, running."""
    places = cores()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        database = stack.enter_context(primary(arguments.folder)) if arguments.postgres else None
        engine = stack.enter_context(simulator(places))
        servers = []
        for name, root, own_settings in (("before", tree_of(arguments.before, folder), {}), ("after", ROOT, settings)):
            (own := folder / f"{name}-store").mkdir()
            url = None if database is None else database.new_database()
            server = ServerProcess(
                own, upstreams=[engine.base_url], database_url=url, environment=own_settings, root=root
            ).migrate()
            with pinned(places.server):
                stack.callback(server.start().stop)
            servers.append(server)
        yield servers


def tree_of(commit: str, folder: Path) -> Path:
    """The repository at that commit. Raises CalledProcessError for one that it does not have."""
    tree = folder / "before"
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def _process_cpu_s(pid: int) -> float:
    """What all threads of a process have used, to the microsecond: its CPU clock, by the number that Linux gives it."""
    return time.clock_gettime(~pid << 3 | 2)


class _Stretch(NamedTuple):
    turns: int
    cpu_ms: float
    p50_ms: float
    per_s: float
    created_within: int
    errors: int


class _Side:
    """One of the servers, and the load that it gets."""

    def __init__(self, server: ServerProcess, script: Script, arguments: argparse.Namespace, headers: str) -> None:
        self._server = server
        self._load = Load(
            server.base_url,
            script,
            clients=arguments.clients,
            turns_per_session=arguments.turns_per_session,
            headers=headers,
        )
        self._clients = arguments.clients
        self._pace = 0.0

    async def warm_up(self) -> None:
        await self._load.create_ahead(self._clients)
        tally = await self._load.run(WARM_UP_S)
        self._pace = len(tally.latencies) / tally.seconds

    async def create_ahead(self, seconds: float) -> None:
        """Sessions for a stretch."""
        await self._load.create_ahead(self._pace * seconds)

    async def stretch(self, seconds: float) -> _Stretch:
        before = _process_cpu_s(self._server.pid)
        tally = await self._load.run(seconds)
        turns = len(tally.latencies) + tally.late
        used = (_process_cpu_s(self._server.pid) - before) * 1000 / max(turns, 1)
        self._pace = max(self._pace, turns / tally.seconds)
        return _Stretch(
            turns,
            used,
            percentile(tally.latencies, 50) * 1000,
            turns / tally.seconds,
            tally.created_within,
            sum(tally.errors.values()),
        )


async def _alternating(sides: list[_Side], rounds: int, seconds: float) -> AsyncIterator[tuple[_Stretch, _Stretch]]:
    """Pairs of stretches, of the first side and of the second."""
    for number in range(rounds):
        for side in sides:
            await side.create_ahead(seconds)
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {place: await sides[place].stretch(seconds) for place in order}
        yield found[0], found[1]


def _figures(stretches: list[tuple[_Stretch, _Stretch]]) -> dict[str, Any]:
    ratios = sorted(after.cpu_ms / before.cpu_ms for before, after in stretches)
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    off = math.ceil(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    surely = ratios[max(0, middle - off) : middle + off + 1]
    before, after = zip(*stretches, strict=True)
    return {
        "rounds": len(stretches),
        "turns": sum(one.turns for one in (*before, *after)),
        "CPU ms a turn before, median": statistics.median(one.cpu_ms for one in before),
        "CPU ms a turn after, median": statistics.median(one.cpu_ms for one in after),
        "after / before, median": median,
        "after / before, middle half": [round(low, 3), round(high, 3)],
        "after / before, the median's 95 %": [round(surely[0], 3), round(surely[-1], 3)],
        "after / before, of all turns": _mean_cpu(after) / _mean_cpu(before),
        "p50 ms before": statistics.median(one.p50_ms for one in before),
        "p50 ms after": statistics.median(one.p50_ms for one in after),
        "turns per second before": statistics.median(one.per_s for one in before),
        "turns per second after": statistics.median(one.per_s for one in after),
        "sessions created within": sum(one.created_within for one in (*before, *after)),
        "errors": sum(one.errors for one in (*before, *after)),
    }


def _mean_cpu(stretches: tuple[_Stretch, ...]) -> float:
    return sum(one.cpu_ms * one.turns for one in stretches) / sum(one.turns for one in stretches)
