"""What a process does for itself: it ends its tasks, measures its loop's lag, gives memory back to the system, counts
features' faults, stops in time, and bounds its connections."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")


async def cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended. None is a task that was never started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end; a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise


log = logging.getLogger("turnlog")

EVERY_S = 0.05
"""Interval of the measurements. The loop is blocked unnoticed for at most this long."""

SPAN_S, SPANS = 10.0, 6
"""The last minute is kept as SPANS parts of SPAN_S seconds, each with its largest lag."""

LARGE = 4 << 20
"""Bytes of a request's bodies after which it is worth some milliseconds of a thread."""

WAIT_S = 1.0
"""Bodies that are released together are given back once."""

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone

_Handler = Callable[[int, FrameType | None], object]


class LoopLag:
    """Measures the delay that every request of this process has in addition to its own work, as one task from `start`
    to `stop`. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._measure(), name="turnlog-lag")

    async def stop(self) -> None:
        await cancelled(self._task)

    @property
    def largest_s(self) -> float:
        """The largest lag of the last minute, in seconds."""
        oldest = self._clock() - SPAN_S * SPANS
        return max((lag for began, lag in self._spans if began >= oldest), default=0.0)

    def note(self, lag_s: float) -> None:
        now = self._clock()
        if not self._spans or now - self._spans[-1][0] >= SPAN_S:
            self._spans.append((now, lag_s))
        elif lag_s > self._spans[-1][1]:
            self._spans[-1] = (self._spans[-1][0], lag_s)

    async def _measure(self) -> None:
        while True:
            began = self._clock()
            await asyncio.sleep(EVERY_S)
            self.note(max(0.0, self._clock() - began - EVERY_S))


class FreedMemory:
    """Gives the memory of large bodies back to the system. glibc keeps what was freed, in an arena a thread, until it
    is told: without, a process stays as large as its largest bodies together have made it."""

    def __init__(self) -> None:
        self._waiting: asyncio.TimerHandle | None = None

    def released(self) -> None:
        """A request's LARGE bodies were released."""
        if self._waiting is None and _trim is not None:
            self._waiting = asyncio.get_running_loop().call_later(WAIT_S, self._give_back)

    def _give_back(self) -> None:
        self._waiting = None
        # On a thread: it waits for none, but takes a millisecond for each 100 MB.
        asyncio.get_running_loop().run_in_executor(None, _trim, 0)


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGINT and SIGTERM, before uvicorn's own handler, which waits until all replies are complete."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        uvicorn_handler = signal.getsignal(number)
        if not callable(uvicorn_handler):
            continue

        def handle(received: int, frame: FrameType | None, uvicorn_handler: _Handler = uvicorn_handler) -> None:
            loop.call_soon_threadsafe(stop)
            uvicorn_handler(received, frame)

        signal.signal(number, handle)


def end_without_store(reason: str) -> None:
    """Stop as on SIGTERM. A supervisor restarts the process, which opens the database as it is then."""
    log.critical("%s while this server was running: it writes nothing more, and exits", reason)
    signal.raise_signal(signal.SIGTERM)


class FeatureFaults:
    """Counts and logs faults of features in what follows a commit, so that they cost no client the reply to what is on
    disk."""

    def __init__(self) -> None:
        self.total = 0

    def note(self, function: Callable[..., None]) -> None:
        """Call it where the fault was caught."""
        self.total += 1
        name = f"{function.__module__}.{function.__qualname__}"
        log.exception("unexpected error in %s, after a commit", name)


# Client connections: file descriptors are left for health checks and for the engines. If a process has no descriptor
# left, uvloop accepts a connection and resets it at once, without an error or a log line. The kernel gives each
# connection the lowest free descriptor, so its number tells how many are in use.

connections_log = logging.getLogger("turnlog.connections")

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
            connections_log.warning(
                "out of file descriptors: %d connections refused since the last such line, %d are open; the "
                "limit is %d open files: raise it (ulimit -n, LimitNOFILE)",
                self.refused - self._logged,
                self.connections,
                self._limit,
            )
            self._logged_at, self._logged = now, self.refused
        return f"{self.connections} connections are open, and at most {self._limit} files may be"
