"""The Prometheus metrics of this process. Values that are only read at a scrape are in `app/api/metrics.py`.

Labels have few values, all known here or set by an operator: never a session, a model, or a name that a client chose.
With several processes (`app/metric_files.py`) counters and histograms are summed over all of them, dead ones included;
gauges only over the living ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from app import metric_files
from app.domain.events import TYPES, BlobsTombstoned, Event, TurnAbandoned
from app.errors import EnginesFailed, HeadersTooLarge, TargetTooLong, Unauthorized, codes
from app.turn.stages import NEW_TURNS, OUTCOMES, RecentTurnStats, Stages, TurnStage

FOLDER: Path | None = metric_files.folder()

OWN_BUCKETS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Seconds, for Turnlog's own work."""

STAGE_BUCKETS = (*OWN_BUCKETS, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds, also for an engine's work and for waiting at a gate."""


NOT_OF_TURNS = frozenset(error.code for error in (Unauthorized, TargetTooLong, HeadersTooLarge, EnginesFailed))
"""Error codes of authorisation and of pauses, which no turn has."""

NOT_FOUND, METHOD_NOT_ALLOWED = "not_found", "method_not_allowed"
"""Error codes of the router."""


class Metrics:
    """The process's metrics, in a registry of their own. Each turn is also counted in `recent`."""

    def __init__(self, recent: RecentTurnStats) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.recent = recent
        self._counted: dict[tuple[Counter, tuple[str, ...]], float] = {}
        self._turn_instruments()
        self._traffic_instruments()
        self._store_instruments()
        self._process_lock = None if FOLDER is None else metric_files.ProcessLock(FOLDER)
        if FOLDER is None:
            ProcessCollector(registry=self.registry)
        self.started.set(time.time())
        self.processes.set(1)

    def close(self) -> None:
        """Take this process's gauges out of the shared files."""
        if self._process_lock is not None:
            mark_process_dead(os.getpid(), str(FOLDER))  # type: ignore[no-untyped-call]
            self._process_lock.close()

    def _turn_instruments(self) -> None:
        registry = self.registry
        turns = self._counter("turnlog_turns_total", "Requests for a turn by outcome.", "outcome")
        self._outcomes = {outcome: turns.labels(outcome) for outcome in (*OUTCOMES, *_turn_codes())}
        stages = Histogram(
            "turnlog_turn_stage_seconds",
            "Time that committed turns spent in each stage.",
            ["stage"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._stages = [stages.labels(stage.name.lower()) for stage in TurnStage]
        self._overhead = Histogram(
            "turnlog_turn_overhead_seconds",
            "Time that committed turns spent in Turnlog itself: all stages but gate and engine.",
            buckets=OWN_BUCKETS,
            registry=registry,
        )
        sizes = self._counter(
            "turnlog_turn_bytes_total",
            "Bytes of committed turns: request and reply as received, and their content as stored.",
            "kind",
        )
        self._bytes = tuple(sizes.labels(kind) for kind in ("request", "reply", "stored"))
        self.turns_in_flight = self._gauge("turnlog_turns_in_flight", "Turns in flight, also those at a gate.")
        self.turns_rolled_back = self._counter(
            "turnlog_turns_rolled_back_total", "Live turns that a later turn of their session superseded."
        )
        self.turns_staged = self._counter(
            "turnlog_turns_staged_total", "Turns whose tokens are staged, and what became of them.", "outcome"
        )
        self.tokens_restored = self._counter(
            "turnlog_tokens_restored_total", "Staged tokens that a retry did not have to generate again."
        )
        self.turns_gated = self._gauge("turnlog_turns_gated", "Turns that wait at a gate until a pause ends.")

    def _traffic_instruments(self) -> None:
        self.request_errors = self._counter(
            "turnlog_request_errors_total", "Errors of other requests, and of turns refused by authorisation.", "code"
        )
        self.totals(self.request_errors, dict.fromkeys((*codes(), NOT_FOUND, METHOD_NOT_ALLOWED), 0))
        self.inflight = self._gauge("turnlog_inflight_bytes", "Bytes of all request and reply bodies in memory.")
        self.inflight_limit = self._gauge("turnlog_inflight_limit_bytes", "Limit of turnlog_inflight_bytes.")
        self.connections = self._gauge("turnlog_connections", "Open connections of clients.")
        self.connections_refused = self._counter(
            "turnlog_connections_refused_total", "Connections refused for lack of file descriptors."
        )
        self.loop_lag = self._largest("turnlog_loop_lag_seconds", "Largest delay of the event loop in the last minute.")
        self.cache_bytes = self._gauge("turnlog_cache_bytes", "Approximate memory of the session cache.")
        self.cache_sessions = self._gauge("turnlog_cache_sessions", "Sessions in the cache.")
        self.cache_hits = self._counter("turnlog_cache_hits_total", "Lookups found in the session cache.", "content")
        self.cache_misses = self._counter("turnlog_cache_misses_total", "Lookups that had to read the log.", "content")
        self.pool_workers = self._gauge("turnlog_pool_workers", "Worker processes: configured, alive, busy.", "state")
        self.pool_queue = self._gauge("turnlog_pool_queue_jobs", "Replies that wait for a worker process.")
        self.pool_jobs = self._counter("turnlog_pool_jobs_total", "Replies validated by worker processes.")
        self.pool_restarts = self._counter("turnlog_pool_restarts_total", "Worker processes that ended.")
        self.event_readers = self._gauge("turnlog_event_readers", "Open replies with the events of all sessions.")
        self.exports_running = self._gauge("turnlog_exports_running", "Exports in progress.")
        self.exports = self._counter("turnlog_exports_total", "Exports by outcome.", "outcome")
        self.export_rows = self._counter("turnlog_export_rows_total", "Rows of all exports.")
        self.export_bytes = self._counter("turnlog_export_bytes_total", "Bytes sent by all exports.")
        self.export_seconds = self._counter("turnlog_export_seconds_total", "Total duration of ended exports.")
        self.processes = self._gauge("turnlog_processes", "Living API processes.")
        self.started = self._largest(
            "turnlog_process_start_time_seconds", "Start time of the youngest API process, in seconds since the epoch."
        )

    def _store_instruments(self) -> None:
        self.commit_seconds = Histogram(
            "turnlog_store_commit_seconds",
            "Duration of COMMIT of a durable transaction, its sync to disk included.",
            buckets=OWN_BUCKETS,
            registry=self.registry,
        )
        self.writer_queue = self._gauge("turnlog_writer_queue_operations", "Writes that wait for a transaction.")
        self.writer_queue_bytes = self._gauge("turnlog_writer_queue_bytes", "Bytes of the writes that wait.")
        self.writer_operations = self._counter("turnlog_writer_operations_total", "Writes committed.")
        self.writer_transactions = self._counter(
            "turnlog_writer_transactions_total", "Transactions that committed these writes.", "durable"
        )
        self.events = self._counter("turnlog_events_total", "Events appended to the sessions' logs.", "type")
        self.totals(self.events, dict.fromkeys(TYPES, 0))
        self.abandoned = self._counter("turnlog_turns_abandoned_total", "Claims released without a commit.", "reason")
        self.totals(self.abandoned, _zero_by_reason(TurnAbandoned))
        self.tombstones = self._counter(
            "turnlog_turns_tombstoned_total", "Turns whose replay payloads were discarded.", "reason"
        )
        self.totals(self.tombstones, _zero_by_reason(BlobsTombstoned))
        self.chunks_freed = self._counter("turnlog_chunks_freed_total", "Chunks of replay payloads deleted.")
        self.objects = self._counter("turnlog_objects_total", "Requests to object storage.", "action")
        self.totals(self.objects, dict.fromkeys(("put", "read", "deleted", "failed"), 0))
        self.object_bytes = self._counter("turnlog_object_bytes_total", "Bytes to and from object storage.", "action")
        self.totals(self.object_bytes, dict.fromkeys(("put", "read"), 0))
        self.search_failures = self._counter("turnlog_search_failures_total", "Steps of the search index that failed.")
        self.search_behind = self._largest("turnlog_search_behind_events", "Events that the search index lacks.")
        self.janitor = self._counter("turnlog_janitor_sessions_total", "Sessions that the janitor handled.", "action")
        self.janitor_round = self._largest(
            "turnlog_janitor_last_round_timestamp_seconds",
            "End of the janitor's last round, in seconds since the epoch.",
        )

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        """A gauge that is summed over the living processes."""
        return Gauge(name, help_text, labels, registry=self.registry, multiprocess_mode="livesum")

    def _largest(self, name: str, help_text: str) -> Gauge:
        """A gauge of the process that lives and has the largest."""
        return Gauge(name, help_text, registry=self.registry, multiprocess_mode="livemax")

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def turn_ended(self, outcome: str, seconds: Sequence[float], stages: Stages) -> None:
        """Count a turn that has ended; `seconds` are `stages.seconds()`."""
        overhead = sum(seconds) - seconds[TurnStage.GATE] - seconds[TurnStage.ENGINE]
        self.recent.turn_ended(outcome, overhead, seconds[TurnStage.ENGINE])
        self._outcomes[outcome].inc()
        if outcome in NEW_TURNS:
            for stage, spent in zip(self._stages, seconds, strict=True):
                stage.observe(spent)
            self._overhead.observe(overhead)
            request, reply, stored = self._bytes
            request.inc(stages.request_bytes)
            reply.inc(stages.reply_bytes)
            stored.inc(stages.stored_bytes)

    def request_failed(self, code: str) -> None:
        """Count an error of a request that is not a turn, or that was refused before its turn began."""
        self.request_errors.labels(code).inc()

    def committed(self, seconds: float) -> None:
        """Record the duration of a durable transaction's COMMIT. Any thread may call it."""
        self.commit_seconds.observe(seconds)

    def total(self, counter: Counter, value: float, *labels: str) -> None:
        """Raise a counter to `value`, the total that another component has counted since the process began."""
        key = (counter, labels)
        counted = self._counted.get(key, 0.0)
        if value > counted or not counted:
            (counter.labels(*labels) if labels else counter).inc(value - counted)
            self._counted[key] = value

    def totals(self, counter: Counter, values: Mapping[str, float]) -> None:
        """Call `total` for each value of the counter's only label."""
        for label, value in values.items():
            self.total(counter, value, label)

    def collected(self, *others: Collector) -> CollectorRegistry:
        """A registry of this scrape's metrics: those of all processes that share the folder, and `others`."""
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


def _zero_by_reason(event: type[Event]) -> Mapping[str, float]:
    """0 for each reason of an event: a series that begins at 1 hides its first increase."""
    return dict.fromkeys(get_args(get_type_hints(event)["reason"]), 0)


def _turn_codes() -> Iterable[str]:
    return (code for code in codes() if code not in NOT_OF_TURNS)
