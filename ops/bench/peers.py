"""Other servers that record turns, from their published packages, each in a virtual environment of its own.

rllm-model-gateway 0.1.0 has Turnlog's routes for sessions and chat. One process serves; it has no workers, and an
inference engine is what it calls a worker. Its store is SQLite (its default) or memory; it writes a trace in the
background after the reply (its default) or, with `sync_traces`, before. `sync_traces` exists only in its
configuration file. With SQLite it runs `journal_mode=DELETE, synchronous=NORMAL`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
import venv
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ops.bench.client import Connection
from ops.bench.stand import Cores, folder_for_bench, pinned
from ops.bench.targets import Running, Target
from ops.server import ROOT, free_port, is_healthy

ENVIRONMENTS = ROOT / "var" / "peers"
PACKAGE = "rllm-model-gateway"
VERSION = "0.1.0"
START_TIMEOUT_S = 30.0
STOP_S = 30.0
DRAIN_S = 60.0
"""How long a store that is written in the background may take to hold all that was answered."""

Store = Literal["sqlite-sync", "sqlite", "memory"]
STORES: tuple[Store, ...] = ("sqlite-sync", "sqlite", "memory")
_CONFIGURED: dict[Store, str] = {
    "sqlite-sync": "SQLite, sync_traces: a turn is recorded before its reply",
    "sqlite": "SQLite, its defaults: a turn is recorded after its reply",
    "memory": "memory, sync_traces: recorded before its reply, lost with the process",
}


class PeerFailed(Exception):
    """It could not be installed or did not start; the message is what it printed."""


class RllmGateway:
    """The gateway with one of its stores."""

    def __init__(self, store: Store, folder: Path | None = None, extra_packages: Sequence[str] = ()) -> None:
        self.name = f"{PACKAGE}, {store}"
        self.configured = _CONFIGURED[store] + "".join(f", with {package}" for package in extra_packages)
        self._store = store
        self._folder = folder
        self._program = installed(extra_packages)

    @contextlib.asynccontextmanager
    async def running(self, engine_url: str, places: Cores) -> AsyncIterator[Running]:
        with folder_for_bench(self._folder) as made:
            gateway = _Gateway(self._program, made, self._store, engine_url)
            with pinned(places.server):
                gateway.start()
            try:
                yield gateway
            finally:
                gateway.stop()


def gateways(folder: Path | None, stores: Sequence[Store], extra_packages: Sequence[str]) -> list[Target]:
    """One target a store. Raises PeerFailed."""
    return [RllmGateway(store, folder, extra_packages) for store in stores]


def installed(extra_packages: Sequence[str] = ()) -> Path:
    """The gateway's program, installed where it is not yet. Raises PeerFailed."""
    name = "-".join([PACKAGE, VERSION, *("".join(filter(str.isalnum, package)) for package in extra_packages)])
    home = ENVIRONMENTS / name
    program = home / "bin" / PACKAGE
    if not program.exists():
        venv.create(home, with_pip=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", f"{PACKAGE}=={VERSION}", *extra_packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerFailed(done.stdout + done.stderr)
    return program


class _Gateway:
    def __init__(self, program: Path, folder: Path, store: Store, engine_url: str) -> None:
        self._port = free_port()
        self.base_url = f"http://127.0.0.1:{self._port}"
        self.pid: int | None = None
        self._log = folder / "gateway.log"
        configuration = folder / "gateway.yaml"
        configuration.write_text(
            json.dumps(  # which is YAML too
                {
                    "host": "127.0.0.1",
                    "port": self._port,
                    "workers": [{"url": engine_url}],
                    "store_worker": store.partition("-")[0],
                    "db_path": str(folder / "gateway.db"),
                    "sync_traces": store != "sqlite",
                    "log_level": "WARNING",
                }
            )
        )
        self._command = [str(program), "--config", str(configuration)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers. Raises PeerFailed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLLM_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        self.pid = self._process.pid
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise PeerFailed(self._log.read_text(errors="replace"))
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    async def recorded(self, expected: int) -> int | None:
        """Traces that its store counts; those written in the background get some time to arrive."""
        deadline = time.monotonic() + DRAIN_S
        while True:
            async with await Connection.connect(self.base_url) as connection:
                sessions: list[dict[str, Any]] = await connection.json("GET", "/sessions")
            count: int = sum(session["trace_count"] for session in sessions)
            if count >= expected or time.monotonic() > deadline:
                return count
            await asyncio.sleep(0.2)
