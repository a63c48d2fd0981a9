"""What `turnlog serve` becomes: it holds the listening sockets, and starts a server again when it dies.

The sockets stay open here, so the kernel queues connections until the next server accepts them: no client is refused,
however long a start takes. When the supervisor dies, its servers end at once. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from typing import NamedTuple

from turnlog.server_code import PACKAGE

BACKOFF_S = 0.1, 5.0
"""First and longest wait before another server is started in place of one that died before it served."""

GIVE_UP_S = 60.0
"""How long servers are restarted that cannot start, as while the database is away. Then the supervisor ends too."""

BACKLOG = 4096
"""Connections that may wait to be accepted; `net.core.somaxconn` may allow fewer."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which several servers share their metrics (`app/metrics.py`)."""


class ServeOptions(NamedTuple):
    """Passed on the command line. `sockets` are listening descriptors, `host` and `port` their address for the log;
    `workers` servers run at a time. A stop waits `stop_s` seconds for open requests. `migrates`: the server brings the
    database up to date first, and `greets`: it says where it is and who has access."""

    sockets: tuple[int, ...]
    host: str
    port: int
    workers: int
    stop_s: int
    migrates: bool
    greets: bool = True

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> ServeOptions:
        read = ServeOptions(**json.loads(text))
        return read._replace(sockets=tuple(read.sockets))


def in_url(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this package as it is here, with this interpreter.

    Without `-P` Python would import a `turnlog.py` of the working folder; only in the checkout is that ours.
    """
    is_checkout = not sys.flags.safe_path and os.path.samefile(os.curdir, PACKAGE.parent)
    return [sys.executable, *([] if is_checkout else ["-P"]), "-m", module, *arguments]


def _start_server(options: ServeOptions) -> tuple[int, socket.socket]:
    """Its process number, and this end of its control socket: the other end tells the server when the supervisor dies,
    and a byte comes back when it serves. Raises OSError where there is no room for a process."""
    control, theirs = socket.socketpair()
    control.setblocking(False)
    with theirs:
        theirs.set_inheritable(True)
        command = python_command("turnlog.server", options.to_json(), str(theirs.fileno()))
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        # Not in the supervisor's process group: Ctrl-C is the supervisor's to pass on, once.
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=[no_input], setpgroup=0, setsigmask=())
    return pid, control


def _has_served(control: socket.socket) -> bool:
    try:
        return bool(control.recv(1, socket.MSG_PEEK))
    except (BlockingIOError, ConnectionError):
        return False


def supervise(options: ServeOptions) -> int:
    """Keep servers running until a signal stops them, or they cannot start. Returns the exit code."""
    awaited = {signal.SIGCHLD, signal.SIGALRM, *STOPS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        awaited.remove(signal.SIGHUP)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    servers: dict[int, socket.socket] = {}
    exit_code: int | None = None
    has_served = False
    failing_since: float | None = None
    backoff_s, retry_at = 0.0, 0.0
    while exit_code is None or servers:
        if exit_code is None and len(servers) < options.workers:
            if (wait_s := retry_at - time.monotonic()) <= 0:
                try:
                    pid, control = _start_server(options._replace(greets=not servers and not has_served))
                    servers[pid] = control
                except OSError as error:
                    _say(f"no server process could be started: {error.strerror}")
                    retry_at = time.monotonic() + BACKOFF_S[1]
                continue
            signal.setitimer(signal.ITIMER_REAL, wait_s)
        number = signal.sigwait(awaited)
        stop = signal.SIGTERM if number == signal.SIGHUP else number if number in STOPS else None
        failed_with = 0
        for pid, code in _ended():
            if pid not in servers:
                continue  # an orphan, which a container leaves to its first process
            with servers.pop(pid) as control:
                served = _has_served(control)
            how = f"server process {pid} {_outcome(code)}"
            if stop or exit_code is not None:
                continue
            if served:
                has_served, failing_since, backoff_s = True, None, 0.0
                options = options._replace(migrates=False)  # others serve this version
                _say(f"{how}; starting another")
                continue
            backoff_s = min(max(2 * backoff_s, BACKOFF_S[0]), BACKOFF_S[1])
            retry_at = time.monotonic() + backoff_s
            failing_since = failing_since or time.monotonic()
            is_hopeless = time.monotonic() - failing_since > GIVE_UP_S or (code > 0 and not has_served)
            if is_hopeless and not any(map(_has_served, servers.values())):
                stop, failed_with = signal.SIGTERM, code if code > 0 else 128 - code
            else:
                _say(f"{how} before it was ready; retrying in {backoff_s:g} s")
        if stop:
            if exit_code is None:
                exit_code = failed_with
                for descriptor in options.sockets:  # connections are refused from now on
                    os.close(descriptor)
            for pid in servers:  # the second Ctrl-C tells uvicorn not to wait for open requests
                os.kill(pid, stop)
    return exit_code


def _ended() -> list[tuple[int, int]]:
    """Process number and exit code, negative for a signal, of each child that has ended."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended


def _outcome(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the log is gone: servers are restarted all the same
        print(f"turnlog: {line}", file=sys.stderr, flush=True)


def main() -> int:
    options = ServeOptions.from_json(sys.argv[1])
    if options.workers == 1 or os.environ.get(METRICS_FOLDER):
        return supervise(options)
    with tempfile.TemporaryDirectory(prefix="turnlog-metrics-") as folder:
        os.environ[METRICS_FOLDER] = folder
        return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
