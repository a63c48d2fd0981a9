"""The metrics of runs: plain numbers of this process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.metrics import Family, Metrics
from app.turn.in_flight import Claimed, TurnStage

OTHER = "other"
"""The label of the runs that have none of their own."""

METRICS = (
    Family("turnlog_run_turns_total", "counter", "Committed turns by run.", "run", (OTHER,)),
    Family("turnlog_run_failed_turns_total", "counter", "Claimed turns without a commit by run.", "run", (OTHER,)),
    Family("turnlog_run_output_tokens_total", "counter", "Tokens sampled in committed turns by run.", "run", (OTHER,)),
    Family("turnlog_run_open_sessions", "largest", "Open sessions by run, as last counted.", "run", ()),
)


class RunNumbers(msgspec.Struct):
    """In the order of `METRICS`."""

    turns: int = 0
    failed: int = 0
    tokens: int = 0
    open: int = 0


class RunCounters:
    """Counts turns by run: each of those that are named, and all the rest as one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._named: dict[str, RunNumbers] = {}
        self._other = RunNumbers()

    def name(self, open_sessions: Mapping[str, int]) -> None:
        """From now on these runs, each with its open sessions, are counted on their own. One that was already goes on
        from its numbers."""
        self._named = {run: self._named.get(run) or RunNumbers() for run in open_sessions if run != OTHER}
        for run, numbers in self._named.items():
            numbers.open = open_sessions[run]

    def ended(self, turn: Claimed) -> None:
        """Count a turn that had its claim."""
        numbers = self._named.get(turn.flight.run, self._other)
        if turn.generated is not None and turn.flight.stages.marks[-1][0] is TurnStage.REPLY:  # it is on disk
            numbers.turns += 1
            numbers.tokens += turn.generated.reply.output_tokens
        else:
            numbers.failed += 1

    def publish(self) -> None:
        """Copy the numbers into the process's metrics."""
        for family, value in zip(METRICS, msgspec.structs.astuple(self._other), strict=True):
            if OTHER in family.values:
                self._metrics.set(family.name, value, OTHER)
        self._metrics.set_named(
            {
                (family.name, run): value
                for run, numbers in self._named.items()
                for family, value in zip(METRICS, msgspec.structs.astuple(numbers), strict=True)
            }
        )
