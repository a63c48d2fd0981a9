"""Builds the application and its services, for `uvicorn app.main:app`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from app import logs
from app.api import (
    checkpoints,
    counting,
    events,
    exports,
    forks,
    groups,
    images,
    models,
    notes,
    responses,
    service,
    session_lists,
    sessions,
    signin,
    skyrl,
    trees,
)
from app.api import engines as engine_routes
from app.api import fleet as fleet_routes
from app.api import metrics as metrics_route
from app.api.auth import Guard, route_path, with_single_slashes
from app.api.connection import bound_connections
from app.api.connection_limit import ConnectionLimit
from app.api.error_handlers import handle_faults
from app.api.ng_rollout import without_prefix
from app.api.page import files as ui_files
from app.api.page import live as ui_live
from app.api.page import routes as ui
from app.api.replies import error_parts, send_reply
from app.api.request_ids import RequestIds
from app.api.security_headers import hardened
from app.api.tokens import Tokens
from app.api.turns import serve_turn
from app.errors import AppError, StartupError
from app.extras import install
from app.features import archive, search
from app.features.archive.routes import router as archive_router
from app.metrics import Metrics
from app.protocols.registry import protocol_at
from app.services import Services
from app.sessions.recovery import Registration
from app.settings import Settings, load_settings
from app.stopping import end_without_store, on_stop_signal
from app.store.engine import Database
from app.store.objects.rows import NoteObjects, has_objects, url_of_objects
from app.tito.families import check_family
from app.turn.stages import RecentTurnStats
from app.upstream.client import EngineClient

if TYPE_CHECKING:
    from app.store.objects.bucket import Bucket
    from app.tito.prompts import Prompts

log = logging.getLogger("turnlog")

SWITCH_S = 0.0005
"""Switch interval of threads: how long the event loop waits for the interpreter while another thread computes. It is a
tenth of Python's default, because the loop waits at each of its steps while a thread reads a large request."""


@contextlib.asynccontextmanager
async def run_services(
    settings: Settings,
    release: str,
    tokens: Tokens,
    connection_limit: ConnectionLimit,
) -> AsyncIterator[Services]:
    """The components that live as long as the process. Raises StartupError."""
    for told in settings.warnings:
        log.warning(told)
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics(RecentTurnStats(time.monotonic))
        stack.callback(metrics.close)
        bucket = await _bucket(settings)
        database = Database(settings.database_url, metrics.committed, end_without_store, bucket)
        stack.push_async_callback(database.close)
        await database.open()
        await _require_objects(database, bucket)
        client = _client(settings)
        stack.push_async_callback(client.close)
        check_family(settings.tito_family)
        prompts = await asyncio.to_thread(_load_prompts, settings)  # takes seconds
        registration = Registration(database)
        await registration.attempt()
        made = Services(settings, release, database, client, registration, prompts, metrics, tokens, connection_limit)
        stack.push_async_callback(made.stop)
        await _open(made)
        await made.writer.submit(NoteObjects(None if bucket is None else bucket.url, secrets.token_hex(8)))
        stack.push_async_callback(made.health.stop)
        stack.push_async_callback(made.pool.stop, 0)
        stack.push_async_callback(made.drain)
        stack.push_async_callback(made.counted.stop)
        stack.push_async_callback(made.log_end.stop)
        stack.push_async_callback(made.lag.stop)
        made.lag.start()
        made.start()
        registration.start(made.registered)
        stack.push_async_callback(registration.stop)
        made.health.start()
        made.pool.start()
        yield made


async def _open(made: Services) -> None:
    """Open the assembly. Raises StartupError if the fleet's log cannot be read."""
    try:
        await made.open()
    except AppError as error:
        raise StartupError(f"the fleet's log cannot be read: {error}") from error


async def _require_objects(database: Database, bucket: Bucket | None) -> None:
    """Is the object storage there that the store refers to? Raises StartupError."""
    url = await database.read(url_of_objects)
    if url is None or not await database.read(has_objects):
        return
    if bucket is None:
        raise StartupError(f"replay payloads of this store are in object storage: set TURNLOG_PAYLOADS={url}")
    if url != bucket.url:
        log.warning("replay payloads of this store were written to %s, and are read from %s now", url, bucket.url)


async def _bucket(settings: Settings) -> Bucket | None:
    """The object storage of replay payloads. Raises StartupError if there is no such bucket."""
    if settings.payloads == "database":
        return None
    from app.store.objects.bucket import Bucket  # a twentieth of a second, which most starts do not need

    bucket = Bucket(settings.payloads, settings.payloads_timeout_s)
    if silent := await bucket.probe():
        log.warning("%s; turns with replay payloads wait for it", silent)
    if bucket.keeps_versions:
        log.warning("%s keeps old versions: %s", bucket.url, bucket.consequence_of_versions)
    return bucket


def _client(settings: Settings) -> EngineClient:
    return EngineClient(
        connect_timeout_s=settings.upstream_connect_timeout_s,
        timeout_s=settings.upstream_timeout_s,
        max_bytes=settings.max_upstream_bytes,
    )


def _load_prompts(settings: Settings) -> Prompts | None:
    """The prompts of the tokenizer, or None. Raises StartupError."""
    if settings.tokenizer is None:
        return None
    try:
        from app.tito.prompts import Prompts as Loader  # needs the packages of the extra `tito`
    except ImportError as error:
        raise StartupError(f"TURNLOG_TOKENIZER needs further packages: {install('tito')}") from error
    prompts = Loader.load(settings.tokenizer, settings.tito_family)
    for shape, why in prompts.findings.refused.items():
        log.warning("turns that continue %s begin a new row: %s", shape, why)
    return prompts


class Turnlog(FastAPI):
    """FastAPI with a direct path for turns. A failed start-up gives one line instead of a traceback.

    The routes that generate bypass FastAPI's middleware and routing, which cost a tenth of a turn.
    """

    def __init__(self, settings: Settings, release: str) -> None:
        super().__init__(title="Turnlog", version=release, docs_url=None, redoc_url=None, openapi_url=None)
        self._settings = settings
        self._requests = RequestIds(self._serve)
        self._tokens = Tokens(settings.admin_token, settings.session_secret)
        self._connection_limit = ConnectionLimit(time.monotonic)
        self._guard = Guard(self._tokens, settings.trusted_networks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._connection_limit.open()
            bound_connections(receive, self._connection_limit, self._settings.max_request_bytes)
            await self._live(receive, send)
        elif scope["type"] == "http":
            if "//" in scope["path"]:
                scope = with_single_slashes(scope)
            await self._requests(without_prefix(scope), receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard.refusal(scope)
        if refusal is not None:
            self.state.services.metrics.request_failed(refusal.code)
            await send_reply(hardened(send), *error_parts(refusal, protocol_at(route_path(scope))))
            return
        scope["app"] = self
        if not await serve_turn(self.state.services, scope, receive, send):
            await super().__call__(scope, receive, hardened(send))

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the ASGI lifespan from start-up to shutdown."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                started = run_services(self._settings, self.version, self._tokens, self._connection_limit)
                self.state.services = await stack.enter_async_context(started)
                self.state.search = await stack.enter_async_context(search.running(self.state.services))
            except StartupError as error:
                await send({"type": "lifespan.startup.failed", "message": error.under("turnlog")})
                return
            except Exception:
                log.exception("an unexpected fault at start-up")
                await send({"type": "lifespan.startup.failed", "message": "turnlog: start-up failed"})
                return
            self.state.archive = await stack.enter_async_context(archive.running(self.state.services))
            await stack.enter_async_context(metrics_route.published(self.state.services))
            on_stop_signal(self.state.services.end_waits)
            _calm_collector()
            sys.setswitchinterval(SWITCH_S)
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def _calm_collector() -> None:
    """Reduce garbage collection: start-up's objects stay, and turns make few cycles. Full runs only cost latency."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def create_app(settings: Settings) -> Turnlog:
    """The application. Its services live from the start to the end of the ASGI lifespan."""
    app = Turnlog(settings, _release())
    app.include_router(session_lists.router)
    app.include_router(sessions.router)
    app.include_router(notes.router)
    app.include_router(forks.router)
    app.include_router(trees.router)
    app.include_router(images.router)
    app.include_router(events.router)
    app.include_router(responses.router)
    app.include_router(models.router)
    app.include_router(counting.router)
    app.include_router(service.router)
    app.include_router(exports.router)
    app.include_router(metrics_route.router)
    app.include_router(groups.router)
    app.include_router(archive_router)
    app.include_router(fleet_routes.router)
    app.include_router(checkpoints.router)
    app.include_router(skyrl.router)
    app.include_router(engine_routes.router)
    app.include_router(signin.router)
    app.include_router(ui.router)
    app.include_router(ui_live.router)
    app.include_router(ui_files.page_routes())
    if settings.search == "on":
        from app.features.search.routes import router

        app.include_router(router)
    handle_faults(app)
    return app


def _release() -> str:
    try:
        return version("turnlog")
    except PackageNotFoundError:
        return "0+unknown"


def _from_environment() -> Turnlog:
    logs.configure("auto", "info")  # for errors in the settings
    try:
        settings = load_settings()
        logs.configure(settings.log_format, settings.log_level)
        return create_app(settings)
    except StartupError as error:
        sys.exit(error.under("turnlog"))


app = _from_environment()
