"""Whether a request is retried, and after which pause.

Every request of this client can be sent twice without harm: a session is created under an id that the client chose, a
reward replaces the previous one, and closing is idempotent.
"""

from __future__ import annotations

import random
import time

from turnlog.errors import NotTurnlog, TurnlogError, Unavailable, Unreachable

FIRST_S, MOST_S = 0.1, 5.0
"""Bounds of the pause, in seconds. A restarted server answers within seconds, but a thousand clients must not retry at
the same moment."""

FULL = "store_full"
GATEWAYS = frozenset({502, 503, 504})
"""Statuses of a proxy while the server behind it starts."""


class Waits:
    """The pauses between the attempts of one request, `patience_s` seconds in all."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """The request made progress: start again with the full patience."""
        self._until = time.monotonic() + self._patience_s
        self._next_s = FIRST_S

    def after(self, error: TurnlogError) -> float | None:
        """Seconds to wait before the next attempt; None if a retry cannot help or would take too long."""
        if not may_help(error):
            return None
        own_s = self._next_s * random.uniform(0.5, 1.0)  # not for secrets
        self._next_s = min(2 * self._next_s, MOST_S)
        wait_s = max(own_s, error.retry_after_s or 0.0)
        return None if time.monotonic() + wait_s > self._until else wait_s


def may_help(error: TurnlogError) -> bool:
    """Can the same request succeed later? The server's `x-should-retry` decides if it is there."""
    if error.should_retry is not None:
        return error.should_retry
    if isinstance(error, NotTurnlog):
        return error.status in GATEWAYS
    if isinstance(error, Unavailable):
        return error.status in (429, 503) and error.code != FULL
    return isinstance(error, Unreachable)
