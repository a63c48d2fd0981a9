"""HTTP/1.1 to engines on httptools: connections that are kept, one request at a time on each.

httptools frames the replies, strictly: conflicting lengths, folded headers and lines without CR are refused. It keeps
nothing of a head, so a head's bytes are kept here, up to HEAD_BYTES, and split where it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import httptools

KEEPALIVE_S = 4.0
"""Idle connections are closed before the engines' servers close them (uvicorn: 5 s)."""

SWEEP_S = 0.5
"""How often one timer looks for what is late and for connections that were idle for too long."""

HEAD_BYTES = 64 << 10
"""Largest head of a reply, with those of the informational replies before it."""

FRAMING_TIMES = 8
"""Past HEAD_BYTES, no more bytes may come than so many times those of the body: a chunk of one byte takes six, but
extensions of chunks and trailers have no end of their own."""

READ_AHEAD = 512 << 10
"""So many bytes of a reply are held before they are taken: twice what uvloop reads at once."""

ADDRESSES_S = 10.0
"""How long the addresses of a host name are used before it is looked up again."""

NEXT_ADDRESS_S = 0.25
"""How long an address of several has to connect before the next is tried too (RFC 8305, section 8)."""


class EngineError(Exception):
    """The engine gave no usable answer."""


class NotSent(EngineError):
    """No connection was made, so another engine may safely be asked."""


class Lost(EngineError):
    """The connection ended after the request had been sent: a generation may have happened."""


class TimedOut(EngineError):
    """No whole answer within TURNLOG_UPSTREAM_TIMEOUT_S."""


class Origin(NamedTuple):
    """Where connections lead. `host` is a name or an address, without brackets."""

    is_tls: bool
    host: str
    port: int


class Connection(asyncio.Protocol):
    """A connection, and what has come of the reply to the request that was last written to it.

    `status` is 0 until the reply's head is complete; `headers` have their names in lower case, `named` are they without
    those that come twice. `length` is that of the body if it is known. What has come of the body is in `pieces`, until
    it is taken; with `takes_whole` nobody is woken before all of it has come. `heads` counts the replies that have
    begun, informational ones too.
    """

    def __init__(self, connections: Connections, origin: Origin) -> None:
        self.origin = origin
        self.is_bad = False
        self.idle_since = 0.0
        self.transport = cast(asyncio.Transport, None)
        self._connections = connections
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._is_write_paused = self.is_read_paused = False
        self.begin(0.0)
        self.is_busy = self.was_used = False

    # the request's side

    def begin(self, deadline: float) -> None:
        """Before a request is written."""
        self.deadline = deadline
        self.is_busy = self.was_used = True
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.named: dict[str, str] = {}
        self.length: int | None = None
        self.pieces: list[bytes] = []
        self.is_complete = self.keeps_alive = False
        self.takes_whole = False
        self.error: EngineError | None = None
        self._came = self._body = self._held = 0
        self._head = b""
        self.heads = 0

    def has_input(self) -> bool:
        """Has it unread bytes, or was it closed? A new TLS connection may have tickets to read."""
        if self.is_bad or self.transport.is_closing():
            return True
        return (self.was_used or not self.origin.is_tls) and bool(self._poll.poll(0))

    async def head(self) -> None:
        """Wait for the reply's head. Raises EngineError."""
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def more(self) -> None:
        """Wait for more of the body, or its end. Raises EngineError."""
        while not self.is_complete and (self.takes_whole or not self.pieces):
            if self.error is not None:
                raise self.error
            self.resume_reading()
            await self._wait()

    async def may_write(self) -> bool:
        """Wait until more may be written; False if the reply has come before, or so much of it that it must be read,
        or the connection has ended."""
        while not (self.is_complete or self.is_read_paused or self.error is not None):
            if not self._is_write_paused:
                return True
            await self._wait()
        return False

    async def _wait(self) -> None:
        self._waiter = self._connections.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[bytes]:
        """What has come of the body since it was last taken."""
        pieces, self.pieces, self._held = self.pieces, [], 0
        return pieces

    def pause_reading(self) -> None:
        if not self.transport.is_closing() and not self.is_read_paused:
            self.is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.transport.is_closing() and self.is_read_paused:
            self.is_read_paused = False
            self.transport.resume_reading()

    def fail(self, error: EngineError) -> None:
        """End the connection, and with it the request."""
        if self.error is None:
            self.error = error
        self.transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._connections.opened(self)

    def eof_received(self) -> None:
        """Nothing more comes, so nothing more is sent either: it might never be taken."""
        is_framed = self.length is not None or "transfer-encoding" in self.named
        if self.is_busy and self.status and not is_framed and self.error is None:
            self.is_complete = True  # such a body ends with its connection
            self._wake()
        elif self.is_busy and not self.is_complete:
            self.fail(Lost("it closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        if self.is_busy and not self.is_complete:
            self.fail(Lost("it closed the connection" if exc is None else type(exc).__name__))

    def data_received(self, data: bytes) -> None:
        if not self.is_busy or self.is_complete:
            # Nobody asked for it: it must not become the answer to the next request.
            self.is_bad = True
            if not self.is_busy:
                self.transport.abort()
            return
        self._came += len(data)
        if not self.status:
            self._head += data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.is_bad = True
            if not self.is_complete:
                self.fail(Lost(f"it sent no HTTP: {error}"))
                return
        if self._came > HEAD_BYTES + FRAMING_TIMES * self._body and not self.is_complete:
            self.fail(Lost("its head, or what frames its body, is too large"))
        elif self.is_complete or (self.pieces and not self.takes_whole) or (self.status and self._head):
            self._head = b""
            if self._held > READ_AHEAD and not self.takes_whole:
                self.pause_reading()
            self._wake()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake()

    # the parser's side

    def on_message_begin(self) -> None:
        self.heads += 1
        if self.is_complete:
            self.is_bad = True  # a second reply

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError("no status")
        if self.status or (status < 200 and status != 101):
            return
        start = 0
        for _ in range(self.heads - 1):
            start = self._head.index(b"\r\n\r\n", start) + 4
        head = self._head[start : self._head.index(b"\r\n\r\n", start)]
        first, *lines = head.decode("latin-1").split("\r\n")
        if len(head) > HEAD_BYTES or not first.startswith("HTTP/1.") or head.count(b"\n") != len(lines):
            raise ValueError("a malformed head")
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or line[0] in " \t":
                raise ValueError("a folded header")
            self.headers.append((name.lower(), value.strip(" \t")))
        self.named = dict(self.headers)
        if "content-length" in self.named:
            self.length = int(self.named["content-length"])
        self.status = status

    def on_body(self, piece: bytes) -> None:
        if not self.status:
            raise ValueError("an informational reply has a body")
        if not self.is_complete:
            self.pieces.append(piece)
            self._body += len(piece)
            self._held += len(piece)

    def on_message_complete(self) -> None:
        if self.status and not self.is_complete:
            self.is_complete = True
            self.keeps_alive = self._parser.should_keep_alive()


class Connections:
    """The connections to all engines; one that was used last is used next, so that few stay open.

    Redirects, cookies and the environment's proxies are unknown here. `may_connect` is asked for each address that a
    host name has; the name is not looked up again before the connection is made.
    """

    def __init__(self, connect_timeout_s: float, may_connect: Callable[[str], bool] | None = None) -> None:
        self._may_connect = may_connect
        self.loop = asyncio.get_running_loop()
        self.open: set[Connection] = set()
        # Rounds of the timer, not seconds: what came while this process stood still is read before the next round.
        self._connect_rounds = math.ceil(connect_timeout_s / SWEEP_S)
        self._connecting: dict[asyncio.Timeout, int] = {}
        self._idle: dict[Origin, list[Connection]] = {}
        self._addresses: dict[Origin, tuple[float, asyncio.Task[list[Any]]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._ended: asyncio.Future[None] | None = None

    def idle(self, origin: Origin) -> Connection | None:
        """A connection that is open and has brought nothing since its last reply."""
        connections = self._idle.get(origin)
        while connections:
            connection = connections.pop()
            if connection.idle_since + KEEPALIVE_S > self.loop.time() and not connection.has_input():
                return connection
            connection.transport.abort()
        return None

    def keep(self, connection: Connection) -> None:
        """It may be used again: its reply has come, and nothing else."""
        connection.is_busy = False
        connection.idle_since = self.loop.time()
        if connection.is_read_paused:
            connection.resume_reading()
        self._idle.setdefault(connection.origin, []).append(connection)

    async def connect(self, origin: Origin) -> Connection:
        """A new connection. Raises NotSent."""
        try:
            async with asyncio.timeout(None) as limit:
                self._connecting[limit] = self._connect_rounds
                self._keep_sweeping()
                sock = await self._connected(origin)
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self, origin),
                    sock=sock,
                    ssl=self._context() if origin.is_tls else None,
                    server_hostname=origin.host if origin.is_tls else None,
                )
        except OSError as error:
            self._addresses.pop(origin, None)
            raise NotSent(type(error).__name__) from error
        finally:
            self._connecting.pop(limit, None)
        if connection.has_input() or self._is_closed:
            connection.transport.abort()
            raise NotSent("the connection brings bytes before it is asked, or the client was closed")
        return connection

    async def close(self) -> None:
        """End all connections, and with them what waits for a reply."""
        self._is_closed = True
        for connection in tuple(self.open):
            connection.fail(Lost("the client was closed"))
        if self.open:
            self._ended = self.loop.create_future()
            await self._ended

    def opened(self, connection: Connection) -> None:
        """The connection has been made."""
        self.open.add(connection)
        self._keep_sweeping()

    def forget(self, connection: Connection) -> None:
        """The connection has ended."""
        self.open.discard(connection)
        if self._ended is not None and not self.open and not self._ended.done():
            self._ended.set_result(None)
        if not connection.is_busy and connection in self._idle.get(connection.origin, ()):
            self._idle[connection.origin].remove(connection)

    def _keep_sweeping(self) -> None:
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now = self.loop.time()
        for limit, rounds in self._connecting.items():
            self._connecting[limit] = rounds - 1
            if not rounds:
                limit.reschedule(now)
        for connection in tuple(self.open):
            if connection.is_busy and connection.deadline <= now and not connection.is_complete:
                connection.fail(TimedOut("no answer in time"))
        # One that was just made is neither busy nor idle: who asked for it has not seen it yet.
        for connections in self._idle.values():
            for connection in tuple(connections):
                if connection.idle_since + KEEPALIVE_S <= now:
                    connection.transport.close()
        self._idle = {origin: connections for origin, connections in self._idle.items() if connections}
        self._sweeping = None
        if self.open or self._connecting:
            self._keep_sweeping()

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    async def _connected(self, origin: Origin) -> socket.socket:
        """Raises OSError."""
        now = self.loop.time()
        until, asked = self._addresses.get(origin, (now, None))
        if until <= now or asked is None:
            self._addresses = {known: entry for known, entry in self._addresses.items() if entry[0] > now}
            asked = self.loop.create_task(self._look_up(origin))
            self._addresses[origin] = now + ADDRESSES_S, asked
        # All that connect at once share one look-up, which goes on if one of them is cancelled.
        addresses = await asyncio.shield(asked)
        if len(addresses) == 1:
            return await self._connected_to(addresses[0])
        addresses.append(addresses.pop(0))  # the next connection begins with another address
        return await self._first_connected(addresses[-1:] + addresses[:-1])

    async def _look_up(self, origin: Origin) -> list[Any]:
        addresses = list(await self.loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM))
        if self._may_connect is None:
            return addresses
        if allowed := [address for address in addresses if self._may_connect(str(address[4][0]))]:
            return allowed
        raise PermissionError("none of its addresses may be connected to")

    async def _first_connected(self, addresses: Sequence[Any]) -> socket.socket:
        """The first address that connects; each gets a head start before the next."""
        rest = list(addresses)
        trying = set[asyncio.Task[socket.socket]]()
        try:
            while True:
                if rest:
                    trying.add(self.loop.create_task(self._connected_to(rest.pop(0))))
                done, _ = await asyncio.wait(
                    trying, timeout=NEXT_ADDRESS_S if rest else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    trying.discard(task)
                    if task.exception() is None or not (rest or trying):
                        return task.result()
        finally:
            for task in trying:
                task.cancel()
                task.add_done_callback(_close_socket)

    async def _connected_to(self, address: Any) -> socket.socket:
        family, kind, protocol, _, place = address
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            # TCP keepalive detects an engine that vanished during a long generation.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            await self.loop.sock_connect(sock, place)
        except BaseException:
            sock.close()
            raise
        return sock


def _close_socket(task: asyncio.Task[socket.socket]) -> None:
    """It connected although another address was first."""
    with contextlib.suppress(OSError, asyncio.CancelledError):
        task.result().close()
