"""A fleet to test against: API processes that share a PostgreSQL, and simulated engines, all real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from fault.processes import Processes
from fault.processes import serving as processes_serving
from integration.stand import CHAT, TIMEOUT_S, Api, engine_requests, engine_stats

from ops.simulator.process import SimulatorProcess


class Engine:
    """One simulated engine, and what it has seen."""

    def __init__(self, process: SimulatorProcess) -> None:
        self.process = process
        self.url = process.base_url
        self.sim = httpx.Client(base_url=process.base_url, timeout=TIMEOUT_S)

    def stats(self) -> dict[str, Any]:
        return engine_stats(self.sim)

    def seen(self, path: str | None = None, session_id: str | None = None) -> list[dict[str, Any]]:
        return engine_requests(self.sim, path, session_id)

    def chats(self, session_id: str | None = None) -> list[dict[str, Any]]:
        return self.seen(CHAT, session_id)


class Fleet:
    """`apis` share everything, so a session may be used at any of them."""

    def __init__(self, processes: Processes, engines: Sequence[Engine]) -> None:
        self.processes = processes
        self.engines = list(engines)
        self.apis = [Api(url) for url in processes.urls]
        self._threads = ThreadPoolExecutor(32)

    def reset(self) -> None:
        """Nothing is left over from another test at the engines."""
        for engine in self.engines:
            assert engine.sim.post("/sim/reset").status_code == 200

    def meanwhile(self, call: Any, *arguments: Any, **named: Any) -> Future[Any]:
        return self._threads.submit(call, *arguments, **named)

    def engine(self, url: str) -> Engine:
        return next(engine for engine in self.engines if engine.url == url)

    def chats(self, session_id: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """All engines' chat requests, with the engine's URL."""
        return [(engine.url, one) for engine in self.engines for one in engine.chats(session_id)]

    def close(self) -> None:
        self._threads.shutdown()
        for client in (*(api.http for api in self.apis), *(engine.sim for engine in self.engines)):
            client.close()


@contextlib.contextmanager
def fleet_of(
    folder: Path,
    database_url: str,
    *,
    engines: int = 2,
    processes: int = 2,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Engines with `arguments`, and processes with `environment` that are set to all of them."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(SimulatorProcess("--seed", str(number), *arguments)) for number in range(engines)
        ]
        urls = ",".join(one.base_url for one in started)
        serving = stack.enter_context(processes_serving(folder, processes, database_url, urls, environment=environment))
        made = Fleet(serving, [Engine(one) for one in started])
        stack.callback(made.close)
        yield made
