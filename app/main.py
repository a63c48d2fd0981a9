"""The composition root: `uvicorn app.main:app`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from app import logs
from app.errors import AppError, StartupError
from app.extras import install
from app.http import engines as engine_routes
from app.http import fleet as fleet_routes
from app.http import groups, service, sessions, signin, skyrl, ui, ui_files, ui_live
from app.http import metrics as metrics_route
from app.http.auth import Guard
from app.http.doorway import Doorway
from app.http.faults import handle_faults
from app.http.hardened import hardened
from app.http.limits import Inflight
from app.http.protocol import bound_connections
from app.http.replies import error_parts, send_reply
from app.http.request_ids import RequestIds
from app.http.state import Services
from app.http.tokens import Tokens
from app.http.turns import TurnRoutes
from app.metrics import Metrics
from app.service.cache import SessionCache
from app.service.claims import Claims
from app.service.counted import Counted
from app.service.engine_pool import EnginePool
from app.service.exports import Exports
from app.service.feed import Feed
from app.service.fleet import FleetState
from app.service.follow import Followers
from app.service.gates import Gates
from app.service.janitor import Janitor
from app.service.judge import Judge
from app.service.lag import LoopLag
from app.service.later import Later
from app.service.pauses import Pauses
from app.service.recovery import BEATS_PER_LEASE, Recovery
from app.service.registration import Registration
from app.service.samples import Samples
from app.service.session_control import SessionControls
from app.service.sessions import Sessions
from app.service.stages import Recent
from app.service.token_in import TokenIn
from app.service.turns import Turns
from app.settings import Settings, load_settings
from app.stopping import end_without_store, on_stop_signal
from app.store.engine import Database, load_driver
from app.store.writer import Writer
from app.tito.families import family
from app.upstream.client import EngineClient
from app.upstream.control import EngineControl
from app.upstream.engines import Engines
from app.upstream.health import HealthWatch
from app.upstream.sessions import EngineSessions
from workers.pool import Pool

if TYPE_CHECKING:
    from app.service.page import Page
    from app.tito.prompts import Prompts

log = logging.getLogger("turnlog")

SWITCH_S = 0.0005
"""How long a thread that computes may go on while the event loop waits for the interpreter: a tenth of Python's own,
which the loop waits for at each of its steps while a large request is read."""

DRAIN_S = 10.0
"""How long a stopping server waits for turns whose client has gone already."""


@contextlib.asynccontextmanager
async def run_services(settings: Settings, release: str, tokens: Tokens, doorway: Doorway) -> AsyncIterator[Services]:
    """Everything that lives as long as the process. Raises StartupError."""
    for told in settings.warnings:
        log.warning(told)
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics(Recent(time.monotonic))
        stack.callback(metrics.close)
        store = await _store(stack, settings, metrics)
        database, writer, cache = store.database, store.writer, store.cache
        client = _client(settings)
        stack.push_async_callback(client.close)
        front = await _front(stack, settings, database, writer, client)
        token_in = TokenIn(cache, await _prompts(settings))
        stack.callback(token_in.close)
        pool = Pool(settings.workers, deadline_s=settings.worker_deadline_s, memory_bytes=settings.worker_memory_bytes)
        stack.push_async_callback(pool.stop, 0)
        controls = _controls(settings, store, front.engines, client)
        stack.push_async_callback(controls.stop)
        made_turns = Turns(
            cache=cache,
            claims=store.claims,
            writer=writer,
            engines=front.engines,
            fleet=front.fleet,
            gates=front.gates,
            judge=Judge(pool, settings),
            token_in=token_in,
            controls=controls,
            settings=settings,
            clock=time.time,
        )
        stack.push_async_callback(made_turns.drain, DRAIN_S)
        made_sessions = _sessions(store, made_turns, controls)
        exporter = Exports(database, release)
        janitor = Janitor(database, writer, made_sessions, settings, time.time)
        stack.push_async_callback(janitor.stop)
        counted = Counted(database, time.monotonic)
        stack.push_async_callback(counted.stop)
        lag = LoopLag(time.monotonic)
        stack.push_async_callback(lag.stop)
        lag.start()
        janitor.start()
        store.registration.start(store.recovery.start, controls.start)
        stack.push_async_callback(store.registration.stop)
        front.health.start()
        front.pauses.start()
        pool.start()
        yield Services(
            settings=settings,
            database=database,
            registration=store.registration,
            writer=writer,
            **front._asdict(),
            sessions=made_sessions,
            turns=made_turns,
            exporter=exporter,
            feed=Feed(database, writer, exporter),
            samples=Samples(cache, token_in, release),
            pool=pool,
            inflight=Inflight(settings.inflight_bytes, settings.max_request_bytes),
            followers=store.followers,
            metrics=metrics,
            counted=counted,
            cache=cache,
            janitor=janitor,
            tokens=tokens,
            doorway=doorway,
            lag=lag,
            page=Later("app.service.page", lambda: _page(store, made_turns, front, token_in, metrics, release)),
        )


def _page(store: _Store, turns: Turns, front: _Front, token_in: TokenIn, metrics: Metrics, release: str) -> Page:
    from app.service.page import page_of  # nobody may ever look

    return page_of(
        database=store.database,
        turns=turns,
        engines=front.engines,
        pauses=front.pauses,
        token_in=token_in,
        recent=metrics.recent.summary,
        read_only=lambda: store.registration.read_only,
        release=release,
    )


class _Store(NamedTuple):
    """The database, this process as it knows it, and who reads, writes and claims for it."""

    database: Database
    registration: Registration
    writer: Writer
    recovery: Recovery
    cache: SessionCache
    followers: Followers
    claims: Claims


async def _store(stack: contextlib.AsyncExitStack, settings: Settings, metrics: Metrics) -> _Store:
    """The writer runs; all are stopped with `stack`. Raises StartupError."""
    database = Database(settings.database_url, metrics.committed, end_without_store)
    stack.push_async_callback(database.close)
    await database.open()
    registration = Registration(database)
    await registration.attempt()
    writer = Writer(database)
    writer.start()
    # With SQLite the file's lock alone decides who is alive.
    lease_s = math.inf if database.is_sqlite else settings.lease_s
    recovery = Recovery(
        database, writer, registration.incarnation, lease_s, settings.lease_s / BEATS_PER_LEASE, time.time
    )
    stack.push_async_callback(recovery.stop)
    stack.push_async_callback(writer.stop)
    cache = SessionCache(database, writer, settings.cache_bytes)
    stack.push_async_callback(cache.close)
    followers = Followers()
    claims = Claims(
        cache=cache,
        writer=writer,
        followers=followers,
        clock=time.time,
        incarnation=registration.incarnation,
        lease_s=recovery.lease_to_judge_by,
        lease_left=recovery.lease_left,
    )
    stack.push_async_callback(claims.close)
    return _Store(database, registration, writer, recovery, cache, followers, claims)


def _controls(settings: Settings, store: _Store, engines: Engines, client: EngineClient) -> SessionControls:
    """Not started yet."""
    return SessionControls(
        database=store.database,
        writer=store.writer,
        cache=store.cache,
        engines=engines,
        calls=EngineSessions(client, settings.upstream_api_key),
        settings=settings,
        incarnation=store.registration.incarnation,
        lease_s=store.recovery.lease_to_judge_by,
    )


def _sessions(store: _Store, turns: Turns, controls: SessionControls) -> Sessions:
    made = Sessions(store.database, store.writer, store.cache, store.followers, time.time)
    made.on_close(turns.close)
    made.on_close(controls.session_closed)
    return made


class _Front(NamedTuple):
    """What stands between the turns and the engines."""

    fleet: FleetState
    engines: Engines
    engine_pool: EnginePool
    health: HealthWatch
    gates: Gates
    pauses: Pauses


async def _front(
    stack: contextlib.AsyncExitStack, settings: Settings, database: Database, writer: Writer, client: EngineClient
) -> _Front:
    """The fleet's log is followed; health and leases are not watched yet. Raises StartupError."""
    fleet = FleetState(database, writer)
    stack.push_async_callback(fleet.stop)
    engines = Engines(client, settings.placement, settings.upstream_api_key)
    engine_pool = EnginePool(fleet, engines, settings.upstreams)
    stack.push_async_callback(engine_pool.stop)
    await _read(fleet)
    health = HealthWatch(
        engines,
        client,
        dialect=settings.upstream_dialect,
        api_key=settings.upstream_api_key,
        is_paused=lambda: fleet.fleet.gate.is_shut,
    )
    fleet.listen(lambda before, now: health.wake())
    stack.push_async_callback(health.stop)
    gates = Gates(fleet)
    control = EngineControl(client, settings.upstream_dialect, settings.upstream_api_key)
    pauses = Pauses(fleet=fleet, gates=gates, engines=engines, control=control, database=database)
    stack.push_async_callback(pauses.stop)
    return _Front(fleet, engines, engine_pool, health, gates, pauses)


async def _read(fleet: FleetState) -> None:
    """Raises StartupError."""
    try:
        await fleet.start()
    except AppError as error:
        raise StartupError(f"the fleet's log cannot be read: {error}") from error


def _client(settings: Settings) -> EngineClient:
    return EngineClient(
        connect_timeout_s=settings.upstream_connect_timeout_s,
        timeout_s=settings.upstream_timeout_s,
        max_bytes=settings.max_upstream_bytes,
    )


async def _prompts(settings: Settings) -> Prompts | None:
    """The tokenizer, if there is one: loading takes seconds. Raises StartupError."""
    family(settings.tito_family)
    return await asyncio.to_thread(_loaded, settings.tokenizer, settings.tito_family)


@functools.cache
def _loaded(tokenizer: str | None, tito_family: str) -> Prompts | None:
    """Raises StartupError."""
    if tokenizer is None:
        return None
    try:
        from app.tito.prompts import Prompts as Loader  # needs packages that come with the extra alone
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs further packages: {install('tito')}") from error
    return Loader.load(tokenizer, tito_family)


class Turnlog(FastAPI):
    """FastAPI with a short way for turns, and a start-up that fails with one line instead of a traceback.

    The routes that generate take no part in FastAPI's middleware and routing, which cost a tenth of a turn.
    """

    def __init__(self, settings: Settings, release: str) -> None:
        super().__init__(title="Turnlog", version=release, docs_url=None, redoc_url=None, openapi_url=None)
        self._settings = settings
        self._turns = TurnRoutes()
        self._requests = RequestIds(self._serve)
        self._tokens = Tokens(settings.admin_token, settings.session_secret)
        self._doorway = Doorway(time.monotonic)
        self._guard = Guard(self._tokens, settings.trusted_networks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._doorway.open()
            bound_connections(receive, self._doorway)
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._requests(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def warm(self) -> None:
        """Load what a start would have to, and what opens nothing: for a process that waits until it is needed."""
        load_driver(self._settings.database_url)
        with contextlib.suppress(StartupError):  # the start will say it
            _loaded(self._settings.tokenizer, self._settings.tito_family)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard.refusal(scope)
        if refusal is not None:
            self.state.services.metrics.request_failed(refusal.code)
            await send_reply(hardened(send), *error_parts(refusal))
            return
        scope["app"] = self
        if not await self._turns.serve(scope, receive, send):
            await super().__call__(scope, receive, hardened(send))

    async def _live(self, receive: Receive, send: Send) -> None:
        """The ASGI lifespan, from start-up to shutdown."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                started = run_services(self._settings, self.version, self._tokens, self._doorway)
                self.state.services = await stack.enter_async_context(started)
            except StartupError as error:
                await send({"type": "lifespan.startup.failed", "message": error.under("turnlog")})
                return
            except Exception:
                log.exception("an unexpected fault at start-up")
                await send({"type": "lifespan.startup.failed", "message": "turnlog: start-up failed"})
                return
            await stack.enter_async_context(metrics_route.published(self.state.services))
            on_stop_signal(self.state.services.let_go)
            _calm_collector()
            sys.setswitchinterval(SWITCH_S)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _calm_collector() -> None:
    """What start-up made stays, and a turn makes few cycles: full collections only cost latency."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def create_app(settings: Settings) -> Turnlog:
    """The application; its services live from ASGI lifespan start to end."""
    app = Turnlog(settings, _release())
    app.include_router(sessions.router)
    app.include_router(service.router)
    app.include_router(metrics_route.router)
    app.include_router(groups.router)
    app.include_router(fleet_routes.router)
    app.include_router(skyrl.router)
    app.include_router(engine_routes.router)
    app.include_router(signin.router)
    app.include_router(ui.router)
    app.include_router(ui_live.router)
    app.include_router(ui_files.page_routes())
    handle_faults(app)
    return app


def _release() -> str:
    try:
        return version("turnlog")
    except PackageNotFoundError:
        return "0+unknown"


def _from_environment() -> Turnlog:
    logs.configure("auto", "info")  # of what is wrong with the settings
    try:
        settings = load_settings()
        logs.configure(settings.log_format, settings.log_level)
        return create_app(settings)
    except StartupError as error:
        sys.exit(error.under("turnlog"))


app = _from_environment()
