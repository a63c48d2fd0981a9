"""What this process counts for Prometheus. What is only looked at when somebody asks is in `app/api/metrics.py`.

Labels have few values, all of them known here or set by an operator: never a session, a model, or a name that a client
chose. With several processes (`app/metric_files.py`) counters and histograms add up over all of them, those that have
died included; gauges are of those that live.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args, get_type_hints

from app import metric_files
from app.domain.events import TYPES, BlobsTombstoned, Event, TurnAbandoned
from app.errors import EnginesFailed, HeadersTooLarge, TargetTooLong, Unauthorized, codes
from app.turn.stages import NEW_TURNS, OUTCOMES, RecentTurnStats, Stages, TurnStage

FOLDER: Path | None = metric_files.folder()
"""Before the next import: prometheus_client looks for the variable once."""

from prometheus_client import (  # noqa: E402
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead  # noqa: E402
from prometheus_client.registry import Collector  # noqa: E402

OWN_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Seconds, for what Turnlog does itself."""

STAGE_BUCKETS = (*OWN_BUCKETS, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds, also for what an engine does, and for waiting until a trainer is done."""


NOT_OF_TURNS = frozenset(error.code for error in (Unauthorized, TargetTooLong, HeadersTooLarge, EnginesFailed))
"""Codes of the guard, and of a pause."""

NOT_FOUND, METHOD_NOT_ALLOWED = "not_found", "method_not_allowed"
"""Codes of the router."""


class Metrics:
    """The process's instruments, in a registry of their own. `recent` is told of each turn as well."""

    def __init__(self, recent: RecentTurnStats) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.recent = recent
        self._told: dict[tuple[Counter, tuple[str, ...]], float] = {}
        self._turn_instruments()
        self._traffic_instruments()
        self._store_instruments()
        self._presence = None if FOLDER is None else metric_files.Presence(FOLDER)
        if FOLDER is None:
            ProcessCollector(registry=self.registry)
        else:
            metric_files.sweep()
        self.started.set(time.time())
        self.processes.set(1)

    def close(self) -> None:
        """The process ends: its gauges no longer count."""
        if self._presence is not None:
            mark_process_dead(os.getpid(), str(FOLDER))  # type: ignore[no-untyped-call]
            self._presence.close()

    def _turn_instruments(self) -> None:
        registry = self.registry
        turns = self._counter("turnlog_turns_total", "Requests for a turn by how they ended.", "outcome")
        self._outcomes = {outcome: turns.labels(outcome) for outcome in (*OUTCOMES, *_turn_codes())}
        stages = Histogram(
            "turnlog_turn_stage_seconds",
            "How long a committed turn was in each stage.",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._stages = [stages.labels(stage.name.lower()) for stage in TurnStage]
        self._overhead = Histogram(
            "turnlog_turn_overhead_seconds",
            "A committed turn's time in Turnlog itself: all stages but gate and engine.",
            buckets=OWN_BUCKETS,
            registry=registry,
        )
        sizes = self._counter(
            "turnlog_turn_bytes_total",
            "Of committed turns: request and reply as received, and what their content takes in the store.",
            "kind",
        )
        self._bytes = tuple(sizes.labels(kind) for kind in ("request", "reply", "stored"))
        self.turns_in_flight = self._live("turnlog_turns_in_flight", "Turns that are being worked on.")
        self.turns_rolled_back = self._counter(
            "turnlog_turns_rolled_back_total", "Live turns that a later turn of their session superseded."
        )
        self.turns_gated = self._live("turnlog_turns_gated", "Turns that wait until a pause ends.")

    def _traffic_instruments(self) -> None:
        self.request_errors = self._counter(
            "turnlog_request_errors_total", "Errors of requests that are no turns, or were refused before.", "code"
        )
        self.totals(self.request_errors, dict.fromkeys((*codes(), NOT_FOUND, METHOD_NOT_ALLOWED), 0))
        self.inflight = self._live("turnlog_inflight_bytes", "Bytes of all bodies in flight.")
        self.inflight_limit = self._live("turnlog_inflight_limit_bytes", "How many bytes may be in flight.")
        self.connections = self._live("turnlog_connections", "Connections of clients that are open.")
        self.connections_refused = self._counter(
            "turnlog_connections_refused_total", "Connections that were turned away for want of file descriptors."
        )
        self.loop_lag = self._largest(
            "turnlog_loop_lag_seconds", "By how much the event loop came too late at worst in the last minute."
        )
        self.cache_bytes = self._live("turnlog_cache_bytes", "Memory of the session cache, roughly.")
        self.cache_sessions = self._live("turnlog_cache_sessions", "Sessions in the cache.")
        self.cache_hits = self._counter("turnlog_cache_hits_total", "What was found in the cache.", "content")
        self.cache_misses = self._counter("turnlog_cache_misses_total", "What had to be read from the log.", "content")
        self.pool_workers = self._live("turnlog_pool_workers", "Worker processes, as set, alive, at work.", "state")
        self.pool_queue = self._live("turnlog_pool_queue_jobs", "Replies that wait for a worker process.")
        self.pool_jobs = self._counter("turnlog_pool_jobs_total", "Replies that worker processes have judged.")
        self.pool_restarts = self._counter("turnlog_pool_restarts_total", "Worker processes that ended.")
        self.exports_running = self._live("turnlog_exports_running", "Exports that are being read.")
        self.exports = self._counter("turnlog_exports_total", "Exports by how they ended.", "outcome")
        self.export_rows = self._counter("turnlog_export_rows_total", "Rows that exports have made.")
        self.export_bytes = self._counter("turnlog_export_bytes_total", "Bytes that exports have sent.")
        self.export_seconds = self._counter("turnlog_export_seconds_total", "How long ended exports took together.")
        self.processes = self._live("turnlog_processes", "API processes that live.")
        self.started = self._largest(
            "turnlog_process_start_time_seconds", "When the youngest API process began, in seconds since the epoch."
        )

    def _store_instruments(self) -> None:
        self.commit_seconds = Histogram(
            "turnlog_store_commit_seconds",
            "COMMIT of a transaction that acknowledges something, its sync to the disk included.",
            buckets=OWN_BUCKETS,
            registry=self.registry,
        )
        self.writer_queue = self._live("turnlog_writer_queue_operations", "Writes that wait for a transaction.")
        self.writer_queue_bytes = self._live("turnlog_writer_queue_bytes", "Bytes of the writes that wait.")
        self.writer_operations = self._counter("turnlog_writer_operations_total", "Writes that were committed.")
        self.writer_transactions = self._counter(
            "turnlog_writer_transactions_total", "Transactions that the writes were committed in.", "durable"
        )
        self.events = self._counter("turnlog_events_total", "Events that were appended to sessions' logs.", "type")
        self.totals(self.events, dict.fromkeys(TYPES, 0))
        self.abandoned = self._counter("turnlog_turns_abandoned_total", "Claims that came to nothing.", "reason")
        self.totals(self.abandoned, _none_yet(TurnAbandoned))
        self.tombstones = self._counter(
            "turnlog_turns_tombstoned_total", "Turns whose replay payloads were let go of.", "reason"
        )
        self.totals(self.tombstones, _none_yet(BlobsTombstoned))
        self.chunks_freed = self._counter("turnlog_chunks_freed_total", "Chunks of replay payloads that were deleted.")
        self.janitor = self._counter("turnlog_janitor_sessions_total", "Sessions that the janitor saw to.", "action")
        self.janitor_round = self._largest(
            "turnlog_janitor_last_round_timestamp_seconds",
            "When the janitor last came to the end of a round, in seconds since the epoch.",
        )

    def _live(self, name: str, help_text: str, *labels: str) -> Gauge:
        """A gauge that adds up over the processes that live."""
        return Gauge(name, help_text, labels, registry=self.registry, multiprocess_mode="livesum")

    def _largest(self, name: str, help_text: str) -> Gauge:
        """A gauge of the process that lives and has the largest."""
        return Gauge(name, help_text, registry=self.registry, multiprocess_mode="livemax")

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def turn_ended(self, outcome: str, stages: Stages) -> None:
        """As `app.turn.stages.Observer`."""
        self.recent.turn_ended(outcome, stages)
        self._outcomes[outcome].inc()
        if outcome in NEW_TURNS:
            for stage, seconds in zip(self._stages, stages.seconds, strict=True):
                stage.observe(seconds)
            self._overhead.observe(stages.overhead)
            request, reply, stored = self._bytes
            request.inc(stages.request_bytes)
            reply.inc(stages.reply_bytes)
            stored.inc(stages.stored_bytes)

    def request_failed(self, code: str) -> None:
        """A request got this error that is no turn, or was refused before it was looked at as one."""
        self.request_errors.labels(code).inc()

    def committed(self, seconds: float) -> None:
        """A durable transaction's COMMIT took so long. May be called on any thread."""
        self.commit_seconds.observe(seconds)

    def total(self, counter: Counter, value: float, *labels: str) -> None:
        """Bring a counter to what somebody else has counted since the process began."""
        key = (counter, labels)
        counted = self._told.get(key, 0.0)
        if value > counted or not counted:
            (counter.labels(*labels) if labels else counter).inc(value - counted)
            self._told[key] = value

    def totals(self, counter: Counter, values: Mapping[str, float]) -> None:
        """`total` of each value of the one label."""
        for label, value in values.items():
            self.total(counter, value, label)

    def collected(self, *others: Collector) -> CollectorRegistry:
        """A registry of all that there is to know at this moment, in this process and its siblings."""
        made = CollectorRegistry()
        if FOLDER is None:
            made.register(self.registry)
        else:
            for pid in metric_files.dead(FOLDER):
                mark_process_dead(pid, str(FOLDER))  # type: ignore[no-untyped-call]
            MultiProcessCollector(made, str(FOLDER))  # type: ignore[no-untyped-call]
        for other in others:
            made.register(other)
        return made


def _none_yet(event: type[Event]) -> Mapping[str, float]:
    """0 for each reason that an event can have: a series that begins at 1 hides the first increase."""
    return dict.fromkeys(get_args(get_type_hints(event)["reason"]), 0)


def _turn_codes() -> Iterable[str]:
    return (code for code in codes() if code not in NOT_OF_TURNS)
