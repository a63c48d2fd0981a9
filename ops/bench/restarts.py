"""What `kill -9` of the serving process costs those who are served: seconds without an answer, and agents that die.

Agents of several harnesses, each with its client's own retries and nothing else, talk to a server whose engine takes
a while. The process that serves is killed again and again; an agent that dies is started anew. `turnlog serve` has a
spare; plain uvicorn is started again at once, as an init would do it. With `--before TREE` the same is done to a
checkout of an earlier version, under plain uvicorn. Also what a start costs: the CPU of `import app.main`, and until
`/health` answers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ops.bench.harnesses import HARNESSES
from ops.bench.measure import cpu_s, keep, percentile, table
from ops.bench.stand import folder_for_bench
from ops.server import ROOT, KeptServer, ServerProcess
from ops.simulator.process import SimulatorProcess

PATIENCE_S = 120.0
POLL_S = 0.002


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--starts", type=int, default=5, help="starts whose CPU is measured")
    parser.add_argument("--latency-ms", type=int, default=300, help="what the engine takes for an answer")
    parser.add_argument("--harness", nargs="+", choices=list(HARNESSES), help="default: all that are installed")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--folder", type=Path, help="where the databases are put")


async def main(arguments: argparse.Namespace) -> int:
    names = arguments.harness or [name for name, (module, _) in HARNESSES.items() if _is_installed(module)]
    trees = {"": ROOT, **({"before: ": arguments.before.resolve()} if arguments.before else {})}
    starts = [_started(f"{label}uvicorn", tree, arguments) for label, tree in trees.items()]
    kills = [_killed("turnlog serve", KeptServer, ROOT, names, arguments)]
    kills += [_killed(f"{label}uvicorn", ServerProcess, tree, names, arguments) for label, tree in trees.items()]
    table(starts)
    table(kills)
    print(f"written to {keep('restarts', [*starts, *kills])}")
    return 0


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _started(label: str, tree: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    imports = [_import_cpu_s(tree) for _ in range(arguments.starts)]
    answers: list[tuple[float, float, float]] = []
    with folder_for_bench(arguments.folder) as folder:
        server = ServerProcess(folder, root=tree).migrate()
        for _ in range(arguments.starts):
            began = time.perf_counter()
            server.launch()
            try:
                _until(server.answers)
                answers.append((time.perf_counter() - began, cpu_s(server.pid), _rss_mib(server.pid)))
            finally:
                server.kill()
    walls, cpus, sizes = zip(*answers, strict=True)
    return {
        "start": label,
        "import, CPU s": percentile(imports, 50),
        "until it answers, CPU s": percentile(cpus, 50),
        "seconds": percentile(walls, 50),
        "MiB": percentile(sizes, 50),
    }


def _import_cpu_s(tree: Path) -> float:
    """User and system seconds, with the modules compiled already."""
    process = subprocess.Popen([sys.executable, "-c", "import app.main"], cwd=tree)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Agent:
    """A harness in a process of its own."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url
        self.deaths = 0
        self.answers = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ops.bench.harnesses", self.name, self._url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def look(self) -> None:
        """Count what it has been answered since the last look, and start it again if it died."""
        assert self._process.stdout is not None
        self.answers += (self._process.stdout.read() or b"").count(b"\n")
        if self._process.poll() is not None:
            self.deaths += 1
            self._start()

    def stop(self) -> None:
        self._process.communicate(b"enough\n")


def _killed(
    label: str, kind: type[ServerProcess], tree: Path, names: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """A row of the table."""
    unanswered: list[float] = []
    with (
        folder_for_bench(arguments.folder) as folder,
        SimulatorProcess("--latency-ms", str(arguments.latency_ms)) as engine,
        _running(kind(folder, upstreams=[engine.base_url], root=tree)) as server,
        _talking(names, server.base_url) as agents,
    ):
        for _ in range(arguments.kills):
            _answered(agents, 2)
            if isinstance(server, KeptServer):
                _until(partial(getattr, server, "spare"))
            unanswered.append(_kill(server))
            _answered(agents, 1)
        deaths = {agent.name: agent.deaths for agent in agents}
    return {
        "server": label,
        "kills": arguments.kills,
        "p50 s": percentile(unanswered, 50),
        "worst s": max(unanswered),
        **{f"{name} died": count for name, count in deaths.items()},
    }


@contextlib.contextmanager
def _running(server: ServerProcess) -> Iterator[ServerProcess]:
    server.migrate().start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def _talking(names: list[str], url: str) -> Iterator[list[Agent]]:
    agents = [Agent(name, url) for name in names]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.stop()


def _answered(agents: list[Agent], times: int) -> None:
    """Wait until each has had so many answers more, also one that died and was started again."""
    wanted = [agent.answers + times for agent in agents]

    def look() -> bool:
        for agent in agents:
            agent.look()
        return all(agent.answers >= answers for agent, answers in zip(agents, wanted, strict=True))

    _until(look)


def _kill(server: ServerProcess) -> float:
    """Seconds from the kill of whoever serves to the first request that is answered."""
    if isinstance(server, KeptServer):
        killed = server.started[-1]
        began = time.perf_counter()
        os.kill(killed, signal.SIGKILL)
    else:
        began = time.perf_counter()
        server.kill()
        server.launch()
    _until(lambda: _is_answered(server.port))
    return time.perf_counter() - began


def _is_answered(port: int) -> bool:
    """By anybody, in any time: a request that waits is not sent again."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(POLL_S)
