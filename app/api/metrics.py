"""`GET /metrics`: metrics of this process and those that share its folder, and the state of the store and the fleet.

Components count in plain numbers of their own, which are copied into the Prometheus metrics at a scrape, and once a
second if another process may be scraped instead. The state of store and fleet is as the scraped process sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.api.describe import TEXT, Reply, describe
from app.api.state import services
from app.domain.events import is_number
from app.domain.fleet import Gate
from app.fleet.member import Health, Member
from app.metrics import FOLDER
from app.store.figures import Figures

if TYPE_CHECKING:
    from app.services import Services

router = APIRouter(tags=["Service"])

PUBLISH_S = 1.0
"""Maximum age of this process's values in another process's scrape. Turns are counted at once."""

HEALTHS: tuple[Health, ...] = get_args(Health)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
@describe("Metrics for Prometheus", "page", Reply("The metrics.", {"text/plain": TEXT}))
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format or OpenMetrics, by the request's `accept` header."""
    app = services(request)
    refresh(app)
    state = _ScrapeMetrics(state_of(app, await app.counted.now()))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    text = await asyncio.to_thread(lambda: encode(app.metrics.collected(state)))
    return Response(text, media_type=media_type)


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
    """Copy the components' numbers into this process's Prometheus metrics."""
    metrics = app.metrics
    metrics.turns_in_flight.set(app.turns.in_flight)
    metrics.turns_gated.set(app.gates.held().total())
    metrics.inflight.set(app.inflight.size)
    metrics.inflight_limit.set(app.settings.inflight_bytes)
    metrics.connections.set(app.connection_limit.connections)
    metrics.total(metrics.connections_refused, app.connection_limit.refused)
    metrics.loop_lag.set(app.lag.largest_s)
    metrics.totals(metrics.turns_staged, app.staging.counters.turns)
    metrics.total(metrics.tokens_restored, app.staging.counters.tokens_restored)
    _refresh_cache(app)
    _refresh_pool(app)
    _refresh_writer(app)
    _refresh_objects(app)
    metrics.event_readers.set(app.all_events.readers)
    exported = app.exported
    metrics.exports_running.set(exported.running)
    metrics.totals(metrics.exports, {"whole": exported.whole, "cut": exported.cut})
    metrics.total(metrics.export_rows, exported.rows)
    metrics.total(metrics.export_bytes, exported.sent_bytes)
    metrics.total(metrics.export_seconds, exported.seconds)
    done = app.janitor.done
    metrics.totals(metrics.janitor, {"closed": done.closed, "freed": done.freed, "erased": done.erased})
    if app.janitor.ended_round_at is not None:
        metrics.janitor_round.set(app.janitor.ended_round_at)


def _refresh_cache(app: Services) -> None:
    metrics = app.metrics
    metrics.cache_bytes.set(app.cache.size)
    metrics.cache_sessions.set(app.cache.sessions)
    for content, lookups in app.cache.lookups.items():
        metrics.total(metrics.cache_hits, lookups.hits, content)
        metrics.total(metrics.cache_misses, lookups.misses, content)


def _refresh_pool(app: Services) -> None:
    metrics, pool = app.metrics, app.pool.counters()
    for state, count in (("configured", pool.size), ("alive", pool.alive), ("busy", pool.busy)):
        metrics.pool_workers.labels(state).set(count)
    metrics.pool_queue.set(pool.waiting)
    metrics.total(metrics.pool_jobs, pool.jobs)
    metrics.total(metrics.pool_restarts, pool.crashes)


def _refresh_writer(app: Services) -> None:
    metrics, counters, tally = app.metrics, app.writer.counters, app.writer.tally
    operations, size = app.writer.waiting
    metrics.writer_queue.set(operations)
    metrics.writer_queue_bytes.set(size)
    metrics.total(metrics.writer_operations, counters.operations)
    durable = counters.durable_transactions
    metrics.totals(metrics.writer_transactions, {"yes": durable, "no": counters.transactions - durable})
    metrics.totals(metrics.events, tally.events)
    metrics.totals(metrics.abandoned, tally.abandoned)
    metrics.totals(metrics.tombstones, tally.tombstoned)
    metrics.total(metrics.chunks_freed, tally.chunks_freed)
    metrics.total(metrics.turns_rolled_back, tally.rolled_back)


def _refresh_objects(app: Services) -> None:
    if app.objects is None:
        return
    metrics, counters = app.metrics, app.objects.bucket.counters
    metrics.totals(metrics.objects, {name: getattr(counters, name) for name in ("put", "read", "deleted", "failed")})
    metrics.totals(metrics.object_bytes, {"put": counters.put_bytes, "read": counters.read_bytes})


class _ScrapeMetrics(Collector):
    """Metrics made for one scrape."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> list[Metric]:
        return self._found


def state_of(app: Services, figures: Figures | None) -> Iterator[Metric]:
    """Metrics of the state that all processes share: version, database, engines and gates."""
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
    fleet = app.fleet.fleet
    gates = {"fleet": [fleet.gate], "adapter": list(fleet.adapters.values())}
    shut = {scope: [gate for gate in found if gate.is_shut] for scope, found in gates.items()}
    yield _gauge("turnlog_gates_shut", "Gates that hold turns back.", {(s,): len(g) for s, g in shut.items()}, "scope")
    yield _gauge(
        "turnlog_gate_shut_seconds",
        "How long the first of the shut gates has been shut; 0 if none is.",
        {(scope,): _longest_s(found) for scope, found in shut.items()},
        "scope",
    )


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


def _longest_s(gates: Iterable[Gate]) -> float:
    return max((time.time() - gate.since for gate in gates if gate.since is not None), default=0.0)


def _gauge(name: str, help_text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    """A gauge; `values` maps tuples of label values to values."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, float(value))
    return family
