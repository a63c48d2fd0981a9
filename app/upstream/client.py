"""One HTTP client for all engines: aiohttp.

httpx scans every pooled connection on each request, which costs milliseconds at 64 clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import select
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp.connector import Connection

from app.upstream.body import Body, pieces_of
from app.upstream.encoding import Decoder, Undecodable, decoder, is_bomb
from app.upstream.headers import Headers
from app.upstream.streams import EVENT_STREAM, StreamReader

KEEPALIVE_S = 4.0
"""Idle connections are closed before the engines' servers close them (uvicorn: 5 s)."""

MMAP_BYTES = 4 << 20
"""Replies larger than this get their own memory map."""

BAD_CONNECTION_TRIES = 256
"""How many bad idle connections are discarded before an engine counts as unreachable."""

SHORT = 64 << 10
"""Parts of a body up to this size are joined before they are sent; longer bodies are sent as they lie in memory."""

READ_BYTES = 256 << 10
"""Twice as many bytes of a reply are read ahead: as much as uvloop reads at once, and again."""

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages/count_tokens"),
    *("/health", "/model_info", "/is_paused", "/weight_info", "/server_info"),
    *("/abort_requests", "/inference/v1/abort_requests"),
    *("/abort_request", "/pause_generation", "/continue_generation", "/pause", "/resume"),
    *("/open_session", "/close_session"),
    "/workers",
    *("/generate", "/separate_reasoning", "/parse_function_call"),
)
"""All paths that are ever requested from an engine. No part of a client's request becomes part of a path."""

JSON = ("content-type", "application/json")

ONCE = ("connection", "close")
"""The header of a request whose connection is not used again: what an engine sends after its reply is nobody's."""

SMALL = 4 << 20
"""Largest reply to anything but a turn; its memory is not accounted."""

ERROR_BYTES = 1 << 20
"""Largest reply that is an error."""

REST_SHARE, MAX_REST_S = 0.02, 0.1
"""Where nobody waits for the deltas of a stream, its bytes are left with the kernel for this share of the time that it
has run, at most so many seconds: each read costs as much as reading ten tokens."""

Grow = Callable[[int], None]
"""Called with a number of bytes before they are held in memory; raises if there is no room."""


def _unbounded(size: int) -> None:
    """For small replies, whose memory is not accounted."""


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


class Unreadable(EngineError):
    """The reply is compressed in a way that cannot be unpacked."""


class Withheld(Exception):
    """Nothing was sent: `may_send` refused when a connection was ready."""


class _UnsolicitedData(aiohttp.ClientError):
    """An idle connection received bytes that answer no request; nothing was sent on it."""


def _has_input(transport: asyncio.BaseTransport | None) -> bool:
    """Has the connection unread bytes, or was it closed?"""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None:
        return False
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLIN)
    return bool(poller.poll(0))


class _Request(aiohttp.ClientRequest):
    """Not sent if the connection already has input: aiohttp would take that for this request's answer.

    Nor if `may_send` refuses by now: connecting may have taken seconds.
    """

    may_send: Callable[[], bool] | None = None

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if conn.protocol is not None and (conn.protocol.should_close or _has_input(conn.protocol.transport)):
            conn.close()
            raise _UnsolicitedData
        if self.may_send is not None and not self.may_send():
            raise Withheld
        if conn.protocol is not None and self.headers.get(ONCE[0]) == ONCE[1]:
            conn.protocol.force_close()
        return await super().send(conn)


class EngineClient:
    """POST and GET to an engine, without redirects, cookies or environment proxies. Compressed replies are unpacked."""

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
            read_bufsize=READ_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(
        self,
        url: str,
        body: bytes | Sequence[bytes | memoryview],
        headers: Headers,
        grow: Grow = _unbounded,
        may_send: Callable[[], bool] | None = None,
        stream: StreamReader | None = None,
    ) -> EngineReply:
        """`body` may be in parts. Calls `grow` with the reply's size before it is read, and `may_send` right before
        anything is sent.

        With `stream` a reply that is a stream is read into it; what is returned is the reply that it assembles.
        Raises NotSent, Lost, TimedOut, TooLarge, Unreadable; Withheld; BadStream.
        """
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        if size > SHORT:
            headers = [*headers, ("content-length", str(size))]

        async def asking(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            assert isinstance(request, _Request)
            request.may_send = may_send
            return await send(request)

        return await self._request(
            "POST",
            url,
            headers,
            lambda: _sent(parts) if size > SHORT else b"".join(parts),
            grow,
            stream,
            () if may_send is None else (asking,),
        )

    async def get(self, url: str, headers: Headers) -> EngineReply:
        """Raises NotSent, Lost, TimedOut, TooLarge, Unreadable."""
        return await self._request("GET", url, headers, lambda: None, _unbounded)

    async def _request(
        self,
        method: str,
        url: str,
        headers: Headers,
        data: Callable[[], Any],
        grow: Grow,
        stream: StreamReader | None = None,
        middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    ) -> EngineReply:
        """Send a request, on another connection if an idle one is bad; aiohttp then closes that one."""
        if not url.partition("?")[0].endswith(PATHS):
            raise ValueError("an engine is not asked for such a path")
        for _ in range(BAD_CONNECTION_TRIES):
            with contextlib.suppress(_UnsolicitedData):
                return await self._request_once(method, url, headers, data(), grow, stream, middlewares)
        raise NotSent("every connection brings bytes before it is asked")

    async def _request_once(
        self,
        method: str,
        url: str,
        headers: Headers,
        data: Any,
        grow: Grow,
        stream: StreamReader | None,
        middlewares: Sequence[aiohttp.ClientMiddlewareType],
    ) -> EngineReply:
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False, middlewares=middlewares
            ) as response:
                # Decoded as HTTP defines them (RFC 9110, section 5.5); aiohttp's own strings may not be encodable.
                headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers]
                if stream is not None and response.status == 200 and response.content_type == EVENT_STREAM:
                    body = await self._read_stream(response, grow, stream)
                    return EngineReply(response.status, _as_json(headers), body)
                try:
                    body = await self._read(response, grow)
                except (Unreadable, TooLarge) as error:
                    if response.status < 400:
                        raise
                    return EngineReply(response.status, _as_json(headers), Body([_hidden_error(error)]))
                return EngineReply(response.status, headers, body)
        except _UnsolicitedData:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(type(error).__name__) from error
        except TimeoutError as error:
            raise TimedOut("no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(type(error).__name__) from error

    async def _read(self, response: aiohttp.ClientResponse, grow: Grow) -> Body:
        unpack = _decoder(response)
        length = response.content_length if unpack is None else None
        most = ERROR_BYTES if response.status >= 400 else SMALL if grow is _unbounded else self._max_bytes
        limit = min(most, self._max_bytes)
        if length is not None:
            if length > limit:
                raise TooLarge(f"{length} bytes")
            grow(length)
            if length > MMAP_BYTES:
                return await _read_to_mmap(response, length)
        pieces: list[bytes] = []
        size = 0
        async for piece in _plain_pieces(response, unpack):
            size += len(piece)
            if length is None:
                if size > limit:
                    raise TooLarge(f"more than {limit} bytes")
                grow(len(piece))
            pieces.append(piece)
        return Body(pieces)

    async def _read_stream(self, response: aiohttp.ClientResponse, grow: Grow, stream: StreamReader) -> Body:
        """The stream's bytes count as the reply's: what is kept of them is less."""
        size = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        async for piece in _plain_pieces(response, _decoder(response)):
            size += len(piece)
            if size > self._max_bytes:
                raise TooLarge(f"more than {self._max_bytes} bytes")
            grow(len(piece))
            stream.feed(piece)
            if not stream.is_live:
                await _rest(response, min(REST_SHARE * (loop.time() - began), MAX_REST_S))
        return Body([stream.reply()])


def _decoder(response: aiohttp.ClientResponse) -> Decoder | None:
    """Raises Unreadable for an unknown content encoding."""
    try:
        return decoder(",".join(response.headers.getall("content-encoding", ())))
    except Undecodable as error:
        raise Unreadable(str(error)) from error


async def _plain_pieces(response: aiohttp.ClientResponse, unpack: Decoder | None) -> AsyncIterator[bytes]:
    """The body as it comes, unpacked. Raises Unreadable, TooLarge."""
    packed = unpacked = 0
    try:
        async for piece in response.content.iter_any():
            if unpack is None:
                yield piece
                continue
            packed += len(piece)
            for plain in unpack.feed(piece):
                unpacked += len(plain)
                if is_bomb(packed, unpacked):
                    raise TooLarge(f"{packed} bytes unpack to more than {unpacked - len(plain)}")
                if plain:
                    yield plain
                    await asyncio.sleep(0)
        if unpack is not None:
            unpack.finish()
    except Undecodable as error:
        raise Unreadable(str(error)) from error


def _as_json(headers: Headers) -> Headers:
    """The headers of a reply whose body was replaced by JSON."""
    return [*((name, value) for name, value in headers if name.lower() != "content-type"), JSON]


def _hidden_error(error: Unreadable | TooLarge) -> bytes:
    """In place of an engine's error: the client still gets what matters most, the status and `Retry-After`."""
    message = f"the engine's error cannot be shown: {error}"
    return msgspec.json.encode({"error": {"message": message, "type": "upstream_error", "code": None}})


async def _rest(response: aiohttp.ClientResponse, seconds: float) -> None:
    """Read nothing for a while."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None or transport.is_closing():
        return
    transport.pause_reading()
    await asyncio.sleep(seconds)
    if not transport.is_closing():
        transport.resume_reading()


async def _read_to_mmap(response: aiohttp.ClientResponse, length: int) -> Body:
    """A very large reply in its own memory map, returned to the system as soon as it is released.

    Freed pieces would stay with the process's allocator. Pages are allocated as they are written.
    """
    area = mmap.mmap(-1, length)
    at = 0
    async for piece in response.content.iter_any():
        area[at : at + len(piece)] = piece
        at += len(piece)
    return Body([memoryview(area)])


async def _sent(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """A body as aiohttp takes one in pieces; it waits between them if the connection is slow."""
    for piece in pieces_of(parts):
        yield piece


def _keepalive_socket(address: Any) -> socket.socket:
    """TCP keepalive detects an engine that vanished during a long generation."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
