"""Servers that start in a quarter of a second: each is forked from a process that has its imports done.

They are whole processes all the same, with uvicorn, port, workers and store of their own. A test that starts one
for every crash point could not wait a second and a half for each.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ops.server import ROOT, ServerDidNotStart, is_healthy, reserve_port

START_S = 60.0
STOP_S = 30.0

IMPORTED = (
    "pytest",
    "uvicorn.main",
    "uvloop",
    *(f"app.{path.parent.name}.{path.stem}" for path in ROOT.glob("app/*/*.py") if path.parent.name != "tito"),
)
"""All that `app.main` imports. It reads its settings when it is itself imported: each process does that alone."""


class ForkedServer:
    """As `ops.server.ServerProcess`, over a migrated database; each start may have other settings.

    `application` is what uvicorn serves.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        upstreams: Sequence[str],
        *,
        application: str = "app.main:app",
        **settings: str,
    ) -> None:
        self.port = reserve_port(self)
        self._application = application
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "TURNLOG_DATABASE_URL": database_url,
            "TURNLOG_UPSTREAMS": ",".join(upstreams),
            "TURNLOG_WORKERS": "1",
            **settings,
        }
        self.log_path = folder / f"server-{self.port}.log"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(IMPORTED))
        self._process: ForkServerProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self, **settings: str) -> ForkedServer:
        """Start with further `settings` and wait until `/health` answers; one that still runs is stopped.

        Raises ServerDidNotStart.
        """
        self.stop()
        environment = {**self.environment, **settings}
        arguments = (self._application, self.port, environment, self.log_path)
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        deadline = time.monotonic() + START_S
        while not self.answers():
            if self._process.exitcode is not None or time.monotonic() > deadline:
                raise ServerDidNotStart(self.log_path.read_text(errors="replace"))
            time.sleep(0.01)
        return self

    def answers(self) -> bool:
        return is_healthy(self.port)

    def ended(self) -> int:
        """Wait for the process to end by itself; its exit code, negative for a signal's number."""
        assert self._process is not None
        self._process.join(STOP_S)
        code = self._process.exitcode
        assert code is not None, "the process is still alive"
        self._process = None
        return code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGTERM; nothing where the process has ended."""
        if self._process is not None and self._process.is_alive():
            self.signal(signal.SIGTERM)
            self.ended()

    def kill(self) -> None:
        """`kill -9`."""
        self.signal(signal.SIGKILL)
        self.ended()


def _serve(application: str, port: int, environment: Mapping[str, str], log_path: Path) -> None:
    """The forked process."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [name for name in os.environ if name.startswith("TURNLOG_")]:
        del os.environ[name]
    os.environ.update(environment)
    import uvicorn

    from app import crash_points

    importlib.reload(crash_points)  # it was imported under another environment
    uvicorn.run(application, port=port)
