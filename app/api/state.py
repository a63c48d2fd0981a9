"""What the routes work with, made once by `app.main`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.types import Scope

from app.api.connection_limit import ConnectionLimit
from app.api.limits import RequestMemory, peer_of, read_body
from app.api.tokens import Tokens
from app.assembly import Assembly
from app.event_loop_lag import LoopLag
from app.export.feed import Feed
from app.export.metrics import ExportMetrics
from app.export.session_samples import SessionSamples
from app.fleet.health import HealthWatch
from app.lazy_import import LazyImport
from app.metrics import Metrics
from app.sessions.registration import Registration
from app.settings import Settings
from app.store.cached_figures import CachedFigures
from app.store.engine import Database
from app.upstream.client import EngineClient
from workers.pool import Pool

if TYPE_CHECKING:
    from app.api.page.page import PageReaders
    from app.export.exporter import Exporter
    from app.tito.prompts import Prompts


class Services(Assembly):
    """What takes turns, and what the routes need beside it."""

    def __init__(
        self,
        settings: Settings,
        release: str,
        database: Database,
        client: EngineClient,
        registration: Registration,
        prompts: Prompts | None,
        metrics: Metrics,
        tokens: Tokens,
        doorway: ConnectionLimit,
    ) -> None:
        self.pool = Pool(
            settings.workers, deadline_s=settings.worker_deadline_s, memory_bytes=settings.worker_memory_bytes
        )
        super().__init__(
            database=database,
            client=client,
            pool=self.pool,
            settings=settings,
            clock=time.time,
            incarnation=registration.incarnation,
            prompts=prompts,
        )
        self.settings = settings
        self.database = database
        self.registration = registration
        self.metrics = metrics
        self.tokens = tokens
        self.doorway = doorway
        self.release = release
        self.exported = ExportMetrics()
        self.exporter = LazyImport("app.export.exporter", lambda: _exporter(self))
        self.feed = Feed(database, self.writer, self.exporter)
        self.samples = SessionSamples(self.cache, self.token_in, release)
        self.health = HealthWatch(
            self.engines,
            client,
            dialect=settings.upstream_dialect,
            api_key=settings.upstream_api_key,
            is_paused=lambda: self.fleet.fleet.gate.is_shut,
        )
        self.inflight = RequestMemory(settings.inflight_bytes, settings.max_request_bytes)
        self.counted = CachedFigures(database, time.monotonic)
        self.lag = LoopLag(time.monotonic)
        self.page = LazyImport("app.api.page.page", lambda: _page(self))

    def let_go(self) -> None:
        """End what would otherwise keep requests open for long: the server stops."""
        self.followers.stop()
        self.gates.stop()
        if self.page.made is not None:
            self.page.made.watch.stop()


def _exporter(made: Services) -> Exporter:
    from app.export.exporter import Exporter  # a start does not need it

    return Exporter(made.database, made.release, exported=made.exported)


def _page(made: Services) -> PageReaders:
    from app.api.page.page import page_of  # nobody may ever look

    return page_of(made)


def services(request: Request) -> Services:
    return of_scope(request.scope)


def of_scope(scope: Scope) -> Services:
    found: Services = scope["app"].state.services
    return found


CONTROL_BYTES = 1 << 20
"""Of a body that asks for no turn: those are read on the event loop, in one go."""


async def whole_body(request: Request, limit: int = CONTROL_BYTES) -> bytes:
    """The request's body within the limits. Raises RequestTooLarge, Overloaded, InvalidRequest."""
    app = services(request)
    limit = min(limit, app.settings.max_request_bytes)
    with app.inflight.room(peer=peer_of(request.scope)) as room:
        body = await read_body(request.receive, request.headers.items(), limit, room)
    return body or b""


async def begun(stream: AsyncIterator[bytes]) -> tuple[AsyncIterator[bytes], bool]:
    """The stream with its first piece already made, so that what fails at once gets its own status; is it empty?"""
    first = await anext(stream, b"")
    return _chain(first, stream), not first


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        yield piece
