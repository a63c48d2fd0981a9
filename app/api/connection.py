"""Limits connections below the application: request heads that are slow or too large, and replies left unread.

uvicorn's own protocol has no limits on a request head. It also treats trailers as headers, and the body of a request
for an upgrade as the next request; and where a proxy's header replaces the peer's address, it loses the real one, which
authorisation needs (`limits.PEER`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from typing import Protocol, cast

import msgspec
from httptools import HttpParserUpgrade, HttpRequestParser
from starlette.types import Receive, Scope, Send
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.api.limits import BODY_S, CONNECTION, IDLE_BYTES, IDLE_S, MAX_HEADER_BYTES, MAX_TARGET_BYTES, PEER
from app.errors import AppError, HeadersTooLarge, Overloaded, RequestTimeout
from app.process import PROBES, Capacity, ConnectionLimit
from app.upstream.headers import Headers

HEAD_S = 30.0
"""Timeout of a request head."""

HEAD_BYTES = 2 * (MAX_HEADER_BYTES + MAX_TARGET_BYTES)
"""A head larger than this is refused before it is complete; authorisation refuses smaller ones that are too large. It
also limits input that is dropped: trailers, and text between the chunks of a body."""

STALLED_S = 3600.0
"""How long a client may leave a reply unread. A trainer may do other work between two rows of an export."""

SCARCE_S = 2.0
"""Timeout of a head if few file descriptors are left."""

LINGER_S = 1.0
"""How long the input of a client is still read whose head was refused: closing at once could destroy the error reply
before it is read. The rest of a refused body is read as long as it comes as a body must (`_drop_rest`)."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept. A client that keeps it longer may use a closed connection: the SDKs close
theirs after 5 s, other clients after 15 to 60, proxies after 60."""

UVICORNS_KEEP_ALIVE_S = 5
"""uvicorn's default. A client's pool that keeps connections equally long would use closed ones."""

_WATCHED = getattr(select, "POLLRDHUP", select.POLLIN)
"""What tells the end of a connection although bytes before it are unread: macOS adds POLLHUP to POLLIN."""

_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_LAST_DATA_RECV = 52
"""Offset of `tcpi_last_data_recv`, in ms, in Linux's `struct tcp_info`."""

_FRAMING = (b"content-length", b"transfer-encoding")

DROPPED_BODIES = 2
"""How many of the largest bodies a refused one may be as large as, so that a body that is a little too large for the
limit reads its 413."""


class OnDelivery(Protocol):
    """Learns whether a reply was handed to the kernel. None, after True: it may not have been read, since the
    connection was reset before its next request, or cut off because its client had stopped reading."""

    def __call__(self, *, delivered: bool | None) -> None: ...


class _ClosedAfterBody:
    """The transport of a request whose connection ends with the reply, which may be sent before the body has come. An
    error whose own headers end it, since the body does not come in time, ends it at once."""

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_after_body(self._cycle)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limit` says whether there is a file descriptor for it, `max_body` limits a body in bytes."""

    limit: ConnectionLimit | None = None
    max_body = 64 << 20
    _capacity: Capacity = "free"

    _in_head = False
    _is_refused = False
    _has_body_left = False
    _closes_after_body = False
    _dropped = _dropped_before = 0
    _drop_until = 0.0
    _unused_bytes = 0
    _upgrade_at: int | None = None
    _is_replacing_parser = False
    _timeout: asyncio.TimerHandle | None = None
    _stall_timeout: asyncio.TimerHandle | None = None

    is_lost = False
    """The connection has ended."""

    _on_delivery: OnDelivery | None = None
    _is_handed_over = False
    _is_cut_off = False
    _poll: select.poll | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if self.limit is not None:
            self.limit.connections += 1
            self._capacity = self.limit.capacity(transport.get_extra_info("socket").fileno())
        if self.limit is not None and self._capacity != "free":
            self._timeout = self.loop.call_later(SCARCE_S, self.reject)
            self.limit.wait(self)
        else:
            self._timeout = self.loop.call_later(HEAD_S, self._timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.limit is not None:
            self.limit.connections -= 1
            self.limit.stop_waiting(self)
        self._cancel_timeout()
        self._cancel_stall_timeout()
        self.is_lost = True
        on_delivery = self._on_delivery
        has_unsent = exc is not None and self.flow.write_paused and not self._is_handed_over
        self._settle(delivered=not has_unsent)
        if on_delivery is not None and not has_unsent and (exc is not None or self._is_cut_off):
            on_delivery(delivered=None)
        super().connection_lost(exc)

    def when_handed_over(self, on_delivery: OnDelivery) -> None:
        """Call `on_delivery` once it is known whether all that was written was handed to the kernel.

        Call this right after a reply's last part was sent. If the kernel has not taken it at once, it is known when the
        client sends its next request, or when the connection ends: in order, or with an error. Until then an error also
        says that the client may not have read what the kernel took.
        """
        if self.is_lost:
            on_delivery(delivered=False)
            return
        if self._on_delivery is not None:
            self._settle(delivered=True)
        self._on_delivery = on_delivery
        self._is_handed_over = not self.transport.get_write_buffer_size()
        if self._is_handed_over:
            on_delivery(delivered=True)

    def is_gone(self) -> bool:
        """Has the client ended the connection? The end may lie in the socket behind bytes that are not read yet, as
        after a freeze. A client that has ended only its sending counts as gone, as uvicorn closes its connection."""
        if self.is_lost:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.transport.get_extra_info("socket").fileno(), _WATCHED)
        return any(event & _ENDED for _, event in self._poll.poll(0))

    def data_age_s(self) -> float | None:
        """How long ago the client's last byte came; None if the kernel does not tell: a Unix socket, macOS."""
        if self.is_lost or _TCP_INFO is None:
            return None
        try:
            info = self.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, _TCP_INFO, _LAST_DATA_RECV + 4
            )
        except OSError:
            return None
        age_ms: int = struct.unpack_from("=I", info, _LAST_DATA_RECV)[0]
        return age_ms / 1000

    def drop(self) -> None:
        """Close the connection at once, without what the client has not read."""
        self._is_cut_off = True
        self.transport.abort()

    def _settle(self, *, delivered: bool) -> None:
        on_delivery, self._on_delivery = self._on_delivery, None
        if on_delivery is not None and not (delivered and self._is_handed_over):
            on_delivery(delivered=delivered)

    def take_body(self, scope: Scope, most: int) -> bytes | None:
        """The request's body if it has come whole and has at most `most` bytes; else None, and `receive` gives it."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or len(cycle.body) > most:
            return None
        if cycle.scope["state"] is not scope["state"]:  # a later request of the same connection
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self.flow.resume_reading()
        return body

    def answer(self, send: Send, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole reply in place of `send` if nothing stands in its way; else False, and `send` is to send it.

        uvicorn looks through each header, and writes head and body apart: a system call and a packet more.
        """
        cycle = self.cycle
        if send != cycle.send:  # It is a middleware's, or that of an earlier request of the connection.
            return False
        if cycle.response_started or cycle.disconnected or cycle.access_log or not cycle.keep_alive:
            return False
        text = "".join([f"{name}: {value}\r\n" for name, value in headers])
        # What is no text, as a line break in a value, uvicorn refuses.
        if self.flow.write_paused or text.count("\r\n") != len(headers) or not text.replace("\r\n", "").isprintable():
            return False
        head = [STATUS_LINE[status], *(b"%b: %b\r\n" % header for header in cycle.default_headers)]
        self.transport.write(b"".join((*head, text.encode("latin-1"), b"content-length: %d\r\n\r\n" % len(body), body)))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        cycle.on_response()
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused and not self._has_body_left:
            return
        self._unused_bytes += len(data)
        super().data_received(data)
        while self._upgrade_at is not None:
            data = self._replace_parser() + data[self._upgrade_at :]
            self._upgrade_at = None
            super().data_received(data)
        if self._unused_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadersTooLarge(f"the request line and headers have more than {HEAD_BYTES} bytes"))
            return
        if self._timeout is None and not self.transport.is_closing():
            if not self._in_head and self.cycle is not None and not self.cycle.response_complete:
                return  # the usual case: a request is being answered
            self._timeout = self.loop.call_later(HEAD_S, self._timed_out)

    def _should_upgrade(self) -> bool:
        """False: a request for a WebSocket, or for HTTP/2 as from Java's client, is answered in HTTP/1.1."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """The parser found a request for an upgrade, and will not parse what follows its head as HTTP."""
        error = sys.exception()
        assert isinstance(error, HttpParserUpgrade)
        (self._upgrade_at,) = error.args

    def _replace_parser(self) -> bytes:
        """Replace the parser after a request for an upgrade. Returns a head for the new one, which frames the body."""
        framing = [name + b": " + value + b"\r\n" for name, value in self.scope["headers"] if name in _FRAMING]
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_replacing_parser = True
        return b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"])

    def on_message_begin(self) -> None:
        if self._is_replacing_parser:
            return
        super().on_message_begin()
        if self._is_handed_over:
            self._on_delivery = None  # It has been told.
        elif self._on_delivery is not None:
            self._settle(delivered=True)
        state = self.scope["state"]
        state[PEER] = self.client
        state[CONNECTION] = self
        self._in_head = True
        self._unused_bytes = 0

    def on_headers_complete(self) -> None:
        if self._is_replacing_parser:
            self._is_replacing_parser = False
            return
        if self._is_refused:
            return
        self._has_body_left = True
        if self.limit is not None and self._capacity != "free":
            self.limit.stop_waiting(self)
            if self.parser.get_method() not in (b"GET", b"HEAD") or self.url.partition(b"?")[0] not in PROBES:
                self.reject()
                return
        self._in_head = False
        if self._timeout is not None:
            self._cancel_timeout()
        super().on_headers_complete()
        # Trailers would be added to the headers, although no proxy has checked them.
        self.headers = []
        if self._capacity != "free":
            self.cycle.keep_alive = False
        if not self.cycle.keep_alive:
            self.cycle.transport = cast(asyncio.Transport, _ClosedAfterBody(self, self.cycle))

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        if not self._is_refused:
            super().on_body(body)
        if self._is_refused or self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > DROPPED_BODIES * self.max_body:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._unused_bytes = 0
        if self.parser.should_upgrade():
            return
        self._has_body_left = False
        if self._is_refused or self._closes_after_body:
            self.transport.close()
            return
        if self.cycle.response_complete:
            self._cancel_timeout()  # That of the rest of the body.
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_body_left and self.cycle.response_complete and not self.transport.is_closing():
            self._drop_rest()

    def close_after_body(self, cycle: RequestResponseCycle) -> None:
        """The cycle's reply ends the connection, once the rest of its request has come or failed to come."""
        if self._has_body_left and cycle.response_complete and cycle is self.cycle:
            self._closes_after_body = True
        else:
            self.transport.close()

    def _drop_rest(self) -> None:
        """Read and drop the rest of a body that was answered before its end: if it were left unread, closing would
        reset the connection, and a client that still sends would not see its answer. It must come as a body must."""
        self._cancel_timeout()
        self._unset_keepalive_if_required()
        self._dropped = self._dropped_before = 0
        self._drop_until = self.loop.time() + BODY_S
        self._timeout = self.loop.call_later(IDLE_S, self._check_rest)

    def _check_rest(self) -> None:
        self._timeout = None
        if self.transport.is_closing():
            return
        if self._dropped - self._dropped_before < IDLE_BYTES or self.loop.time() >= self._drop_until:
            self.transport.close()
        else:
            self._dropped_before = self._dropped
            self._timeout = self.loop.call_later(IDLE_S, self._check_rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timeout = self.loop.call_later(STALLED_S, self.drop)

    def resume_writing(self) -> None:
        self._cancel_stall_timeout()
        super().resume_writing()

    def _is_idle(self) -> bool:
        """Is no request being answered?"""
        return self.cycle is None or self.cycle.response_complete

    def _timed_out(self) -> None:
        self._timeout = None
        if self.transport.is_closing():
            return
        if not self._is_idle():
            self._timeout = self.loop.call_later(HEAD_S, self._timed_out)
        elif self._in_head:
            self._refuse(RequestTimeout(f"the request line and headers did not arrive within {HEAD_S:g} s"))
        else:
            self.transport.close()

    def reject(self) -> None:
        """Refuse the connection for lack of file descriptors; a retry may find one."""
        assert self.limit is not None
        self.limit.stop_waiting(self)
        if self._is_refused or self.transport.is_closing():
            return
        has_begun = self._in_head
        self._in_head = True
        self._refuse(Overloaded(self.limit.refuse()))
        if self._capacity == "none" or not has_begun:
            self.transport.close()

    def _refuse(self, error: AppError) -> None:
        """Send an error without the application and close. If a reply is being sent, only close."""
        self._is_refused = True
        self._cancel_timeout()
        if not (self._in_head and self._is_idle()):
            self.transport.close()
            return
        body = msgspec.json.encode(error.body())
        headers = {"content-type": "application/json", **error.headers(), "content-length": str(len(body))}
        own = [(name.encode(), value.encode()) for name, value in headers.items()]
        lines = [name + b": " + value + b"\r\n" for name, value in [*self.server_state.default_headers, *own]]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"connection: close\r\n\r\n", body]))
        self._in_head = False
        if self._has_body_left:
            self._drop_rest()
        else:
            self._timeout = self.loop.call_later(LINGER_S, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _cancel_stall_timeout(self) -> None:
        if self._stall_timeout is not None:
            self._stall_timeout.cancel()
            self._stall_timeout = None


def bound_connections(receive: Receive, limit: ConnectionLimit, max_body: int) -> None:
    """Make uvicorn use BoundedProtocol and KEEP_ALIVE_S, unless the operator chose otherwise.

    uvicorn chooses its protocol class before it loads the application, and reads the choice for each new connection.
    `receive` is the lifespan's.
    """
    lifespan = getattr(receive, "__self__", None)
    if isinstance(lifespan, LifespanOn) and lifespan.config.http_protocol_class is HttpToolsProtocol:
        members = {"limit": limit, "max_body": max_body}
        lifespan.config.http_protocol_class = type("TurnlogProtocol", (BoundedProtocol,), members)
        if lifespan.config.timeout_keep_alive == UVICORNS_KEEP_ALIVE_S:
            lifespan.config.timeout_keep_alive = KEEP_ALIVE_S
