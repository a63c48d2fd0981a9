"""Bounds what a long command takes from a server on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Rests so that at most `percent` of the time is spent at work.

    Work is measured by `clock` in seconds: by default all time, so that waiting for the disk counts too;
    `time.process_time` counts the CPU's time alone, for work that waits for a network.
    """

    def __init__(self, percent: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = percent / 100
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._worked, self._began = self._clock(), time.monotonic()

    def rest(self) -> None:
        """Sleep for the work done since the last call."""
        worked, passed = self._clock() - self._worked, time.monotonic() - self._began
        if (left := worked / self._share - passed) > 0:
            time.sleep(left)
        self._begin()
