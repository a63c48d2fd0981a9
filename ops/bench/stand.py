"""The stand of every benchmark: a server on one core, the engine simulator and the clients on another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess


class Cores(NamedTuple):
    """Which CPUs the server has, and which everything else; the same where the machine has only one."""

    server: set[int]
    others: set[int]


def cores(spread: bool = False) -> Cores:
    """The first two CPUs of this process, one each; with `spread`, both for all."""
    allowed = sorted(os.sched_getaffinity(0))
    if spread:
        return Cores(set(allowed[:2]), set(allowed[:2]))
    return Cores({allowed[0]}, {allowed[1 % len(allowed)]})


@contextlib.contextmanager
def pinned(cpus: set[int]) -> Iterator[None]:
    """Children that are started meanwhile inherit `cpus`, with every thread that they will have."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Stand(NamedTuple):
    """`folder` holds the database."""

    server: ServerProcess
    engine_url: str
    folder: Path
    engine_pid: int


@contextlib.contextmanager
def folder_for_bench(folder: Path | None = None) -> Iterator[Path]:
    """A new folder, removed afterwards; `folder` chooses the disk that is measured."""
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-", dir=folder) as made:
        yield Path(made)


@contextlib.contextmanager
def simulator(places: Cores, dialect: str = "sglang", port: int = 0) -> Iterator[SimulatorProcess]:
    """An engine; the caller is pinned to the clients' core, which is the engine's too, for as long."""
    with pinned(places.others), SimulatorProcess("--reasoning", "0", "--dialect", dialect, port=port) as engine:
        yield engine


@contextlib.contextmanager
def stand(
    folder: Path | None = None,
    database_url: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    dialect: str = "sglang",
    spread: bool = False,
) -> Iterator[Stand]:
    """Both processes, running; the caller is pinned to the clients' core for as long."""
    places = cores(spread)
    with folder_for_bench(folder) as made, simulator(places, dialect) as engine:
        server = ServerProcess(
            made, upstreams=[engine.base_url], database_url=database_url, environment=environment
        ).migrate()
        with pinned(places.server):
            server.start()
        try:
            yield Stand(server, engine.base_url, made, engine.pid)
        finally:
            server.stop()
