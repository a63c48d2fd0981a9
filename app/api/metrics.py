"""`GET /metrics`: metrics of this process and those that share its folder, and the state of the store and the fleet.

Components count in plain numbers of their own, which are copied into the process's metrics at a scrape, and once a
second if another process may be scraped instead. The state of store and fleet is as the scraped process sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from starlette.responses import Response

from app.api.requests import Request
from app.api.routes import TEXT, Reply, Routes
from app.domain.events import is_number
from app.fleet.member import Health, Member
from app.metrics import FOLDER, Kind, Metric, Sample, render
from app.services import Services
from app.sessions.figures import Figures

route = Routes("Service")

PUBLISH_S = 1.0
"""Maximum age of this process's values in another process's scrape. Turns are counted at once."""

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

HEALTHS: tuple[Health, ...] = get_args(Health)


@route("GET, HEAD /metrics", "Metrics for Prometheus", "page", Reply("The metrics.", {"text/plain": TEXT}))
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format or OpenMetrics, by the request's `accept` header."""
    app = request.services
    refresh(app)
    state = list(state_of(app, await app.counted.now()))
    is_open = "application/openmetrics-text" in request.headers.get("accept", "")
    text = await asyncio.to_thread(
        lambda: render([*app.metrics.collected(), *of_process(), *state], openmetrics=is_open)
    )
    return Response(text, media_type=OPENMETRICS if is_open else PROMETHEUS)


@contextlib.asynccontextmanager
async def published(app: Services) -> AsyncIterator[None]:
    """If other processes share the metrics folder, update this process's values in it until the end of the block."""
    publishing = None if FOLDER is None else asyncio.create_task(_publish(app), name="turnlog-metrics")
    try:
        yield
    finally:
        if publishing is not None:
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing


async def _publish(app: Services) -> None:
    while True:
        refresh(app)
        await asyncio.sleep(PUBLISH_S)


def refresh(app: Services) -> None:
    """Copy the components' numbers into this process's metrics."""
    metrics = app.metrics
    metrics.set("turnlog_turns_in_flight", app.turns.in_flight)
    metrics.set("turnlog_inflight_bytes", app.inflight.size)
    metrics.set("turnlog_inflight_limit_bytes", app.settings.inflight_bytes)
    metrics.set("turnlog_connections", app.connection_limit.connections)
    metrics.set("turnlog_connections_refused_total", app.connection_limit.refused)
    metrics.set("turnlog_loop_lag_seconds", app.lag.largest_s)
    metrics.set("turnlog_cache_bytes", app.cache.size)
    metrics.set("turnlog_cache_sessions", app.cache.sessions)
    for content, lookups in app.cache.lookups.items():
        metrics.set("turnlog_cache_hits_total", lookups.hits, content)
        metrics.set("turnlog_cache_misses_total", lookups.misses, content)
    pool = app.pool.counters()
    metrics.set_all("turnlog_pool_workers", {"configured": pool.size, "alive": pool.alive, "busy": pool.busy})
    metrics.set("turnlog_pool_queue_jobs", pool.waiting)
    metrics.set("turnlog_pool_jobs_total", pool.jobs)
    metrics.set("turnlog_pool_restarts_total", pool.crashes)
    counters, tally = app.writer.counters, app.writer.tally
    operations, size = app.writer.waiting
    metrics.set("turnlog_writer_queue_operations", operations)
    metrics.set("turnlog_writer_queue_bytes", size)
    metrics.set("turnlog_writer_operations_total", counters.operations)
    durable = counters.durable_transactions
    metrics.set_all("turnlog_writer_transactions_total", {"yes": durable, "no": counters.transactions - durable})
    metrics.set_all("turnlog_events_total", tally.events)
    metrics.set_all("turnlog_turns_abandoned_total", tally.abandoned)
    metrics.set_all("turnlog_rollouts_failed_total", tally.failed)
    metrics.set_all("turnlog_turns_tombstoned_total", tally.tombstoned)
    metrics.set("turnlog_chunks_freed_total", tally.chunks_freed)
    metrics.set("turnlog_tool_errors_total", tally.tool_errors)
    metrics.set("turnlog_turns_rolled_back_total", tally.rolled_back)
    for copy in app.refreshes:
        copy()
    metrics.set("turnlog_feature_faults_total", app.feature_faults.total)
    metrics.set("turnlog_event_readers", app.all_events.readers)
    exported = app.exported
    metrics.set("turnlog_exports_running", exported.running)
    metrics.set_all("turnlog_exports_total", {"whole": exported.whole, "cut": exported.cut})
    metrics.set("turnlog_export_rows_total", exported.rows)
    metrics.set("turnlog_export_bytes_total", exported.sent_bytes)
    metrics.set("turnlog_export_seconds_total", exported.seconds)
    metrics.set_all("turnlog_janitor_sessions_total", app.janitor.done)
    if app.janitor.ended_round_at is not None:
        metrics.set("turnlog_janitor_last_round_timestamp_seconds", app.janitor.ended_round_at)


def of_process() -> Iterator[Metric]:
    """Memory, descriptors and CPU as Linux tells them; nothing elsewhere, or where several processes count together.

    Source: proc(5); the names are those of Prometheus' own clients.
    """
    process = Path("/proc/self")
    if FOLDER is not None or not process.exists():
        return
    ticks = os.sysconf("SC_CLK_TCK")
    # The second field, the program's name, may hold spaces and brackets.
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    booted = next(
        float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")
    )
    cpu_s, started_s = (int(fields[11]) + int(fields[12])) / ticks, booted + int(fields[19]) / ticks
    descriptors = len(os.listdir(process / "fd"))
    described: list[tuple[str, Kind, str, float]] = [
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", int(fields[20])),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", int(fields[21]) * resource.getpagesize()),
        ("start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", started_s),
        ("cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", cpu_s),
        ("open_fds", "gauge", "Number of open file descriptors.", descriptors),
        ("max_fds", "gauge", "Maximum number of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]
    for name, kind, text, value in described:
        yield Metric(f"process_{name}", kind, text, [Sample(f"process_{name}", {}, value)])


def state_of(app: Services, figures: Figures | None) -> Iterator[Metric]:
    """Metrics of the state that all processes share: version, database and engines."""
    kind = "sqlite" if app.database.is_sqlite else "postgresql"
    yield _gauge(
        "turnlog_build_info",
        "This version; always 1.",
        {(app.release, platform.python_version(), kind): 1},
        "version",
        "python",
        "database",
    )
    yield _gauge("turnlog_database_up", "Did the database answer the last request?", {(): app.counted.is_up})
    yield from _of_store(figures, app.database.log_file_bytes())
    yield from _of_engines(app.engines.members.values())


def _of_store(figures: Figures | None, log_file_bytes: int | None) -> Iterator[Metric]:
    if figures is not None:
        by_status = {(status,): count for status, count in figures.sessions.items()}
        yield _gauge("turnlog_sessions", "Sessions in the store by status.", by_status, "status")
        yield _gauge("turnlog_open_turns", "Turns with a claim, of all processes.", {(): figures.open_turns})
        yield _gauge("turnlog_database_bytes", "The database without its free space.", {(): figures.bytes})
    if log_file_bytes is not None:
        yield _gauge("turnlog_database_wal_bytes", "Size of SQLite's log file.", {(): log_file_bytes})


def _of_engines(members: Iterable[Member]) -> Iterator[Metric]:
    """Metrics of the engines, by health and by base URL. An operator has listed them, so the labels are few."""
    members = list(members)
    healths = Counter(member.health for member in members)
    yield _gauge("turnlog_engines", "Engines by health.", {(name,): healths[name] for name in HEALTHS}, "health")
    draining = sum(member.is_draining for member in members)
    yield _gauge("turnlog_engines_draining", "Engines that get no new turns.", {(): draining})
    alive = {(member.url,): member.health not in ("unknown", "dead") for member in members}
    yield _gauge("turnlog_engine_up", "Is the engine alive?", alive, "engine")
    versions = {(member.url,): member.weight_version for member in members}
    numbers = {url: int(version) for url, version in versions.items() if version is not None and is_number(version)}
    yield _gauge("turnlog_engine_weight_version", "The engine's weight version, if it is a number.", numbers, "engine")
    different = len({version for version in versions.values() if version is not None})
    yield _gauge("turnlog_weight_versions", "Number of different weight versions of the engines.", {(): different})


def _gauge(name: str, help_text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    """A gauge; `values` maps tuples of label values to values."""
    samples = [Sample(name, dict(zip(labels, of, strict=True)), value) for of, value in values.items()]
    return Metric(name, "gauge", help_text, samples)
