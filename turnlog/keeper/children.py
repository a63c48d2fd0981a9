"""One server process, as the keeper sees it."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import time

from turnlog.keeper.plan import Plan, command

IMPORTED, SERVES = b"i", b"s"
"""What a server says of itself: it can take over; it accepts connections."""


class Phase(enum.IntEnum):
    """How far it is."""

    IMPORTS = 0
    WAITS = 1
    STARTS = 2
    """It was told to serve, perhaps before it had imported everything."""
    SERVES = 3


class Child:
    """Started at once. Raises OSError where there is no room for a process."""

    def __init__(self, plan: Plan) -> None:
        self.phase = Phase.IMPORTS
        self.since = time.monotonic()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        try:
            with theirs:
                # Not in the keeper's process group: Ctrl-C is the keeper's to pass on, once.
                self._process = subprocess.Popen(
                    command("turnlog.keeper.server", plan.text(), str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*plan.sockets, theirs.fileno()),
                    process_group=0,
                )
        except OSError:
            self.control.close()
            raise
        self.pid = self._process.pid

    @property
    def is_spare(self) -> bool:
        return self.phase < Phase.STARTS

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since

    def serve(self, reason: str) -> None:
        """Tell it to serve, and what happened to the one before it, for its log."""
        self.phase = Phase.STARTS
        with contextlib.suppress(OSError):  # it has died meanwhile, which the keeper is about to hear
            self.control.send(reason.encode() + b"\n")

    def hear(self) -> bool:
        """Read what it says of itself. False: it will say nothing more."""
        try:
            said = self.control.recv(16)
        except ConnectionError:
            return False
        if SERVES in said:
            self.phase = Phase.SERVES
        elif IMPORTED in said and self.phase == Phase.IMPORTS:
            self.phase = Phase.WAITS
        return bool(said)

    def signal(self, number: int) -> None:
        """Not by `Popen`, which would reap it if it has ended: that is the keeper's to do."""
        os.kill(self.pid, number)

    def ended(self, status: int) -> str:
        """It was reaped with this exit code, as `subprocess` has it: in words."""
        self._process.returncode = status
        self.control.close()
        how = f"was killed by {_name(-status)}" if status < 0 else f"ended with exit code {status}"
        return f"server process {self.pid} {how}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
