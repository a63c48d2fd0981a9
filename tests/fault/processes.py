"""Several API processes on one PostgreSQL, which a test's faults must not end."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from integration.stand import until

from fault.agents import Agent, Agents
from ops.server import VERBATIM, ServerProcess

START_S = 90.0


@dataclass(frozen=True)
class Processes:
    """`pids` are those that were started."""

    servers: list[ServerProcess]
    pids: list[int]

    @property
    def urls(self) -> list[str]:
        return [server.base_url for server in self.servers]

    def are_the_same(self) -> None:
        """Nobody had to start one again."""
        until(lambda: all(server.answers() for server in self.servers), START_S)
        assert [server.pid for server in self.servers] == self.pids

    def logs(self) -> str:
        return "\n".join(server.log_path.read_text(errors="replace") for server in self.servers)


def crowd(processes: Processes, count: int, step: Callable[[Agent], object]) -> Agents[Agent]:
    """Agents at all processes, whose sessions no other test on the same database has."""
    agents = Agents(processes.urls, count, step)
    for agent in agents:
        agent.name = f"{agent.name}-{uuid.uuid4().hex[:8]}"
    return agents


@contextlib.contextmanager
def serving(
    folder: Path,
    count: int,
    database_url: str,
    engine_url: str,
    environment: Mapping[str, str] | None = None,
    kind: type[ServerProcess] = ServerProcess,
) -> Iterator[Processes]:
    """All of them start at once, each with one worker. Replies have the ids and logprobs to compare rows with."""
    environment = {"TURNLOG_WORKERS": "1", **VERBATIM, **(environment or {})}
    servers = [
        kind(folder, upstreams=[engine_url], database_url=database_url, environment=environment) for _ in range(count)
    ]
    try:
        for server in servers:
            server.launch()
        deadline = time.monotonic() + START_S
        while not all(server.answers() for server in servers):
            assert time.monotonic() < deadline, [server.log_path.read_text(errors="replace") for server in servers]
            time.sleep(0.05)
        yield Processes(servers, [server.pid for server in servers])
    finally:
        for server in servers:
            server.stop()
