"""Bounds on a connection that no application sees: a head that never ends, and a client that no longer reads.

uvicorn's own protocol waits for a head as long as it takes, and takes all that comes. It takes trailers for headers,
and the body of a request that asks for an upgrade for the next request. It also forgets who is at the other end where
a proxy's header says something else, which the guard must know (`limits.PEER`).
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.types import Receive
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.api.connection_limit import KEPT_FOR, Capacity, ConnectionLimit
from app.api.limits import MAX_HEADER_BYTES, MAX_TARGET_BYTES, PEER
from app.api.replies import error_parts
from app.errors import AppError, HeadersTooLarge, Overloaded, RequestTimeout

HEAD_S = 30.0
"""How long a head may take, or the rest of a body whose request was answered before it was whole."""

HEAD_BYTES = 2 * (MAX_HEADER_BYTES + MAX_TARGET_BYTES)
"""Past this a head is not even waited for; what is below it and still too large is the guard's to refuse. As much may
come of what nobody gets: trailers, and what stands between the chunks of a body."""

STALLED_S = 3600.0
"""How long a client may leave a reply unread; a trainer may do something else between two rows of an export."""

SCARCE_S = 2.0
"""How long a head may take where few descriptors are left."""

LINGER_S = 1.0
"""What a refused client still sends is read for so long, or its end would throw the refusal away."""

KEEP_ALIVE_S = 75
"""How long a connection is kept that nobody uses. A client that keeps it for longer sends into the void: the SDKs let
go of theirs after 5 s, others after 15 to 60, proxies after 60."""

UVICORNS_KEEP_ALIVE_S = 5
"""uvicorn's own default, with which a pool that keeps connections for as long meets closed ones."""

_FRAMING = (b"content-length", b"transfer-encoding")


class BoundedProtocol(HttpToolsProtocol):
    """One connection; `doorway` says whether there is room for it."""

    doorway: ConnectionLimit | None = None
    _room: Capacity = "free"

    _in_head = False
    _is_refused = False
    _unused_bytes = 0
    _upgrade_at: int | None = None
    _is_reading_on = False
    _alarm: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if self.doorway is not None:
            self.doorway.connections += 1
            self._room = self.doorway.room(transport.get_extra_info("socket").fileno())
        if self.doorway is not None and self._room != "free":
            self._alarm = self.loop.call_later(SCARCE_S, self.turn_away)
            self.doorway.wait(self)
        else:
            self._alarm = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.doorway is not None:
            self.doorway.connections -= 1
            self.doorway.wait_no_more(self)
        self._calm()
        self._unstall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unused_bytes += len(data)
        super().data_received(data)
        while self._upgrade_at is not None:
            data = self._read_on() + data[self._upgrade_at :]
            self._upgrade_at = None
            super().data_received(data)
        if self._unused_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadersTooLarge(f"the head of the request has more than {HEAD_BYTES} bytes"))
            return
        if self._alarm is None and (self._in_head or self._is_idle()) and not self.transport.is_closing():
            self._alarm = self.loop.call_later(HEAD_S, self._give_up)

    def _should_upgrade(self) -> bool:
        """Who asks for a WebSocket, or for HTTP/2 as Java's client does, is answered in HTTP/1.1."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """The parser has met a request of that kind, and takes what follows its head for another protocol's."""
        met = sys.exception()
        assert isinstance(met, HttpParserUpgrade)
        (self._upgrade_at,) = met.args

    def _read_on(self) -> bytes:
        """Its body comes now, or the next request: for another parser, which is told of the body alone."""
        framing = [name + b": " + value + b"\r\n" for name, value in self.headers if name in _FRAMING]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_reading_on = True
        return b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"])

    def on_message_begin(self) -> None:
        if self._is_reading_on:
            return
        super().on_message_begin()
        self.scope["state"][PEER] = self.client
        self._in_head = True
        self._unused_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """uvicorn would take a trailer for a header, and pass off as one what a proxy has not looked at."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_reading_on:
            self._is_reading_on = False
            return
        if self._is_refused:
            return
        if self.doorway is not None and self._room != "free":
            self.doorway.wait_no_more(self)
            if self.parser.get_method() not in (b"GET", b"HEAD") or self.url.partition(b"?")[0] not in KEPT_FOR:
                self.turn_away()
                return
        self._in_head = False
        self._calm()
        super().on_headers_complete()
        if self._room != "free":
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused_bytes = 0
        if not self.parser.should_upgrade() and not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def _is_idle(self) -> bool:
        """No request is being answered: what comes is a head, or nothing that anybody waits for."""
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        self._alarm = None
        if self.transport.is_closing():
            return
        if not self._is_idle():
            self._alarm = self.loop.call_later(HEAD_S, self._give_up)
        elif self._in_head:
            self._refuse(RequestTimeout(f"the head of the request did not come in {HEAD_S:g} s"))
        else:
            self.transport.close()

    def turn_away(self) -> None:
        """There is no descriptor for this connection; whoever comes again may find one."""
        assert self.doorway is not None
        self.doorway.wait_no_more(self)
        if self._is_refused or self.transport.is_closing():
            return
        has_sent = self._in_head
        self._in_head = True
        self._refuse(Overloaded(self.doorway.refuse()))
        if self._room == "none" or not has_sent:
            self.transport.close()

    def _refuse(self, error: AppError) -> None:
        """Answer a head without the application, and hang up; a reply that is being sent ends there."""
        self._is_refused = True
        self._calm()
        if not (self._in_head and self._is_idle()):
            self.transport.close()
            return
        status, headers, body = error_parts(error)
        own = [(name.encode(), value.encode()) for name, value in [*headers, ("content-length", str(len(body)))]]
        lines = [name + b": " + value + b"\r\n" for name, value in [*self.server_state.default_headers, *own]]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"connection: close\r\n\r\n", body]))
        self._alarm = self.loop.call_later(LINGER_S, self.transport.close)

    def _calm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _unstall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def bound_connections(receive: Receive, doorway: ConnectionLimit) -> None:
    """Have uvicorn use it, and keep connections for long, where an operator has not chosen otherwise.

    uvicorn chooses its class before it loads an application, and looks at the choice again for each connection.
    `receive` is that of the lifespan.
    """
    lifespan = getattr(receive, "__self__", None)
    if isinstance(lifespan, LifespanOn) and lifespan.config.http_protocol_class is HttpToolsProtocol:
        lifespan.config.http_protocol_class = type("TurnlogProtocol", (BoundedProtocol,), {"doorway": doorway})
        if lifespan.config.timeout_keep_alive == UVICORNS_KEEP_ALIVE_S:
            lifespan.config.timeout_keep_alive = KEEP_ALIVE_S
