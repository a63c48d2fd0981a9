"""Answers requests that are no turn's, and spells errors: every AppError becomes a reply here, as the path's clients
read it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.head import Head, to_newest
from app.api.requests import Request
from app.api.routes import JSON, NDJSON, Route
from app.errors import AppError, Overloaded
from app.process import cancelled
from app.protocols.base import WireProtocol
from app.protocols.errors import own_error
from app.protocols.registry import PROTOCOLS, protocol_at
from app.request_memory import BodyReservation
from app.services import Services
from app.upstream.headers import Headers

log = logging.getLogger("turnlog")

INTERNAL = "internal error: see the server's log"

RENDER_INLINE = 64 << 10
"""Bytes. What is rendered from a larger body is rendered on a thread."""

FOLLOWER_BYTES = 64 << 10
"""Memory of a followed log, beside the lines that are being sent: about what a connection's buffers hold."""

UNREAD_S = 2.0
"""How long a stopping server waits for a client that does not read what was sent to it."""

ROLLED_BACK = "x-turnlog-rolled-back"
"""Header with the number of live turns that the reply's turn superseded when it was committed."""

LEFT_OUT = "x-turnlog-left-out"
"""Header with what of the request the engine was not sent (`app.domain.left_out`)."""


async def answer(app: Services, route: Route, head: Head, receive: Receive, send: Send) -> None:
    """Answer a request that is no turn's, also after an unexpected exception.

    Raises what interrupts a reply that has begun: uvicorn then cuts the connection, so that the reply is not taken for
    whole. After a whole one it may have the client's next request already, and stays.
    """
    has_begun = is_whole = False
    hardened = head.hardening(send)

    async def sending(message: Message) -> None:
        nonlocal has_begun, is_whole
        has_begun = True
        await hardened(message)
        is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

    try:
        await to_newest(app, head)
        request = Request(app, route, head, receive)
        assert route.endpoint is not None
        content = await route.endpoint(request, **route.parameters.read(request, request.path_values))
        if content is None:
            content = Response(status_code=204)
        if isinstance(content, Response):
            await content(head.scope, receive, sending)
        else:
            await _send_whole(sending, 200, [("content-type", JSON)], msgspec.json.encode(content))
    except Exception as fault:
        if has_begun and not is_whole:
            raise
        error = fault if isinstance(fault, AppError) else AppError(INTERNAL)
        if error is not fault or has_begun:
            log.exception("unexpected error in %s %s", head.method, head.path)
        if not has_begun:
            await send_error(app, head, await app.explained(error), send, route.error_parts)


async def send_error(
    app: Services,
    head: Head,
    error: AppError,
    send: Send,
    parts_of: Callable[[AppError], tuple[int, Headers, bytes]] | None = None,
) -> None:
    """Count and answer an error of a request that is no turn, or that was refused before its turn.

    Its spelling is that of the path's protocol, else that which the client says to speak: Anthropic's SDKs send
    `anthropic-version` always.
    """
    app.metrics.request_failed(error.code)
    protocol = protocol_at(head.path) or (PROTOCOLS["messages"] if b"anthropic-version" in head.headers else None)
    status, headers, body = error_parts(error, protocol, head.request_id) if parts_of is None else parts_of(error)
    await _send_whole(head.hardening(send), status, headers, body)


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await start_reply(send, status, [*headers, ("content-length", str(len(body)))])
    await send({"type": "http.response.body", "body": body})


def error_parts(
    error: AppError, protocol: WireProtocol | None = None, request_id: str | None = None
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error reply, in the shape of `protocol` or else OpenAI's."""
    headers = [("content-type", JSON), *error.headers().items()]
    if protocol is None or protocol.is_native:
        return error.status, headers, msgspec.json.encode(error.body())
    return error.status, headers, protocol.error(own_error(error, request_id))


async def start_reply(send: Send, status: int, headers: Headers) -> None:
    """Send status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


def left_out_header(left_out: Sequence[str]) -> Headers:
    return [(LEFT_OUT, ", ".join(left_out))] if left_out else []


async def rendered(size: int, render: Callable[[], bytes]) -> bytes:
    """What `render` makes of a stored body of `size` bytes."""
    return render() if size <= RENDER_INLINE else await asyncio.to_thread(render)


async def started(pieces: AsyncIterator[bytes], media_type: str) -> StreamingResponse:
    """A stream whose first piece is read already, so that an early error still gets its own status."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        if first:
            yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(all_pieces(), media_type=media_type)


class ClosedStream(StreamingResponse):
    """Closes its pieces when the response ends, also after a disconnect: they may hold files or reads."""

    def __init__(
        self, pieces: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)


class FollowedStream(ClosedStream):
    """A log that is followed: one of a limited number, and its lines count as bytes in flight until the client has
    taken them. Raises Overloaded before it begins; later it ends, and its reader goes on behind the last line. It ends
    with the server, also if the client does not read."""

    def __init__(self, request: Request, pieces: AsyncGenerator[bytes]) -> None:
        super().__init__(pieces, NDJSON)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, peer = self._request.services, self._request.head.peer
        dropping = asyncio.create_task(self._drop(), name="turnlog-drop-unread")
        try:
            with app.followers.counted(), app.inflight.reserve(peer=peer) as reservation:
                reservation.grow(FOLLOWER_BYTES)
                self.body_iterator = _held(self._pieces, reservation)
                await super().__call__(scope, receive, send)
        finally:
            await cancelled(dropping)

    async def _drop(self) -> None:
        await self._request.services.all_events.stopping.wait()
        await asyncio.sleep(UNREAD_S)
        if self._request.head.connection is not None:
            self._request.head.connection.drop()


async def _held(pieces: AsyncGenerator[bytes], reservation: BodyReservation) -> AsyncGenerator[bytes]:
    async for piece in pieces:
        try:
            reservation.grow(len(piece))
        except Overloaded:
            return
        yield piece
        reservation.give_back(len(piece))


class HeldReply(Response):
    """A whole reply whose memory is reserved until the client has taken it."""

    def __init__(self, body: bytes, media_type: str, reservation: BodyReservation, headers: Mapping[str, str]) -> None:
        super().__init__(body, media_type=media_type, headers=headers)
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reservation:
            await super().__call__(scope, receive, send)
