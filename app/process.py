"""What a process does for itself: it measures its loop's lag, gives memory back to the system, counts features' faults,
and stops in time."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from app.tasks import cancelled

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
    log.critical("%s under this server: nothing more is written, and it ends", reason)
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
        log.exception("an unexpected fault in %s, after a commit", name)
