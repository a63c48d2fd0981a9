"""Server processes of one keeper hand each other connections, so that a session's turns meet a process that knows it.

    client ──▶ any process: reads the first bytes of a request, which name the session
                   └─▶ the session's process (by a hash of the id): gets the socket and these bytes, and answers

Any process can serve any session: where the other one does not take the connection at once, the request is answered
where it is. The kernel moves the socket (`SCM_RIGHTS`), so the client and its address stay the same.

Each process listens at an abstract Unix socket, which exists as long as the process, and talks to processes of its own
user only. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import socket
import struct
import zlib
from collections.abc import Callable

from app.api.connection import BoundedProtocol
from app.api.header_sessions import HARNESSES

MAX_MESSAGE_BYTES = 64 << 10
"""A longer beginning of a request is passed as a file in memory."""

MAX_WAITING = 128
"""Connections of other processes that may wait to be accepted; there is one for each process."""

_IN_PATH = re.compile(rb"POST /sessions/([^/? ]{1,384})/v1/")
_BY_HEADER = re.compile(rb"POST /v1/")
_HEADER = re.compile(
    rb"\r\n(?:%s):[ \t]*([^\r\n]+)" % b"|".join(harness.session.encode() for harness in HARNESSES), re.IGNORECASE
)
_HEAD_END = b"\r\n\r\n"
_CREDENTIALS = struct.Struct("3i")

Adopt = Callable[[socket.socket, bytes], None]
"""Serves a connection whose first bytes were read already."""


def session_named_in(data: bytes) -> bytes | None:
    """The session of a turn whose request begins with `data`, as the client spells it."""
    if found := _IN_PATH.match(data):
        return found[1]
    if _BY_HEADER.match(data) and (found := _HEADER.search(data, 0, max(data.find(_HEAD_END), 0))):
        return found[1]
    return None


class Handover:
    """The process in `place` of `places`; `name` is the same for all of them and no others."""

    def __init__(self, name: str, place: int, places: int, adopt: Adopt) -> None:
        self.given = self.taken = 0
        self._name = name
        self._place = place
        self._places = places
        self._adopt = adopt
        self._to: dict[int, socket.socket] = {}
        self._from: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)

    def start(self) -> None:
        """Listen. Called in the event loop; raises OSError."""
        self._listener.bind(self._address(self._place))
        self._listener.listen(MAX_WAITING)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Take what was handed over already, and nothing more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        with contextlib.suppress(BlockingIOError):
            while True:
                self._accept()
        for one in tuple(self._from):
            self._take_all(one)
        for one in self._from:
            loop.remove_reader(one.fileno())
            one.close()
        for one in (self._listener, *self._to.values()):
            one.close()

    def owner(self, data: bytes) -> int | None:
        """The other process that should answer a request that begins with `data`; None: this one."""
        session = session_named_in(data)
        place = self._place if session is None else zlib.crc32(session) % self._places
        return None if place == self._place else place

    def give(self, place: int, descriptor: int, data: bytes) -> bool:
        """Hand a connection over. False: the other process does not run or is busy."""
        long = self._in_memory(data) if len(data) > MAX_MESSAGE_BYTES else None
        passed = [descriptor] if long is None else [descriptor, long]
        try:
            if not self._send(place, data if long is None else b"", passed):
                return False
        finally:
            if long is not None:
                os.close(long)
        self.given += 1
        return True

    def _address(self, place: int) -> str:
        return f"\0{self._name}-{place}"

    @staticmethod
    def _in_memory(data: bytes) -> int:
        descriptor = os.memfd_create("turnlog-request")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        return descriptor

    def _send(self, place: int, data: bytes, passed: list[int]) -> bool:
        """A process that was replaced meanwhile has left a broken connection behind: connect once more."""
        for _ in range(2):
            try:
                one = self._to.get(place) or self._connect(place)
                # An empty message would read as the end of the connection.
                socket.send_fds(one, [data or b"\n"], passed)
            except BlockingIOError:
                return False
            except OSError:
                if (broken := self._to.pop(place, None)) is None:
                    return False
                broken.close()
            else:
                return True
        return False

    def _connect(self, place: int) -> socket.socket:
        """Raises OSError."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        try:
            made.connect(self._address(place))
            _require_own(made)
        except OSError:
            made.close()
            raise
        self._to[place] = made
        return made

    def _accept(self) -> None:
        made, _ = self._listener.accept()
        try:
            _require_own(made)
        except PermissionError:
            made.close()
            return
        made.setblocking(False)
        self._from.add(made)
        asyncio.get_running_loop().add_reader(made.fileno(), self._take_all, made)

    def _take_all(self, one: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._take(one):
                pass

    def _take(self, one: socket.socket) -> bool:
        """False at the connection's end. Raises BlockingIOError."""
        try:
            data, passed, _, _ = socket.recv_fds(one, MAX_MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data, passed = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(one.fileno())
            self._from.discard(one)
            one.close()
            return False
        if len(passed) == 2:
            with open(passed[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                data = bytes(mapped)
        if passed:  # none where this process has no descriptor left
            self.taken += 1
            self._adopt(socket.socket(fileno=passed[0]), data)
        return True


def _require_own(one: socket.socket) -> None:
    """Raises PermissionError if the other end is another user's process."""
    _, user, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError("the other end belongs to another user")


class HandoverProtocol(BoundedProtocol):
    """A connection that is handed over between two of its requests. `first` was read before it came here."""

    handover: Handover | None = None
    first = b""

    _is_between_requests = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        first, self.first = self.first, b""
        if first:
            super().data_received(first)

    def data_received(self, data: bytes) -> None:
        if not (self._is_between_requests and self._is_idle() and self._hand_over(data)):
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._is_between_requests = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_between_requests = True
        super().on_message_complete()

    def _hand_over(self, data: bytes) -> bool:
        """Hand the connection over if another process has the session, and no byte of a reply is still to be sent."""
        if self.handover is None or self._is_refused or self._capacity != "free" or self.transport.is_closing():
            return False
        place = self.handover.owner(data)
        if place is None or self.transport.get_write_buffer_size():
            return False
        transport = self.transport
        transport.pause_reading()
        if not self.handover.give(place, transport.get_extra_info("socket").fileno(), data):
            transport.resume_reading()
            return False
        transport.abort()  # closes this process's descriptor only
        return True
