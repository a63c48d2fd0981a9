"""Bounds on what is in memory at once: one body, and all of them together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import Receive

from app.errors import InvalidRequest, Overloaded, RequestTooLarge
from app.upstream.headers import Headers


class Room:
    """What one request holds of the bytes that may be in flight."""

    def __init__(self, inflight: Inflight) -> None:
        self._inflight = inflight
        self.size = 0

    def grow(self, size: int) -> None:
        """Raises Overloaded."""
        self._inflight.take(size)
        self.size += size


class Inflight:
    """Bytes of all bodies in flight in this process, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.size = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        room = Room(self)
        try:
            yield room
        finally:
            self.size -= room.size

    def take(self, size: int) -> None:
        if self.size + size > self._limit:
            raise Overloaded(f"bodies of {self.size} bytes are in flight; the limit is {self._limit}")
        self.size += size


async def read_body(receive: Receive, headers: Headers, limit: int, room: Room) -> bytes | None:
    """A whole request body; None if the client went away before it was whole.

    Raises RequestTooLarge, Overloaded, InvalidRequest (a compressed body).
    """
    for name, value in headers:
        if name == "content-encoding" and value.lower() != "identity":
            raise InvalidRequest("a compressed request body is not accepted")
        if name == "content-length" and value.isdigit() and int(value) > limit:
            raise RequestTooLarge(f"the body has {value} bytes; the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestTooLarge(f"the body has more than {limit} bytes")
        room.grow(len(part))
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)
