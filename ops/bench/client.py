"""A minimal HTTP client for benchmarks. It must use little CPU, since it shares a core with the engine simulator.

It supports what Turnlog and the simulator send: one request at a time, and replies with a Content-Length, or in chunks.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit


class Broken(Exception):
    """The connection was lost, or the reply is one that this client cannot read."""


class Response(NamedTuple):
    """An HTTP reply. `head` is the status line and the headers, in lower case."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header, None if absent. `name` is in lower case."""
        begin = self.head.find(b"\r\n" + name.encode() + b":")
        if begin < 0:
            return None
        begin += len(name) + 3
        end = self.head.find(b"\r\n", begin)
        return self.head[begin : end if end >= 0 else None].decode("latin-1").strip()


class Connection(asyncio.Protocol):
    """A connection to a server. Create it with `connect`; it closes at the end of `async with`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Response] | None = None
        self._pieces: list[bytes] = []
        self._head = b""
        self._missing = -1
        self._is_chunked = False
        self._host = b""
        self._headers = b""

    @classmethod
    async def connect(cls, base_url: str, headers: str = "") -> Connection:
        """Connect to a server. `headers` are sent with each request: whole lines, each with CRLF. Raises OSError."""
        parts = urlsplit(base_url)
        host, port = parts.hostname or "", parts.port or 80
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        connection._host = f"{host}:{port}".encode()
        connection._headers = headers.encode()
        return connection

    @property
    def closed(self) -> bool:
        """Whether the server closed the connection, as it does after some idle seconds."""
        return self._transport is None

    async def request(
        self, method: str, path: str, body: bytes | tuple[bytes, ...] = b"", headers: str = ""
    ) -> Response:
        """Send a request and read its response; `headers` are whole lines, each with CRLF. Raises Broken."""
        if self._transport is None or self._waiting is not None:
            raise Broken("the connection is closed or busy")
        pieces = body if isinstance(body, tuple) else (body,)
        head = b"%s %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s%s\r\n" % (
            method.encode(),
            path.encode(),
            self._host,
            sum(map(len, pieces)),
            self._headers,
            headers.encode(),
        )
        self._waiting = asyncio.get_running_loop().create_future()
        self._pieces, self._head, self._missing = [], b"", -1
        self._transport.writelines((head, *pieces))
        try:
            return await self._waiting
        finally:
            self._waiting = None

    async def json(self, method: str, path: str, value: Any = None) -> Any:
        """Send a small JSON request; returns the decoded reply. Raises Broken if the status is not 2xx."""
        response = await self.request(method, path, b"" if value is None else json.dumps(value).encode())
        if response.status >= 300:
            raise Broken(f"{method} {path} answered {response.status}: {response.body[:200]!r}")
        return json.loads(response.body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport lacks only the base class

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            data = b"".join((*self._pieces, data))
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._pieces = [data]
                return
            self._head, data = data[:end].lower(), data[end + 4 :]
            head = Response(0, self._head, b"")
            length = "0" if self._head[9:12] == b"204" else head.header("content-length")
            self._is_chunked = head.header("transfer-encoding") == "chunked"
            if length is None and not self._is_chunked:
                self._fail("a response without Content-Length")
                return
            self._missing, self._pieces = int(length or 1), []
        self._pieces.append(data)
        if self._is_chunked:
            self._missing = 0 if b"".join(self._pieces[-2:]).endswith(b"\r\n0\r\n\r\n") else 1
        else:
            self._missing -= len(data)
        if self._missing <= 0 and self._waiting is not None and not self._waiting.done():
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            if self._is_chunked:
                body = _unchunked(body)
            self._waiting.set_result(Response(int(self._head[9:12]), self._head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"the connection was lost: {exc}")

    def _fail(self, why: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(why))


def _unchunked(body: bytes) -> bytes:
    """What the chunks of a body hold."""
    pieces, start = [], 0
    while size := int(body[start : (end := body.index(b"\r\n", start))], 16):
        pieces.append(body[end + 2 : end + 2 + size])
        start = end + 4 + size
    return b"".join(pieces)
