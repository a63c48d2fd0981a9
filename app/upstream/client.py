"""One HTTP client for all engines: aiohttp, chosen by measurement (docs/benchmarks.md).

httpx scans every pooled connection on each request, which costs milliseconds at 64 clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import aiohttp
import msgspec
from aiohttp.connector import Connection

from app.upstream.body import Body
from app.upstream.headers import Headers

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the engines' servers (uvicorn: 5 s) close them under our feet."""

MAPPED = 4 << 20
"""Bytes of a reply that is worth memory of its own."""

UNASKED_TRIES = 256
"""Idle connections that may have gone bad at once, before an engine counts as one that cannot be talked to."""

PIECE = 256 << 10
"""A larger body is sent in pieces of so many bytes, so that other requests run between them."""


PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models"),
    *("/health", "/model_info", "/is_paused"),
    *("/abort_request", "/pause_generation", "/continue_generation", "/pause", "/resume"),
    *("/open_session", "/close_session"),
)
"""All that an engine is ever asked for. Nothing of a client's request is part of a path."""

SMALL = 4 << 20
"""Bytes at most of a reply that nobody counts: to anything but a turn."""

Grow = Callable[[int], None]
"""Takes a number of bytes that are about to be in memory; raises where there is no room for them."""


def _unbounded(size: int) -> None:
    """For small replies, which nobody counts."""


def _always() -> bool:
    return True


class EngineReply(msgspec.Struct, frozen=True):
    status: int
    headers: Headers
    body: Body


class EngineError(Exception):
    """The engine gave no usable answer."""


class NotSent(EngineError):
    """No connection was made, so another engine may safely be asked."""


class Lost(EngineError):
    """The connection ended after the request had been sent: a generation may have happened."""


class TimedOut(EngineError):
    """No whole answer within TURNLOG_UPSTREAM_TIMEOUT_S."""


class TooLarge(EngineError):
    """The answer is larger than TURNLOG_MAX_UPSTREAM_BYTES."""


class Withheld(Exception):
    """Nothing was sent: at the last moment, with a connection at hand, it should not be any more."""


_may_send: ContextVar[Callable[[], bool]] = ContextVar("may_send")
"""Asked by the request that a task is sending: aiohttp hands its requests nothing of their caller's."""


class _Unasked(aiohttp.ClientError):
    """An idle connection has brought bytes that answer no request; nothing was sent on it."""


def _has_come(transport: asyncio.BaseTransport | None) -> bool:
    """Has the connection bytes that nobody has read yet, or its end?"""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None:
        return False
    waiting = select.poll()
    waiting.register(sock.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


class _Request(aiohttp.ClientRequest):
    """Is not sent where an answer waits already: aiohttp would take that for this request's, whosever it is.

    Nor where its caller will not have it sent by now: to connect may have taken seconds.
    """

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if conn.protocol is not None and (conn.protocol.should_close or _has_come(conn.protocol.transport)):
            conn.close()
            raise _Unasked
        if not _may_send.get(_always)():
            raise Withheld
        return await super().send(conn)


class EngineClient:
    """POST and GET to an engine, without redirects, cookies, environment proxies or decompression."""

    def __init__(self, *, connect_timeout_s: float, timeout_s: float, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_keepalive_socket)
        self._session = aiohttp.ClientSession(
            connector=connector,
            request_class=_Request,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Headers,
        grow: Grow = _unbounded,
        may_send: Callable[[], bool] | None = None,
    ) -> EngineReply:
        """`grow` is told of the reply's bytes before they are read, `may_send` asked right before the first is sent.

        Raises NotSent, Lost, TimedOut, TooLarge; Withheld.
        """
        if len(body) > PIECE:
            headers = [*headers, ("content-length", str(len(body)))]
        token = _may_send.set(may_send or _always)
        try:
            return await self._request(
                "POST", url, headers, lambda: body if len(body) <= PIECE else _pieces(body), grow
            )
        finally:
            _may_send.reset(token)

    async def get(self, url: str, headers: Headers) -> EngineReply:
        """Raises NotSent, Lost, TimedOut, TooLarge."""
        return await self._request("GET", url, headers, lambda: None, _unbounded)

    async def _request(
        self, method: str, url: str, headers: Headers, data: Callable[[], Any], grow: Grow
    ) -> EngineReply:
        """On the next connection where an idle one, which aiohttp then closes, cannot be used."""
        if not url.partition("?")[0].endswith(PATHS):
            raise ValueError("an engine is not asked for such a path")
        for _ in range(UNASKED_TRIES):
            with contextlib.suppress(_Unasked):
                return await self._request_once(method, url, headers, data(), grow)
        raise NotSent("every connection brings bytes before it is asked")

    async def _request_once(self, method: str, url: str, headers: Headers, data: Any, grow: Grow) -> EngineReply:
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                body = await self._read(response, grow)
                # As HTTP spells them (RFC 9110, section 5.5); aiohttp's own strings may hold what no encoding takes.
                headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
                return EngineReply(response.status, headers, body)
        except _Unasked:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(type(error).__name__) from error
        except TimeoutError as error:
            raise TimedOut("no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(type(error).__name__) from error

    async def _read(self, response: aiohttp.ClientResponse, grow: Grow) -> Body:
        length = response.content_length
        limit = min(SMALL, self._max_bytes) if grow is _unbounded else self._max_bytes
        if length is not None:
            if length > limit:
                raise TooLarge(f"{length} bytes")
            grow(length)
            if length > MAPPED:
                return await _mapped(response, length)
        pieces: list[bytes] = []
        size = 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if length is None:
                if size > limit:
                    raise TooLarge(f"more than {limit} bytes")
                grow(len(piece))
            pieces.append(piece)
        return Body(pieces)


async def _mapped(response: aiohttp.ClientResponse, length: int) -> Body:
    """A very large reply in memory of its own, which the system has back as soon as it is done with.

    Freed pieces would stay with the process's allocator. The pages come as they are written, not all at once.
    """
    area = mmap.mmap(-1, length)
    at = 0
    async for piece in response.content.iter_any():
        area[at : at + len(piece)] = piece
        at += len(piece)
    return Body([memoryview(area)])


async def _pieces(body: bytes) -> AsyncIterator[memoryview]:
    view = memoryview(body)
    for start in range(0, len(body), PIECE):
        yield view[start : start + PIECE]


def _keepalive_socket(address: Any) -> socket.socket:
    """TCP keepalive notices an engine that vanished during an hour's generation."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
