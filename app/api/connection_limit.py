"""How many connections may be open, so that one is left for whoever asks how the server is, and for the engines.

Where a process has no file descriptor left, uvloop accepts a connection and resets it at once: no error reaches
anybody, and no line is written. The kernel gives each connection the lowest free descriptor, so its number tells how
full the process is.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Callable
from typing import Literal, Protocol

log = logging.getLogger("turnlog.connections")

KEPT_FOR = (b"/health", b"/ready", b"/metrics")
"""What is answered also on the last descriptors, to GET and HEAD. A root path is not part of it: uvicorn puts that
before what has been asked for."""

RESERVE, LEAST_RESERVE, MOST_RESERVE = 8, 16, 1024
"""The part of the descriptors, as a divisor, that connections of clients do not get, and its bounds: they are for
engines, the database, files. As many as half of them may wait there for a head, which may ask for KEPT_FOR."""

MOST_FILES = 1 << 20
"""A system may allow more than anybody has memory for."""

TELL_EVERY_S = 60.0

Capacity = Literal["free", "scarce", "none"]


class WaitingConnection(Protocol):
    """A connection on one of the last descriptors whose head has not come."""

    def turn_away(self) -> None: ...


class ConnectionLimit:
    """`clock` gives seconds. `refused` counts connections that were turned away, `connections` those that are open."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limit = MOST_FILES
        self._reserve = MOST_RESERVE
        self._waiting: dict[WaitingConnection, None] = {}
        self._told_at = -TELL_EVERY_S
        self._told = 0
        self.refused = 0
        self.connections = 0

    def open(self) -> None:
        """Take as many descriptors as the system allows this process."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
        self._limit = MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)
        self._reserve = max(LEAST_RESERVE, min(self._limit // RESERVE, MOST_RESERVE))

    def room(self, descriptor: int) -> Capacity:
        """What is left, where a connection has got this descriptor."""
        left = self._limit - descriptor
        return "free" if left > self._reserve else "scarce" if left > self._reserve // 2 else "none"

    def wait(self, connection: WaitingConnection) -> None:
        """It waits for its head, in place of the one that has waited longest where there are too many."""
        self._waiting[connection] = None
        if len(self._waiting) > self._reserve // 2:
            next(iter(self._waiting)).turn_away()

    def wait_no_more(self, connection: WaitingConnection) -> None:
        self._waiting.pop(connection, None)

    def refuse(self) -> str:
        """Count a connection that is turned away, and say so once a minute; why it is."""
        self.refused += 1
        now = self._clock()
        if now - self._told_at >= TELL_EVERY_S:
            log.warning(
                "out of file descriptors: %d connections refused since this was last said, %d are open; at most %d "
                "files may be open (ulimit -n, LimitNOFILE)",
                self.refused - self._told,
                self.connections,
                self._limit,
            )
            self._told_at, self._told = now, self.refused
        return f"{self.connections} connections are open, and at most {self._limit} files may be"
