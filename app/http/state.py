"""What the routes work with, made once by `app.main`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from fastapi import Request
from starlette.types import Scope

from app.http.doorway import Doorway
from app.http.limits import Inflight, peer_of, read_body
from app.http.tokens import Tokens
from app.metrics import Metrics
from app.service.cache import SessionCache
from app.service.counted import Counted
from app.service.engine_pool import EnginePool
from app.service.exports import Exports
from app.service.feed import Feed
from app.service.fleet import FleetState
from app.service.follow import Followers
from app.service.gates import Gates
from app.service.janitor import Janitor
from app.service.lag import LoopLag
from app.service.later import Later
from app.service.pauses import Pauses
from app.service.registration import Registration
from app.service.samples import Samples
from app.service.sessions import Sessions
from app.service.turns import Turns
from app.settings import Settings
from app.store.engine import Database
from app.store.writer import Writer
from app.upstream.engines import Engines
from app.upstream.health import HealthWatch
from workers.pool import Pool

if TYPE_CHECKING:
    from app.service.page import Page


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
    turns: Turns
    exporter: Exports
    samples: Samples
    feed: Feed
    pool: Pool
    inflight: Inflight
    followers: Followers
    metrics: Metrics
    counted: Counted
    cache: SessionCache
    janitor: Janitor
    tokens: Tokens
    doorway: Doorway
    lag: LoopLag
    page: Later[Page]

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
