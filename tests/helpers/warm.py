"""`python -m …` as a process that is forked from one which has imported the code already.

A server needs 1.3 s of CPU to import what it is made of, 2 s more with a tokenizer, and the tests start a thousand.
The forked process is the command in all else: it has its own arguments, environment, folder, output and exit code, dies
by its own signals, and shares nothing with the test. Commands of another tree and what Python itself reads at its start
are started cold.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOADED = (
    "app.main",
    "uvicorn",
    "uvloop",
    "httptools",
    "aiosqlite",
    "asyncpg",
    "alembic.config",
    "ops.verify",
    "turnlog.cli.commands",
    "ops.simulator.app",
)
READ_AT_START = ("PYTHON", "PROMETHEUS_MULTIPROC_DIR")
"""Variables of these names are read by Python or a package when it is loaded."""
MESSAGE_BYTES = 1 << 18


class Forked(subprocess.Popen[Any]):
    """A command that the forker has forked: pipes, text and waiting are those of `subprocess`."""

    _waitpid_lock: threading.Lock
    _close_pipe_fds: Callable[..., None]

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ) -> None:  # fmt: skip
        """In place of fork and exec."""
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            request = {"command": args[2:], "folder": str(cwd), "environment": dict(env)}
            socket.send_fds(_forker(), [json.dumps(request).encode()], [theirs.fileno(), *files])
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self.pid = int(self._report.recv(64))
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:
            if self.returncode is None:
                self._report.settimeout(timeout)
                try:
                    status = self._report.recv(64)
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
                assert status, "the process that forks commands has ended"
                self._report.close()
                self.returncode = os.waitstatus_to_exitcode(int(status))
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if not self._waitpid_lock.locked():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(0.0)
        return self.returncode


def popen(command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`, forked where the command can be."""
    is_other_tree = Path(cwd) != ROOT and (Path(cwd) / "app").exists()
    is_cold = [*command[:2]] != [sys.executable, "-m"] or is_other_tree or _own(env) != _own(os.environ)
    kind = subprocess.Popen if is_cold or more.get("start_new_session") else Forked
    return kind(command, cwd=cwd, env=env, **more)


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)} | {"PYTHONPATH": ""}


@functools.cache
def _forker() -> socket.socket:
    """The way to this process's forker, which ends when it is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    command = [sys.executable, __file__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, cwd=ROOT, env=plain, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Forker:
    """Forks until nobody can ask any more."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._reports: dict[int, socket.socket] = {}

    def command(self) -> dict[str, Any] | None:
        """Returns in each forked process with its command, and in this one at the end with none."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            ready, _, _ = select.select([self._requests.fileno(), wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._requests.fileno() not in ready:
                continue
            request, files, _, _ = socket.recv_fds(self._requests, MESSAGE_BYTES, 4)
            if not request:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for opened in (wake, woken):
                    os.close(opened)
                self._become(files)
                asked: dict[str, Any] = json.loads(request)
                return asked
            for given in files[1:]:
                os.close(given)
            report = self._reports[pid] = socket.socket(fileno=files[0])
            report.send(str(pid).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                with self._reports.pop(pid) as report, contextlib.suppress(OSError):
                    report.send(str(status).encode())

    def _become(self, files: list[int]) -> None:
        """In the forked process: nothing of the forker's stays open, and its files are those it was asked for."""
        for report in self._reports.values():
            report.close()
        self._requests.close()
        for number, given in enumerate(files[1:]):
            os.dup2(given, number)
        for sent in files:
            os.close(sent)
        # A stream remembers of its file whether one can seek in it.
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(command: list[str], folder: str, environment: dict[str, str]) -> None:
    """What `python -m` does, with the modules that are loaded."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    multiprocessing.current_process().authkey = os.urandom(32)
    importlib.reload(sys.modules["app.crash_points"])
    sys.argv = command
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process decides when it has heard enough
    sys.path[0] = str(ROOT)
    for name in LOADED:
        importlib.import_module(name)
    del sys.modules["app.main"], sys.modules["app"].main
    # Threads of this process would not be in those that it forks, and nobody asked it for models.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    if importlib.util.find_spec("transformers"):
        _ = importlib.import_module("transformers").AutoTokenizer
    importlib.import_module("ops.simulator.tokenizer").Tokenizer()
    gc.collect()
    gc.freeze()
    asked = Forker(requests).command()
    if asked is not None:
        run(**asked)


if __name__ == "__main__":
    main()
