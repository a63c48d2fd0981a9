"""One server process, as the keeper sees it."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import time

from turnlog.keeper.options import ServeOptions, python_command

READY, SERVING = b"i", b"s"
"""What a server sends over its control socket: it has imported everything; it accepts connections."""


class Phase(enum.IntEnum):
    """How far a server is."""

    IMPORTING = 0
    READY = 1
    STARTING = 2
    """Promoted, perhaps before it had imported everything."""
    SERVING = 3


class Child:
    """A server process and the keeper's end of its control socket. Raises OSError where there is no room for one."""

    def __init__(self, options: ServeOptions) -> None:
        self.phase = Phase.IMPORTING
        self.started_at = time.monotonic()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        try:
            with theirs:
                # Not in the keeper's process group: Ctrl-C is the keeper's to pass on, once.
                self._process = subprocess.Popen(
                    python_command("turnlog.keeper.server", options.to_json(), str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*options.sockets, theirs.fileno()),
                    process_group=0,
                )
        except OSError:
            self.control.close()
            raise
        self.pid = self._process.pid

    @property
    def is_spare(self) -> bool:
        return self.phase < Phase.STARTING

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    def promote(self, reason: str) -> None:
        """Tell it to serve. `reason` is how the server before it ended, for its log."""
        self.phase = Phase.STARTING
        with contextlib.suppress(OSError):  # it has died; the keeper is about to reap it
            self.control.send(reason.encode() + b"\n")

    def read_status(self) -> bool:
        """Read what it has sent. False: its end of the socket is closed."""
        try:
            sent = self.control.recv(16)
        except ConnectionError:
            return False
        if SERVING in sent:
            self.phase = Phase.SERVING
        elif READY in sent and self.phase == Phase.IMPORTING:
            self.phase = Phase.READY
        return bool(sent)

    def signal(self, number: int) -> None:
        """Not through `Popen`, which would reap a process that has ended: the keeper does that."""
        os.kill(self.pid, number)

    def record_exit(self, status: int) -> str:
        """It was reaped. Returns in words how it ended; `status` is its exit code, as `subprocess` has it."""
        self._process.returncode = status
        self.control.close()
        how = f"was killed by {_name(-status)}" if status < 0 else f"ended with exit code {status}"
        return f"server process {self.pid} {how}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
