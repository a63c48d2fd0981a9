"""The components that routes use, built once by `app.main`."""

from __future__ import annotations

import time
import uuid
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
from app.export.picker import load_picker
from app.export.session_samples import SessionSamples
from app.fleet.health import HealthWatch
from app.lazy_import import LazyImport
from app.metrics import Metrics
from app.sessions.all_events import AllEvents
from app.sessions.group_list import GroupList
from app.sessions.log_end import LogEnd
from app.sessions.registration import Registration
from app.sessions.session_list import SessionList
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
    """The components of turns (`Assembly`), and those that only routes need."""

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
        connection_limit: ConnectionLimit,
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
        self.connection_limit = connection_limit
        self.release = release
        self.instance_id = uuid.uuid4().hex
        self.exported = ExportMetrics()
        self.picker = load_picker(settings.picker)
        self.exporter = LazyImport("app.export.exporter", lambda: _exporter(self))
        self.feed = Feed(database, self.writer, self.exporter)
        self.samples = SessionSamples(self.cache, self.token_in, release, settings.samples_versions)
        self.health = HealthWatch(
            self.engines,
            client,
            dialect=settings.upstream_dialect,
            api_key=settings.upstream_api_key,
            is_paused=lambda: self.fleet.fleet.gate.is_shut,
        )
        self.inflight = RequestMemory(settings.inflight_bytes, settings.max_request_bytes)
        self.counted = CachedFigures(database, time.monotonic)
        self.log_end = LogEnd(database)
        self.all_events = AllEvents(database, self.log_end)
        self.session_list = SessionList(database, self.turns.held, self.engines, time.time)
        self.group_list = GroupList(database)
        self.lag = LoopLag(time.monotonic)
        self.page = LazyImport("app.api.page.page", lambda: _page(self))

    def end_waits(self) -> None:
        """The server stops: end open streams and waits at gates, which could keep requests open for long."""
        self.followers.stop()
        self.all_events.stop()
        self.gates.stop()
        if self.page.made is not None:
            self.page.made.watch.stop()


def _exporter(made: Services) -> Exporter:
    from app.export.exporter import Exporter  # a start does not need it
    from app.export.helpers import MOST_HELPERS, Helpers

    settings = made.settings
    helpers = None
    if settings.workers > 2:  # fewer cores gain little
        helpers = Helpers(
            min(settings.workers - 2, MOST_HELPERS),
            deadline_s=settings.worker_deadline_s,
            memory_bytes=settings.worker_memory_bytes,
        )
    return Exporter(made.database, made.release, exported=made.exported, picker=made.picker, helpers=helpers)


def _page(made: Services) -> PageReaders:
    from app.api.page.page import page_of  # imported with the first view of the page

    return page_of(made)


def services(request: Request) -> Services:
    return of_scope(request.scope)


def of_scope(scope: Scope) -> Services:
    found: Services = scope["app"].state.services
    return found


CONTROL_BYTES = 1 << 20
"""Maximum bytes of a body that is not a turn's: it is parsed on the event loop at once."""


async def whole_body(request: Request, limit: int = CONTROL_BYTES) -> bytes:
    """Read the request's body; empty if the client disconnects. Raises as `read_body`."""
    app = services(request)
    limit = min(limit, app.settings.max_request_bytes)
    with app.inflight.reserve(peer=peer_of(request.scope)) as reservation:
        body = await read_body(request.receive, request.headers.items(), limit, reservation)
    return body or b""


async def start_stream(stream: AsyncIterator[bytes]) -> tuple[AsyncIterator[bytes], bool]:
    """Read the first piece, so that an early error still gets its own status. Returns the stream, and is it empty?

    Raises as the stream does.
    """
    first = await anext(stream, b"")
    return _chain(first, stream), not first


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        yield piece
