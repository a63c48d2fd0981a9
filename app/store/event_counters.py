"""Counts the events that one process has appended since it began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from app.domain.events import BlobsTombstoned, Recorded, RolledBack, TurnAbandoned, name_of


class EventCounters(msgspec.Struct):
    """Events by type; abandoned claims, and turns that lost their replay payloads, by reason.

    `rolled_back`: turns that were live until a later one superseded them.
    """

    events: Counter[str] = msgspec.field(default_factory=Counter)
    abandoned: Counter[str] = msgspec.field(default_factory=Counter)
    tombstoned: Counter[str] = msgspec.field(default_factory=Counter)
    chunks_freed: int = 0
    rolled_back: int = 0

    def add(self, appended: Iterable[Recorded]) -> None:
        for recorded in appended:
            event = recorded.event
            self.events[name_of(event)] += 1
            if isinstance(event, TurnAbandoned):
                self.abandoned[event.reason] += 1
            elif isinstance(event, RolledBack):
                self.rolled_back += len(event.discarded)
            elif isinstance(event, BlobsTombstoned):
                self.tombstoned[event.reason] += len(event.turns)
                self.chunks_freed += len(event.freed)

    def abandoned_dead(self, count: int) -> None:
        """Count turns of dead processes, which are abandoned in batches."""
        self.events[TurnAbandoned.__name__] += count
        self.abandoned["owner_dead"] += count
