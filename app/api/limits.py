"""Limits of a request's head, its body and the body's duration."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from app.errors import InvalidRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from app.request_memory import BodyReservation
from app.upstream.encoding import Decoder, Undecodable, decoder
from app.upstream.headers import Headers

MAX_HEADER_BYTES = 64 << 10
"""Maximum bytes of all headers' names and values together."""

MAX_TARGET_BYTES = 16 << 10
"""Maximum bytes of path and query, as they were sent."""

MAX_PARAMETERS = 256
"""Maximum parameters of a query."""

IDLE_S, IDLE_BYTES = 30.0, 30 << 10
"""A body must bring IDLE_BYTES every IDLE_S seconds: 1 KiB a second."""

BODY_S = 600.0
"""Timeout of a whole body."""

PEER = "peer"
"""Key in a scope's state: the connection's real peer, regardless of headers (set by `app.api.connection`)."""

CONNECTION = "connection"
"""Key in a scope's state: the `BoundedProtocol` of the request, where uvicorn serves it."""


async def read_body(receive: Receive, headers: Headers, limit: int, reservation: BodyReservation) -> bytes | None:
    """Read a request body, unpacked if it is compressed; None if the client disconnects before its end.

    `limit` is that of the bytes received and of the bytes unpacked. Raises RequestTooLarge, Overloaded, BodyGivenUp,
    RequestTimeout, UnsupportedEncoding, InvalidRequest (compressed data that cannot be unpacked).
    """
    encodings: list[str] = []
    for name, value in headers:
        if name == "content-encoding" and value.strip():
            encodings.append(value)
        if name == "content-length" and value.isdigit() and int(value) > limit:
            raise RequestTooLarge(f"the body has {value} bytes; the limit is {limit}")
    try:
        unpack = decoder(",".join(encodings)) if encodings else None
    except Undecodable as error:
        raise UnsupportedEncoding("the body's content-encoding must be gzip, deflate or zstd") from error
    try:
        async with asyncio.timeout(min(IDLE_S, BODY_S)) as timeout:
            reservation.begin(lambda: _expire(timeout))
            return await _read(receive, limit, reservation, timeout, unpack)
    except Undecodable as error:
        raise InvalidRequest(f"the body cannot be decompressed: {error}") from error
    except TimeoutError as error:
        reservation.check()
        raise RequestTimeout(
            f"the body arrived too slowly: less than {IDLE_BYTES} bytes in {IDLE_S:g} s, or not all of it "
            f"within {BODY_S:g} s"
        ) from error
    finally:
        reservation.arrived()


def _expire(timeout: asyncio.Timeout) -> None:
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


async def _read(
    receive: Receive, limit: int, reservation: BodyReservation, timeout: asyncio.Timeout, unpack: Decoder | None
) -> bytes | None:
    parts: list[bytes] = []
    received = counted = size = 0
    clock = asyncio.get_running_loop().time
    deadline = clock() + BODY_S
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        data = message.get("body", b"")
        received += len(data)
        if received > limit:
            raise RequestTooLarge(f"the body has more than {limit} bytes")
        for part in (data,) if unpack is None else unpack.feed(data):
            size += len(part)
            if size > limit:
                raise RequestTooLarge(f"the body has more than {limit} bytes when decompressed")
            reservation.arrive(len(part))
            parts.append(part)
            if unpack is not None:
                await asyncio.sleep(0)  # A few bytes may be many pieces.
        if not message.get("more_body"):
            if unpack is not None:
                unpack.finish()
            return parts[0] if len(parts) == 1 else b"".join(parts)
        if received - counted >= IDLE_BYTES:
            counted = received
            timeout.reschedule(min(clock() + IDLE_S, deadline))
