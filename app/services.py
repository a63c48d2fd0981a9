"""What one API process is made of, in the order of its making: `Services`.

`running` makes it over the real database, engines and clock, for `app.main`. The simulation passes in its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.domain.proofs import Proofs
from app.domain.session import Session
from app.errors import AppError, SessionNotFound, StartupError
from app.export.exporter import Exporter, ExportMetrics, load_picker
from app.export.helpers import MOST_HELPERS, Helpers
from app.export.session_samples import SessionSamples
from app.extras import install_command
from app.fleet.engine_pool import EnginePool
from app.fleet.engines import Engines
from app.fleet.health import HealthWatch
from app.fleet.member import WeightVersions
from app.fleet.native import NativeRoutes
from app.fleet.state import POLL_S, FleetState
from app.metrics import Metrics, RecentTurnStats
from app.process import ConnectionLimit, FeatureFaults, FreedMemory, LoopLag, end_without_store
from app.request_memory import RequestMemory
from app.sessions.all_events import AllEvents
from app.sessions.cache import SessionCache
from app.sessions.erasure import Erasure
from app.sessions.event_log import Followers
from app.sessions.figures import CachedFigures
from app.sessions.janitor import Janitor
from app.sessions.lifecycle import Clock, Sessions
from app.sessions.log_end import LogEnd
from app.sessions.names import Names
from app.sessions.proof import Proof
from app.sessions.recovery import BEATS_PER_LEASE, Recovery, Registration
from app.sessions.session_list import SessionList
from app.sessions.session_view import SessionViews
from app.settings import Settings
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.writer import Writer
from app.tito.arguments import check_family
from app.tokens import Tokens
from app.turn.claims import Claims
from app.turn.engine_call import EngineCalls
from app.turn.large_bodies import LargeBodies
from app.turn.placement import Placement
from app.turn.points import TurnPoints
from app.turn.retries import Retries
from app.turn.token_in import TokenIn
from app.turn.turns import Turns
from app.turn.validation import ReplyValidator
from app.upstream.client import EngineClient
from app.upstream.control import EngineControl
from workers.pool import Pool

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

log = logging.getLogger("turnlog")


DRAIN_S = 10.0
"""How long a stopping process waits for turns whose client has disconnected."""


class Services:
    """Call in this order: `open`, `start`, `registered` once the process is registered in the store, `stop`.

    `clock` returns seconds since the epoch. `lease_left` tells of an incarnation as `Recovery.lease_left`, the default.
    `prompts` is given if there is a tokenizer. The fleet's log is polled every `poll_s` seconds. Raises StartupError.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        release: str,
        database: Database,
        client: EngineClient,
        pool: Pool,
        registration: Registration,
        metrics: Metrics,
        tokens: Tokens,
        connection_limit: ConnectionLimit,
        prompts: Prompts | None = None,
        clock: Clock,
        lease_left: Callable[[int], Awaitable[float | None]] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.settings = settings
        self.release = release
        self.database = database
        self.client = client
        self.pool = pool
        self.registration = registration
        self.metrics = metrics
        self.tokens = tokens
        self.connection_limit = connection_limit
        self.clock = clock
        self.prompts = prompts

        # What features add, before `open`. Nobody adds, nothing is called.
        self.points = TurnPoints()  # in a turn
        self.feature_faults = FeatureFaults()  # after a commit
        self.text_upstreams: dict[str, str | None] = {}  # those of sessions without ids, and their models
        self.run_number: Callable[[str], Awaitable[int | None]] | None = None  # that of a run's valid token
        self.public_url: Callable[[], str | None] = lambda: settings.public_url  # what a session's `url` begins with
        self.features: dict[str, Any] = {}  # what each has made, by its name
        self.opens: list[Callable[[], Awaitable[None]]] = []  # `open`
        self.starts: list[Callable[[], None]] = []  # `start`
        self.registered_calls: list[Callable[[], None]] = []  # `registered`
        self.waits: list[Callable[[], None]] = []  # `end_waits`
        self.ends: list[Callable[[], Awaitable[None]]] = []  # `stop`, before the rest, in this order
        self.turn_ends: list[Callable[[], Awaitable[None]]] = []  # `stop`, when the turns have ended
        self.last_ends: list[Callable[[], Awaitable[None]]] = []  # `stop`, before the store is closed
        self.session_fields: list[Callable[[Session], Awaitable[Mapping[str, Any]]]] = []  # of `GET /sessions/{id}`
        self.refreshes: list[Callable[[], None]] = []  # before the metrics are read
        self.restored: list[Callable[[], Awaitable[object]]] = []  # after the store was taken back to a checkpoint
        self.instance_id = uuid.uuid4().hex
        self.proofs = Proofs(settings.session_secret or settings.admin_token)
        incarnation, api_key = registration.incarnation, settings.upstream_api_key

        # the store, and which processes are alive
        self.writer = Writer(database)
        self.cache = SessionCache(database, self.writer, settings.cache_bytes, with_tokens=prompts is not None)
        self.followers = Followers()
        # With SQLite only the file's lock decides which process is alive.
        lease_s = math.inf if database.is_sqlite else settings.lease_s
        beat_s = settings.lease_s / BEATS_PER_LEASE
        self.recovery = Recovery(database, self.writer, incarnation, lease_s, beat_s, clock)
        lease = self.recovery.lease_to_judge_by
        self.lease_left = lease_left or self.recovery.lease_left
        self.proof = Proof(database, incarnation)

        # the fleet
        self.fleet = FleetState(database, self.writer, poll_s)
        self.engines = Engines(
            client,
            settings.placement,
            api_key,
            WeightVersions(self.fleet, client, api_key),
            configured=settings.upstream_dialect,
            logprobs_of=None if settings.logprobs_mode == "auto" else settings.logprobs_mode,
        )
        self.engine_pool = EnginePool(self.fleet, self.engines, settings.upstreams)
        self.control = EngineControl(
            client,
            settings.upstream_dialect,
            api_key,
            is_engine=lambda url: url in self.engines.members,
            router_workers=settings.router_workers,
        )
        self.native = NativeRoutes(client, self.engines, api_key, is_staging=settings.stage_tokens_s > 0)
        self.health = HealthWatch(
            self.engines,
            client,
            dialect=settings.upstream_dialect,
            api_key=api_key,
            is_paused=lambda run: self.fleet.fleet.is_engine_paused(run),
        )

        # turns
        self.token_in = TokenIn(self.cache, prompts, lambda: "vllm" if self.engines.dialect == "vllm" else "sglang")
        self.retries = Retries(
            cache=self.cache,
            writer=self.writer,
            followers=self.followers,
            clock=clock,
            incarnation=incarnation,
            lease_s=lease,
        )
        self.placement = Placement(self.engines, self.cache, settings, clock)
        self.claims = Claims(
            points=self.points,
            retries=self.retries,
            placement=self.placement,
            settings=settings,
            cache=self.cache,
            writer=self.writer,
            followers=self.followers,
            clock=clock,
            incarnation=incarnation,
            lease_s=lease,
            lease_left=self.lease_left,
        )
        self.validator = ReplyValidator(pool, settings)
        self.large_bodies = LargeBodies()
        self.engine_calls = EngineCalls(
            points=self.points,
            settings=settings,
            clock=clock,
            cache=self.cache,
            fleet=self.fleet,
            engines=self.engines,
            native=self.native,
            placement=self.placement,
            token_in=self.token_in,
            validator=self.validator,
            large_bodies=self.large_bodies,
            proofs=self.proofs,
        )
        self.turns = Turns(
            points=self.points,
            calls=self.engine_calls,
            settings=settings,
            cache=self.cache,
            writer=self.writer,
            retries=self.retries,
            claims=self.claims,
            token_in=self.token_in,
            large_bodies=self.large_bodies,
            fleet=self.fleet,
            engines=self.engines,
            proofs=self.proofs,
            text_upstreams=self.text_upstreams,
            feature_faults=self.feature_faults,
        )

        # sessions
        self.sessions = Sessions(
            database,
            self.writer,
            self.cache,
            self.followers,
            clock,
            self.feature_faults,
            names_engine_sessions=settings.engine_session_ids,
        )
        self.names = Names(self.cache, self.sessions)
        self.sessions.on_close(self.turns.close)
        self.sessions.on_close(self.retries.forget)
        self.erasure = Erasure(
            database=database,
            writer=self.writer,
            cache=self.cache,
            followers=self.followers,
            clock=clock,
            sessions=self.sessions,
        )
        self.janitor = Janitor(database, self.writer, self.sessions, self.erasure, settings, clock)
        self.log_end = LogEnd(database)
        self.all_events = AllEvents(database, self.log_end)
        self.session_list = SessionList(database, self.turns.at_gates, self.engines, clock)
        self.explain: list[Callable[[str], Awaitable[AppError | None]]] = []
        """Ask where a session is that does not exist here."""

        # exports
        self.exported = ExportMetrics()
        self.picker = load_picker(settings.picker)
        self.exporter = Exporter(
            database, release, exported=self.exported, picker=self.picker, helpers=_helpers(settings)
        )
        self.samples = SessionSamples(self.cache, self.token_in, release, settings.samples_versions)

        # requests, metrics and the page
        released = FreedMemory().released
        self.inflight = RequestMemory(settings.inflight_bytes, settings.max_request_bytes, released=released)
        self.lag = LoopLag(time.monotonic)
        self.counted = CachedFigures(database, time.monotonic)
        self.views = SessionViews(database, self.turns.at_gates)

    async def open(self) -> None:
        """Start writing and reading, without turns yet. Raises AppError if the fleet's log cannot be read."""
        self.turns.open()
        self.writer.start()
        await self.fleet.start()
        for ready in self.opens:
            await ready()

    def start(self) -> None:
        """Start the background tasks."""
        self.engine_pool.start()
        self.janitor.start()
        for begin in self.starts:
            begin()

    def registered(self) -> None:
        """The process is registered in the store, so it may take over from dead ones."""
        self.recovery.start()
        self.claims.start()
        for begin in self.registered_calls:
            begin()

    async def explained(self, error: AppError) -> AppError:
        """The error to answer, where another says more, or where asking fails."""
        session_id = error.session_id if isinstance(error, SessionNotFound) else None
        try:
            asked = [] if session_id is None else [await ask(session_id) for ask in self.explain]
        except AppError as failed:
            return failed
        return next(filter(None, asked), error)

    def end_waits(self) -> None:
        """The server stops: end open streams and waits at gates, which could keep requests open for long."""
        self.followers.stop()
        self.all_events.stop()
        for end in self.waits:
            end()

    async def stop(self) -> None:
        """Stop all components, users before what they use; each whatever became of the ones before.

        Waits at most DRAIN_S for the turns in flight. Allowed without `open`.
        """
        ends = [
            self.registration.stop,
            self.proof.stop,
            *self.ends,
            self.lag.stop,
            self.log_end.stop,
            self.counted.stop,
            self.janitor.stop,
            lambda: self.turns.drain(DRAIN_S),
            *self.turn_ends,
            lambda: self.pool.stop(0),
            self.health.stop,
            self.token_in.close,
            self.engine_pool.stop,
            self.fleet.stop,
            self.retries.close,
            self.claims.close,
            self.cache.close,
            *self.last_ends,
            self.writer.stop,
            self.recovery.stop,
        ]
        async with contextlib.AsyncExitStack() as last_first:
            for end in reversed(ends):
                last_first.push_async_callback(end)


@contextlib.asynccontextmanager
async def running(
    settings: Settings,
    release: str,
    tokens: Tokens,
    connection_limit: ConnectionLimit,
    features: Mapping[str, Any],
    points: StorePoints,
) -> AsyncIterator[Services]:
    """The services of a process and the packages of `features`, started, until the end of the block.

    `points` is what all features do in the store's transactions, also those that are off.

    Raises StartupError.
    """
    for told in settings.warnings:
        log.warning(told)
    async with contextlib.AsyncExitStack() as stack:
        families = [family for feature in features.values() for family in getattr(feature, "METRICS", ())]
        metrics = Metrics(RecentTurnStats(time.monotonic), families)
        stack.callback(metrics.close)
        database = Database(
            settings.database_url, metrics.committed, end_without_store, points=points, lease_s=settings.lease_s
        )
        stack.push_async_callback(database.close)
        await database.open()
        client = EngineClient(
            connect_timeout_s=settings.upstream_connect_timeout_s,
            timeout_s=settings.upstream_timeout_s,
            max_bytes=settings.max_upstream_bytes,
        )
        stack.push_async_callback(client.close)
        check_family(settings.tito_family)
        prompts = await asyncio.to_thread(_load_prompts, settings)  # takes seconds
        prepared = [
            await feature.prepare(settings, database) for feature in features.values() if hasattr(feature, "prepare")
        ]
        registration = Registration(database, lambda tx: [note(tx) for note in prepared])
        await registration.attempt()
        services = Services(
            settings,
            release=release,
            database=database,
            client=client,
            pool=Pool(
                settings.workers, deadline_s=settings.worker_deadline_s, memory_bytes=settings.worker_memory_bytes
            ),
            registration=registration,
            metrics=metrics,
            tokens=tokens,
            connection_limit=connection_limit,
            prompts=prompts,
            clock=time.time,  # as it is now: a test's clock may have taken its place
        )
        for name, feature in features.items():
            services.features[name] = feature.add_to(services)
        stack.push_async_callback(services.stop)
        try:
            await services.open()
        except AppError as error:
            raise StartupError(f"the fleet's log cannot be read: {error}") from error
        await services.proof.at_start()
        services.proof.start()
        services.lag.start()
        services.start()
        registration.start(services.registered)
        services.health.start()
        services.pool.start()
        yield services


def _load_prompts(settings: Settings) -> Prompts | None:
    """The prompts of the tokenizer, or None. Raises StartupError."""
    if settings.tokenizer is None:
        return None
    try:
        from app.tito.prompts import Prompts as Loader  # needs the packages of the extra `tito`
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs more packages: {install_command('tito')}") from error
    dialect = None if settings.upstream_dialect == "auto" else settings.upstream_dialect
    prompts = Loader.load(settings.tokenizer, settings.tito_family, dialect)
    for shape, why in prompts.findings.refused.items():
        log.warning("turns that continue %s begin a new row: %s", shape, why)
    return prompts


def _helpers(settings: Settings) -> Helpers | None:
    """Fewer cores gain little: docs/benchmarks.md."""
    if settings.workers <= 2:
        return None
    return Helpers(
        min(settings.workers - 2, MOST_HELPERS),
        deadline_s=settings.worker_deadline_s,
        memory_bytes=settings.worker_memory_bytes,
    )
