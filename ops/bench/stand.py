"""The setup of all benchmarks: servers on one core, the engine simulator and the clients on another; what is asked of
them meanwhile; their profile."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.client import Connection
from ops.bench.load import Load, Open, Source, Tally, open_session, timed_turn
from ops.bench.measure import cpu_s, percentile
from ops.bench.primary import Database, Work
from ops.server import ROOT, OwnProcess, ServerProcess
from ops.simulator.process import SimulatorProcess

WARM_UP_S = 2.0
DIRECT_TURNS = 60
HEALTH_INTERVAL_S = 0.02


class Cores(NamedTuple):
    """The CPUs of the server and of everything else; they are the same if the machine has only one."""

    server: set[int]
    others: set[int]


def cores(spread: bool = False) -> Cores:
    """The first two CPUs of this process, one for each side; with `spread`, both for both."""
    allowed = sorted(os.sched_getaffinity(0))
    if spread:
        return Cores(set(allowed[:2]), set(allowed[:2]))
    return Cores({allowed[0]}, {allowed[1 % len(allowed)]})


@contextlib.contextmanager
def pinned(cpus: set[int]) -> Iterator[None]:
    """Pin this process to `cpus`. Children started meanwhile inherit this, with all their threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def folder_for_bench(folder: Path | None = None) -> Iterator[Path]:
    """A new folder, removed at the end. `folder` is its parent, on the disk to measure."""
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-", dir=folder) as made:
        yield Path(made)


@contextlib.contextmanager
def simulator(cpu_sets: Cores, *options: str) -> Iterator[SimulatorProcess]:
    """A running engine simulator. The caller is pinned to the same core meanwhile, as the clients' core."""
    with pinned(cpu_sets.others), SimulatorProcess("--reasoning", "0", *options) as engine:
        yield engine


@contextlib.contextmanager
def started(server: OwnProcess, cpu_sets: Cores) -> Iterator[OwnProcess]:
    """Start the server on its core, and stop it at the end."""
    with pinned(cpu_sets.server):
        server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def turnlog(
    engine: SimulatorProcess,
    cpu_sets: Cores,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    database_url: str | None = None,
) -> Iterator[ServerProcess]:
    """A running server with an empty store."""
    with folder_for_bench(folder) as made:
        server = ServerProcess(
            made, upstreams=[engine.base_url], environment=environment, database_url=database_url
        ).migrate()
        with started(server, cpu_sets):
            yield server


class Period(NamedTuple):
    """What the clients of some servers measured in one period, the CPU seconds that the servers used, and on PostgreSQL
    what the database did."""

    tallies: Sequence[Tally]
    cpu_s: float
    database: Work | None = None

    @property
    def turns(self) -> int:
        """All turns that ended, including those in flight at the end of the period."""
        return sum(len(one.latencies) + one.late for one in self.tallies)

    @property
    def seconds(self) -> float:
        return max(one.seconds for one in self.tallies)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds of the servers for each turn."""
        return self.cpu_s * 1000 / max(self.turns, 1)

    @property
    def latencies(self) -> list[float]:
        return [latency for one in self.tallies for latency in one.latencies]

    @property
    def errors(self) -> dict[str, int]:
        return {what: count for one in self.tallies for what, count in one.errors.items()}

    def figures(self) -> dict[str, Any]:
        latencies = self.latencies
        turns = max(self.turns, 1)
        figures = {
            "turns/s": self.turns / self.seconds,
            "server CPU ms a turn": self.cpu_ms,
            "p50 ms": percentile(latencies, 50) * 1000,
            "p99 ms": percentile(latencies, 99) * 1000,
            "reply KiB": sum(one.reply_bytes for one in self.tallies) / max(len(latencies), 1) / 1024,
        }
        return {
            **figures,
            **(self.database.figures(turns) if self.database else {}),
            "turns": self.turns,
            "sessions created within": sum(one.created_within for one in self.tallies),
            "errors": sum(self.errors.values()),
        }


class Side:
    """One or several servers on one store, and the clients distributed over them."""

    def __init__(
        self,
        servers: Sequence[OwnProcess],
        script: Source,
        *,
        clients: int,
        turns_per_session: int,
        headers: str = "",
        opens: Open = open_session,
        database: Database | None = None,
    ) -> None:
        self.servers = servers
        self._database = database
        share, more = divmod(clients, len(servers))
        self._loads = [
            Load(
                server.base_url,
                script,
                clients=share + (number < more),
                turns_per_session=turns_per_session,
                headers=headers,
                opens=opens,
            )
            for number, server in enumerate(servers)
        ]
        self._clients = clients
        self._pace = 0.0

    async def warm_up(self, seconds: float = WARM_UP_S) -> Period:
        """Run turns for `seconds`. Their rate determines how many sessions `create_ahead` creates."""
        await self._create_ahead(self._clients)
        return await self.run_period(seconds)

    async def create_ahead(self, seconds: float) -> None:
        """Create the sessions for a period of `seconds`, which would otherwise be created within it."""
        await self._create_ahead(self._pace * seconds)

    async def run_period(self, seconds: float) -> Period:
        async with self._database.work() if self._database else contextlib.nullcontext(list[Work]()) as works:
            before = self._cpu_s()
            tallies = await asyncio.gather(*(load.run(seconds) for load in self._loads))
            cpu = self._cpu_s() - before
        period = Period(tallies, cpu, works[0] if works else None)
        self._pace = max(self._pace, period.turns / period.seconds)
        return period

    async def measured(self, seconds: float) -> Period:
        """Warm up, create sessions, measure."""
        await self.warm_up()
        await self.create_ahead(seconds)
        return await self.run_period(seconds)

    def _cpu_s(self) -> float:
        return sum(cpu_s(server.pid) for server in self.servers)

    async def _create_ahead(self, turns: float) -> None:
        for load in self._loads:
            await load.create_ahead(turns / len(self._loads))


async def direct_s(engine_url: str, source: Source) -> Sequence[float]:
    """Latencies of the same requests at the engine itself, of which a single client's latency is a multiple."""
    async with await Connection.connect(engine_url) as connection:
        body = next(source.dialogues()).body()
        return [(await timed_turn(connection, source.wire.route, body))[1] for _ in range(DIRECT_TURNS)]


@contextlib.asynccontextmanager
async def asking(base_url: str, path: str = "/health") -> AsyncIterator[list[float]]:
    """Ask a light route again and again meanwhile; the list gets the seconds of each answer."""
    times: list[float] = []

    async def ask() -> None:
        async with await Connection.connect(base_url) as connection:
            while True:
                began = time.perf_counter()
                await connection.request("GET", path)
                times.append(time.perf_counter() - began)
                await asyncio.sleep(HEALTH_INTERVAL_S)

    task = asyncio.create_task(ask())
    try:
        yield times
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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


async def top_frames(pid: int, seconds: float, folder: Path, count: int = 10) -> list[tuple[str, str]]:
    """The functions in which a process itself spends its CPU, each with its share, by py-spy. Raises OSError without
    py-spy, CalledProcessError."""
    path = folder / "profile.raw"
    command = ["py-spy", "record", "--pid", str(pid), "--rate", "200", "--duration", str(int(seconds))]
    command += ["--nonblocking", "--function", "--format", "raw", "--output", str(path)]
    search = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": search}
    await asyncio.to_thread(subprocess.run, command, env=environment, check=True, capture_output=True)
    leaves: Counter[str] = Counter()
    for line in path.read_text(errors="replace").splitlines():
        stack, _, samples = line.rpartition(" ")
        leaves[stack.rpartition(";")[2]] += int(samples)
    total = max(leaves.total(), 1)
    return [(frame, f"{samples / total:.1%}") for frame, samples in leaves.most_common(count)]
