"""By how much the event loop comes too late: what every request of this process waits for beside its own work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from app.tasks import cancelled

EVERY_S = 0.05
"""Between two looks: a loop that is held for longer than that is seen."""

SPAN_S, SPANS = 10.0, 6
"""The largest lag of the last minute is kept by parts of it."""


class LoopLag:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="turnlog-lag")

    async def stop(self) -> None:
        await cancelled(self._looking)

    @property
    def largest_s(self) -> float:
        """Of the last minute."""
        oldest = self._clock() - SPAN_S * SPANS
        return max((lag for began, lag in self._spans if began >= oldest), default=0.0)

    def note(self, lag_s: float) -> None:
        now = self._clock()
        if not self._spans or now - self._spans[-1][0] >= SPAN_S:
            self._spans.append((now, lag_s))
        elif lag_s > self._spans[-1][1]:
            self._spans[-1] = (self._spans[-1][0], lag_s)

    async def _look(self) -> None:
        while True:
            began = self._clock()
            await asyncio.sleep(EVERY_S)
            self.note(max(0.0, self._clock() - began - EVERY_S))
