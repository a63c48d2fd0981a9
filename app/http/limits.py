"""Bounds on a request: its head, its body and the time that takes; and on all bodies that are in memory together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Receive, Scope

from app.errors import (
    AppError,
    HeadersTooLarge,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    TargetTooLong,
)
from app.upstream.headers import Headers

MAX_HEADER_BYTES = 64 << 10
"""Names and values of all headers together."""

MAX_TARGET_BYTES = 16 << 10
"""Path and query, as they were sent."""

MAX_PARAMETERS = 256
"""Of a query."""

MAX_SMALL_BODY = 512 << 10
"""Bytes of a body that holds at most 64 KiB of labels, which is decoded on the event loop: an escape has six times the
bytes of what it stands for, and there may be white space. Decoding takes some milliseconds."""

IDLE_S, BODY_S = 60.0, 600.0
"""How long nothing of a body may come, and how long all of it may take."""


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


def beyond(scope: Scope, header_bytes: int) -> AppError | None:
    """What of a request's head is too large."""
    if header_bytes > MAX_HEADER_BYTES:
        return HeadersTooLarge(f"the headers have {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    query: bytes = scope["query_string"]
    size = len(scope.get("raw_path") or scope["path"].encode()) + len(query)
    if size > MAX_TARGET_BYTES:
        return TargetTooLong(f"path and query have {size} bytes; the limit is {MAX_TARGET_BYTES}")
    if query.count(b"&") >= MAX_PARAMETERS:
        return InvalidRequest(f"the query has more than {MAX_PARAMETERS} parameters")
    return None


async def read_body(receive: Receive, headers: Headers, limit: int, room: Room) -> bytes | None:
    """A whole request body; None if the client went away before it was whole.

    Raises RequestTooLarge, Overloaded, InvalidRequest (a compressed body), RequestTimeout.
    """
    for name, value in headers:
        if name == "content-encoding" and value.lower() != "identity":
            raise InvalidRequest("a compressed request body is not accepted")
        if name == "content-length" and value.isdigit() and int(value) > limit:
            raise RequestTooLarge(f"the body has {value} bytes; the limit is {limit}")
    try:
        async with asyncio.timeout(IDLE_S) as patience:
            return await _read(receive, limit, room, patience)
    except TimeoutError as error:
        raise RequestTimeout(
            f"nothing of the body came for {IDLE_S:g} s, or all of it did not come in {BODY_S:g} s"
        ) from error


async def _read(receive: Receive, limit: int, room: Room, patience: asyncio.Timeout) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_S
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
        patience.reschedule(min(clock() + IDLE_S, deadline))
