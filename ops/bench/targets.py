"""What a load can be sent to: Turnlog, another server with its routes, or a peer; started anew for each measurement."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from app.settings import Settings
from ops.bench.load import Load, Script, Tally
from ops.bench.measure import cpu_s, foreign_cpu_s, percentile
from ops.bench.stand import Cores, folder_for_bench, pinned
from ops.server import ServerProcess

WARM_UP_S = 2.0
LOG_CHARACTERS = 4000
"""Of the end of a server's log, which is shown where it holds a fault, since it is deleted with the store."""


class Running(Protocol):
    """A server that is up; `pid` is None where its CPU cannot be measured."""

    base_url: str
    pid: int | None

    async def recorded(self, expected: int) -> int | None:
        """Turns in its store, asked once it had time to reach `expected`; None where that cannot be told."""


class Target(Protocol):
    """Knows how to start a server."""

    @property
    def name(self) -> str: ...

    @property
    def configured(self) -> str:
        """What was chosen for it, in a few words."""

    def running(self, engine_url: str, places: Cores) -> AbstractAsyncContextManager[Running]:
        """The server with an empty store in front of that engine."""


def replay_environment() -> dict[str, str]:
    """Ask engines for routing payloads, where this version of the server knows how."""
    return {"TURNLOG_REPLAY": "routed_experts"} if "replay" in Settings.model_fields else {}


class Turnlog:
    """This repository's server with SQLite in a new folder."""

    name = "turnlog"
    configured = "SQLite, a turn is on disk before its reply"

    def __init__(self, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = dict(environment or {})

    @contextlib.asynccontextmanager
    async def running(self, engine_url: str, places: Cores) -> AsyncIterator[Running]:
        with folder_for_bench(self._folder) as made:
            server = ServerProcess(made, upstreams=[engine_url], environment=self._environment).migrate()
            with pinned(places.server):
                server.start()
            try:
                yield _RunningTurnlog(server)
            finally:
                server.stop()
                said = server.log_path.read_text(errors="replace")
                if "Traceback" in said:
                    print(said[-LOG_CHARACTERS:], file=sys.stderr)


class _RunningTurnlog:
    def __init__(self, server: ServerProcess) -> None:
        self.base_url = server.base_url
        self.pid: int | None = server.pid
        self._path = server.database_path

    async def recorded(self, expected: int) -> int | None:
        """Rows of committed turns."""
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            count: int = connection.execute("SELECT count(*) FROM turns").fetchone()[0]
        return count


class Elsewhere(NamedTuple):
    """A server with the same routes that somebody else has started and pointed at the simulator."""

    base_url: str
    pid: int | None
    name: str = "elsewhere"
    configured: str = "as it was started"

    @contextlib.asynccontextmanager
    async def running(self, engine_url: str, places: Cores) -> AsyncIterator[Running]:
        yield _RunningElsewhere(self.base_url, self.pid)


class _RunningElsewhere:
    def __init__(self, base_url: str, pid: int | None) -> None:
        self.base_url = base_url
        self.pid = pid

    async def recorded(self, expected: int) -> int | None:
        """Nobody knows its store."""
        return None


class Measured(NamedTuple):
    """A stretch of load on one server."""

    tally: Tally
    server_cpu_s: float | None
    engine_cpu_s: float
    clients_cpu_s: float
    foreign_cpu_s: float
    answered: int
    recorded: int | None

    @property
    def turns(self) -> int:
        """All that ended, also those that were in flight when the time was over."""
        return len(self.tally.latencies) + self.tally.late

    def figures(self) -> dict[str, Any]:
        """CPU of each is a share of one core. Where simulator and clients come near 1 together, they hold the
        server back; `others CPU` is what else ran on the machine.
        """
        seconds, cpu = self.tally.seconds, self.server_cpu_s
        return {
            "turns/s": self.turns / seconds,
            "server CPU ms a turn": None if cpu is None else cpu * 1000 / max(self.turns, 1),
            "server CPU": None if cpu is None else cpu / seconds,
            "p50 ms": percentile(self.tally.latencies, 50) * 1000,
            "p95 ms": percentile(self.tally.latencies, 95) * 1000,
            "p99 ms": percentile(self.tally.latencies, 99) * 1000,
            "reply KiB": self.tally.reply_bytes / max(len(self.tally.latencies), 1) / 1024,
            "turns": self.turns,
            "simulator CPU": self.engine_cpu_s / seconds,
            "clients CPU": self.clients_cpu_s / seconds,
            "others CPU": self.foreign_cpu_s / seconds,
            "answered": self.answered,
            "recorded": self.recorded,
            "errors": sum(self.tally.errors.values()),
        }


async def measured(
    running: Running, engine_pid: int, script: Script, *, clients: int, turns_per_session: int, seconds: float
) -> Measured:
    """Warm up, then measure. The sessions are created ahead."""
    load = Load(running.base_url, script, clients=clients, turns_per_session=turns_per_session)
    await load.create_ahead(clients)
    warm = await load.run(WARM_UP_S)
    pace = (len(warm.latencies) + warm.late) / warm.seconds
    await load.create_ahead(pace * seconds)
    pids = () if running.pid is None else (running.pid,)
    before: list[float] = [*map(cpu_s, pids), cpu_s(engine_pid), time.process_time(), foreign_cpu_s(*pids)]
    tally = await load.run(seconds)
    after = [*map(cpu_s, pids), cpu_s(engine_pid), time.process_time(), foreign_cpu_s(*pids)]
    *server, engine, own, foreign = (end - begin for begin, end in zip(before, after, strict=True))
    recorded = await running.recorded(load.answered)
    return Measured(tally, server[0] if server else None, engine, own, foreign, load.answered, recorded)
