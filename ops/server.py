"""Turnlog as a process of its own, as an operator starts it: for the demo, tests and benchmarks."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

ROOT = Path(__file__).resolve().parents[1]
STOP_S = 20.0
PORT = "{port}"
"""Stands for the port in a command."""


class ServerDidNotStart(Exception):
    """The process ended before it answered; the message is what it printed."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reserve_port(owner: object) -> int:
    """A port that nobody else gets while `owner` lives, also while its server is down: bound, but not listened on.

    Linux lets a second socket listen there if both ask for SO_REUSEADDR, as uvicorn does, and gives such a port to no
    connection and to nobody who asks for any. Other systems: as `free_port`.
    """
    if sys.platform != "linux":
        return free_port()
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    weakref.finalize(owner, holder.close)
    port: int = holder.getsockname()[1]
    return port


def is_healthy(port: int) -> bool:
    """Does somebody answer `/health` there?"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class OwnProcess:
    """A program that serves HTTP, as a process of its own: started, awaited, ended. A context manager.

    The port stays the same over restarts, so that clients find the server again. What it prints goes to `log_path`.
    With `group` it leads a process group, and what it has started ends with it where it has to be killed.
    """

    spawn: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen
    """How the process is made; tests fork it from one that has loaded the code already."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        port: int = 0,
        environment: Mapping[str, str],
        root: Path = ROOT,
        start_timeout_s: float = 60.0,
        stop_s: float = STOP_S,
        group: bool = False,
    ) -> None:
        self.port = port or reserve_port(self)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self.environment = environment
        self._command = [part.replace(PORT, str(self.port)) for part in command]
        self._root = root
        self._start_timeout_s = start_timeout_s
        self._stop_s = stop_s
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerDidNotStart("not started")
        return self._process.pid

    def start(self) -> Self:
        """Start and wait until `/health` answers. Raises ServerDidNotStart."""
        self.launch()
        deadline = time.monotonic() + self._start_timeout_s
        while not self.answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerDidNotStart(self.log_path.read_text(errors="replace"))
            time.sleep(0.01)
        return self

    def launch(self) -> None:
        """Start without waiting."""
        with self.log_path.open("ab") as log:
            self._process = self.spawn(
                self._command,
                cwd=self._root,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=self._group,
            )

    def answers(self) -> bool:
        return is_healthy(self.port)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> int | None:
        """SIGTERM, and SIGKILL if that takes too long. The exit code, as `subprocess` has it; None: it did not run."""
        return self._end(signal.SIGTERM)

    def wait(self) -> int | None:
        """For the end of a process that ends by itself. Its exit code, as `stop`."""
        process, self._process = self._process, None
        return None if process is None else process.wait(self._start_timeout_s)

    def _end(self, sign: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(sign)
        try:
            return process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            if self._group:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            return process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServerProcess(OwnProcess):
    """`alembic upgrade head`, then `uvicorn app.main:app`.

    `folder` gets the SQLite file (unless `database_url` names another store) and the log. `root` is the tree whose code
    runs, `max_files` how many file descriptors the process may have.
    """

    def __init__(
        self,
        folder: Path,
        *,
        upstreams: Sequence[str] = (),
        database_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        port: int = 0,
        start_timeout_s: float = 60.0,
        root: Path = ROOT,
        application: str = "app.main:app",
        max_files: int | None = None,
    ) -> None:
        port = port or reserve_port(self)
        self.database_path = folder / "turnlog.db"
        command = [sys.executable, "-m", "uvicorn", application, "--port", PORT, *arguments]
        if max_files is not None:
            command = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
        settings = {
            "TURNLOG_DATABASE_URL": database_url or f"sqlite+aiosqlite:///{self.database_path}",
            "TURNLOG_UPSTREAMS": ",".join(upstreams),
        }
        super().__init__(
            command,
            folder / f"server-{port}.log",
            port=port,
            environment={**inherited, **settings, **(environment or {})},
            root=root,
            start_timeout_s=start_timeout_s,
        )

    def migrate(self) -> Self:
        """Bring the database to this code's revision. Raises ServerDidNotStart."""
        command = [sys.executable, "-m", "alembic", "upgrade", "head"]
        done = subprocess.run(
            command, cwd=self._root, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ServerDidNotStart(done.stdout + done.stderr)
        return self

    def __enter__(self) -> Self:
        return self.migrate().start()
