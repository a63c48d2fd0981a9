"""Faults of features in what follows a commit."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("turnlog")


class FeatureFaults:
    """Counts and logs them, so that they cost no client the reply to what is on disk."""

    def __init__(self) -> None:
        self.total = 0

    def note(self, function: Callable[..., None]) -> None:
        """Call it where the fault was caught."""
        self.total += 1
        name = f"{function.__module__}.{function.__qualname__}"
        log.exception("an unexpected fault in %s, after a commit", name)
