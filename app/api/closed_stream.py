"""Replies that hold something until they have been sent: what they read from, or memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.limits import BodyReservation, peer_of
from app.api.state import of_scope
from app.errors import Overloaded

FOLLOWER_BYTES = 64 << 10
"""Memory of a followed log, beside the lines that are being sent: about what a connection's buffers hold."""


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
    taken them. Raises Overloaded before it begins; later it ends, and its reader goes on behind the last line."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = of_scope(scope)
        with app.followers.counted(), app.inflight.reserve(peer=peer_of(scope)) as reservation:
            reservation.grow(FOLLOWER_BYTES)
            self.body_iterator = _held(self._pieces, reservation)
            await super().__call__(scope, receive, send)


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
