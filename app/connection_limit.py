"""Limits client connections, so that file descriptors are left for health checks and for the engines.

If a process has no file descriptor left, uvloop accepts a connection and resets it at once, without an error or a log
line. The kernel gives each connection the lowest free descriptor, so its number tells how many are in use.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Callable
from typing import Literal, Protocol

log = logging.getLogger("turnlog.connections")

PROBES = (b"/health", b"/ready", b"/metrics")
"""Paths that are also answered, to GET and HEAD, on the last descriptors. They are matched without the root path, which
uvicorn adds later."""

RESERVE_DIVISOR, MIN_RESERVE, MAX_RESERVE = 8, 16, 1024
"""Descriptors reserved for engines, the database and files: the limit divided by RESERVE_DIVISOR, within
MIN_RESERVE and MAX_RESERVE. Up to half of them may be used by connections whose head has not arrived yet, since the
request may be for PROBES."""

MAX_FILES = 1 << 20
"""Upper bound of the limit: a system may allow more than there is memory for."""

LOG_EVERY_S = 60.0

Capacity = Literal["free", "scarce", "none"]


class WaitingConnection(Protocol):
    """A connection on one of the last descriptors whose head has not arrived."""

    def reject(self) -> None: ...


class ConnectionLimit:
    """`clock` returns seconds. `refused` counts rejected connections, `connections` the open ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limit = MAX_FILES
        self._reserve = MAX_RESERVE
        self._waiting: dict[WaitingConnection, None] = {}
        self._logged_at = -LOG_EVERY_S
        self._logged = 0
        self.refused = 0
        self.connections = 0

    def open(self) -> None:
        """Raise the process's limit of open files as far as the system allows."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
        self._limit = MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_FILES)
        self._reserve = max(MIN_RESERVE, min(self._limit // RESERVE_DIVISOR, MAX_RESERVE))

    def capacity(self, descriptor: int) -> Capacity:
        """The remaining capacity if a new connection has this descriptor."""
        left = self._limit - descriptor
        return "free" if left > self._reserve else "scarce" if left > self._reserve // 2 else "none"

    def wait(self, connection: WaitingConnection) -> None:
        """Add a connection that waits for its head. If there are too many, the oldest one is rejected."""
        self._waiting[connection] = None
        if len(self._waiting) > self._reserve // 2:
            next(iter(self._waiting)).reject()

    def stop_waiting(self, connection: WaitingConnection) -> None:
        self._waiting.pop(connection, None)

    def refuse(self) -> str:
        """Count a rejected connection and log it at most once a minute. Returns the reason."""
        self.refused += 1
        now = self._clock()
        if now - self._logged_at >= LOG_EVERY_S:
            log.warning(
                "out of file descriptors: %d connections refused since the last such line, %d are open; at most %d "
                "files may be open (ulimit -n, LimitNOFILE)",
                self.refused - self._logged,
                self.connections,
                self._limit,
            )
            self._logged_at, self._logged = now, self.refused
        return f"{self.connections} connections are open, and at most {self._limit} files may be"
