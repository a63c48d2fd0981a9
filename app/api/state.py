"""What the routes work with, made once by `app.main`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from fastapi import Request
from starlette.types import Scope

from app.api.connection_limit import ConnectionLimit
from app.api.limits import RequestMemory, peer_of, read_body
from app.api.tokens import Tokens
from app.event_loop_lag import LoopLag
from app.export.exports import Exports
from app.export.feed import Feed
from app.export.session_samples import Samples
from app.fleet.engine_pool import EnginePool
from app.fleet.engines import Engines
from app.fleet.gates import Gates
from app.fleet.health import HealthWatch
from app.fleet.pauses import Pauses
from app.fleet.state import FleetState
from app.lazy_import import LazyImport
from app.metrics import Metrics
from app.sessions.cache import SessionCache
from app.sessions.followers import Followers
from app.sessions.forks import Forks
from app.sessions.janitor import Janitor
from app.sessions.lifecycle import Sessions
from app.sessions.registration import Registration
from app.settings import Settings
from app.store.cached_figures import CachedFigures
from app.store.engine import Database
from app.store.writer import Writer
from app.turn.turns import Turns
from workers.pool import Pool

if TYPE_CHECKING:
    from app.api.page.page import Page


class Services(msgspec.Struct, frozen=True):
    settings: Settings
    database: Database
    registration: Registration
    writer: Writer
    engines: Engines
    engine_pool: EnginePool
    health: HealthWatch
    fleet: FleetState
    gates: Gates
    pauses: Pauses
    sessions: Sessions
    forks: Forks
    turns: Turns
    exporter: Exports
    samples: Samples
    feed: Feed
    pool: Pool
    inflight: RequestMemory
    followers: Followers
    metrics: Metrics
    counted: CachedFigures
    cache: SessionCache
    janitor: Janitor
    tokens: Tokens
    doorway: ConnectionLimit
    lag: LoopLag
    page: LazyImport[Page]

    def let_go(self) -> None:
        """End what would otherwise keep requests open for long: the server stops."""
        self.followers.stop()
        self.gates.stop()
        if self.page.made is not None:
            self.page.made.watch.stop()


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
