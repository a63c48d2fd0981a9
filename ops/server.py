"""Runs Turnlog as a separate process, as an operator does: for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

ROOT = Path(__file__).resolve().parents[1]

VERBATIM = {"TURNLOG_CLIENT_REPLY": "verbatim"}
"""For a server whose clients' replies are compared with the log, byte by byte."""
STOP_S = 20.0
PORT = "{port}"
"""Placeholder for the port in a command."""


class ServerDidNotStart(Exception):
    """The process ended before it answered, or did not answer in time. The message is its output."""


def free_port() -> int:
    """A port that was free when this function returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reserve_port(owner: object) -> int:
    """Reserve a port for as long as `owner` lives, also while its server is down. The port is bound but not listened
    on.

    On Linux, a second socket with SO_REUSEADDR, which uvicorn sets, may listen on that port; the kernel gives the port
    to no other socket that asks for any free port. On other systems this is `free_port`.
    """
    if sys.platform != "linux":
        return free_port()
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    weakref.finalize(owner, holder.close)
    port: int = holder.getsockname()[1]
    return port


def is_healthy(port: int, path: str = "/health") -> bool:
    """Whether a server answers `path` with 200 on this local port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class OwnProcess:
    """Starts and stops a program that serves HTTP in a separate process. A context manager.

    The port stays the same after a restart, so that clients find the server again. Output goes to `log_path`. With
    `group`, the process leads a process group, and its children are killed with it.
    """

    spawn: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen
    """Creates the process. Tests replace it to fork from a process that has already loaded the code."""

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
        """Start the process and wait until `/health` answers. Raises ServerDidNotStart."""
        self.launch()
        return self.until_it_answers()

    def until_it_answers(self) -> Self:
        """Wait for `/health` of a process that was started, and kill it if it does not. Raises ServerDidNotStart."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self.answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerDidNotStart(self.log_path.read_text(errors="replace"))
            time.sleep(0.01)
        return self

    def launch(self) -> None:
        """Start the process without waiting."""
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

    def poll(self) -> int | None:
        """The exit code of a process that has ended by itself, as `subprocess` gives it; None if it runs or was ended
        here."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self) -> int | None:
        """Send SIGTERM, then SIGKILL after `stop_s` seconds. Returns the exit code as `subprocess` does; None if it did
        not run."""
        return self._end(signal.SIGTERM)

    def wait(self) -> int | None:
        """Wait for a process that ends by itself. Returns the exit code as `stop` does."""
        process, self._process = self._process, None
        return None if process is None else process.wait(self._start_timeout_s)

    def _end(self, signal_number: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        if signal_number == signal.SIGKILL:
            return self._killed(process)
        process.send_signal(signal_number)
        try:
            return process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            return self._killed(process)

    def _killed(self, process: subprocess.Popen[bytes]) -> int:
        """Kill the process, and its group if it leads one: children outlive a leader that is killed alone."""
        if self._group:
            with contextlib.suppress(ProcessLookupError):
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
    """Runs `alembic upgrade head`, then `uvicorn app.main:app`.

    `folder` holds the SQLite file, unless `database_url` names another store, and the log. `root` is the source tree to
    run. `max_files` limits the file descriptors of the process.
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
        """Upgrade the database to this code's revision. Raises ServerDidNotStart."""
        command = [sys.executable, "-m", "alembic", "upgrade", "head"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.spawn(command, cwd=self._root, env=self.environment, **pipes) as process:
            text, _ = process.communicate()
        if process.returncode:
            raise ServerDidNotStart(text.decode(errors="replace"))
        return self

    def __enter__(self) -> Self:
        return self.migrate().start()


class KeptServer(ServerProcess):
    """Runs `alembic upgrade head`, then `turnlog serve`; `pid` and the signals are the supervisor's."""

    def __init__(self, folder: Path, *, arguments: Sequence[str] = (), **more: Any) -> None:
        super().__init__(folder, **more)
        command = [sys.executable, "-m", "turnlog.cli", "serve", "--no-migrate", "--port", str(self.port)]
        self._command = [*command, *arguments]

    @property
    def started(self) -> list[int]:
        """The processes that have served or begun to, in order."""
        said = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", said)]
