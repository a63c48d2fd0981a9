"""How routes reach the service's components, and read their bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.types import Scope

from app.api.limits import peer_of, read_body

if TYPE_CHECKING:
    from app.services import Services


def services(request: Request) -> Services:
    return of_scope(request.scope)


def of_scope(scope: Scope) -> Services:
    app: Services = scope["app"].state.services
    return app


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
