"""Measures the event loop's lag: the delay that every request of this process has in addition to its own work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from app.tasks import cancelled

EVERY_S = 0.05
"""Interval of the measurements. The loop is blocked unnoticed for at most this long."""

SPAN_S, SPANS = 10.0, 6
"""The last minute is kept as SPANS parts of SPAN_S seconds, each with its largest lag."""


class LoopLag:
    """Runs as one task from `start` to `stop`. `clock` returns seconds."""

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
