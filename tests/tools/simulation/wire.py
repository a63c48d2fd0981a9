"""A simulated client's connection, as the process at its other end sees it."""

from __future__ import annotations

import math
from collections.abc import Callable


class Wire:
    """`came_at`: the request lay there to be read; `begun_at`: the process began with it; `over_at`: its client had its
    answer or gave up. A proxy keeps the connection when its client has given up."""

    def __init__(self, now: Callable[[], float], process: str, *, is_proxied: bool) -> None:
        self._now = now
        self.process = process
        self.is_proxied = is_proxied
        self.came_at = self.begun_at = self.over_at = math.inf

    def come(self) -> None:
        self.came_at = self._now()

    def begin(self) -> None:
        self.begun_at = self._now()

    def end(self) -> None:
        self.over_at = self._now()

    def is_gone(self) -> bool:
        return self.over_at < math.inf and not self.is_proxied

    def data_age_s(self) -> float:
        return self._now() - self.came_at
