"""What the benchmark must know of a server: how to install and start it, open a session, call chat, and read what it
recorded. `ops/bench/peers/servers.py` has a `Peer` of a few lines for each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx

from ops.bench.client import Connection
from ops.bench.load import Session
from ops.bench.primary import Database
from ops.server import ROOT, OwnProcess, is_healthy
from ops.simulator.wire import Dialect

ENVIRONMENTS = ROOT / "var" / "peers"


class NotInstalled(Exception):
    """The server cannot be run here; the message says why, and stands in its row."""


class Place(NamedTuple):
    """Where a server runs. `folder` is for its data, empty at first, and kept over a restart. `python` is the
    interpreter of its environment, `checkout` the source tree that `--server NAME=PATH` gave. What `stack` holds ends
    after the server; `databases` gets the server's if it is another process."""

    folder: Path
    engine_url: str
    python: Path
    checkout: Path | None
    stack: contextlib.ExitStack
    databases: list[Database]


class Record(NamedTuple):
    """What a server hands to a trainer of one sampled turn: the ids in the loss, a logprob each, and the ids before
    them. None: it has none of that. A logprob may be None where the server says that it does not know it."""

    ids: Sequence[object]
    logprobs: Sequence[object] | None
    prompt: Sequence[object] | None = None


class Peer(Protocol):
    """A server. `dialect` is the engine's whose replies it records; `health` its lightest route;
    `streams` whether it answers a request for a stream with one."""

    name: str
    requirements: Sequence[str] = ()
    """pip's, installed into an environment of its own; none: the benchmark's own environment."""
    bare: Sequence[str] = ()
    """Requirements that are installed without their own."""
    needs_checkout: bool = False
    """It is not on PyPI: `--server NAME=PATH` says where it is."""
    dialect: Dialect = "vllm"
    health: str = "/health"
    streams: bool = True

    def process(self, place: Place) -> OwnProcess:
        """The server before an engine at `place.engine_url`, not started. Raises NotInstalled."""

    def crash(self, process: OwnProcess) -> None:
        """Kill what serves with SIGKILL; returns once it is started again and answers. Raises ServerDidNotStart."""
        process.kill()
        process.start()

    async def open(self, connection: Connection, name: str) -> Session:
        """Open a session, called `name` where the server leaves that to its client. Raises Broken."""

    async def records(self, client: httpx.AsyncClient, session: Session) -> Sequence[Record] | None:
        """What a trainer gets of a session, in order; empty if the server does not know it. None: it records nothing.
        Raises HTTPError."""
        return None


class PeerProcess(OwnProcess):
    """A server's process with its children; `command` has PORT where the port belongs."""

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        *,
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            command,
            place.folder / "server.log",
            environment={**os.environ, **(environment or {})},
            root=place.folder,
            start_timeout_s=120.0,
            stop_s=10.0,
            group=True,
        )
        self._health = health

    def answers(self) -> bool:
        return is_healthy(self.port, self._health)


def by_mask(ids: Sequence[object], logprobs: Sequence[object] | None, mask: Sequence[object]) -> list[Record]:
    """The records of a row whose `mask` has a true value for each id in the loss: one for each run of them. `logprobs`
    has a value for each id, or for each in the loss."""
    records = []
    taken = start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and end < len(mask) and mask[end]:
            end += 1
        if end > start:
            first = start if logprobs is None or len(logprobs) == len(ids) else taken
            own = None if logprobs is None else logprobs[first : first + end - start]
            records.append(Record(ids[start:end], own, ids[:start]))
            taken += end - start
        start = max(end, start + 1)
    return records


def interpreter(peer: Peer) -> Path:
    """The interpreter of the peer's environment, which is made at the first use. Raises NotInstalled."""
    wanted = "+".join((*peer.requirements, *peer.bare))
    home = ENVIRONMENTS / wanted.replace("/", "_").replace("=", "-")[:120]
    done = home / "installed"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        _install(home / "bin" / "python", *peer.requirements)
        if peer.bare:
            _install(home / "bin" / "python", "--no-deps", *peer.bare)
        done.touch()
    return home / "bin" / "python"


def _install(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", *packages]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raise NotInstalled(f"pip: {lines[-1] if lines else made.returncode}")
