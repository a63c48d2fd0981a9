"""An engine whose replies are sound and whose connections are not: what lies between them and Turnlog is bytes.

A request's `user` names what is done with the reply that a simulator made: an entry of WAYS.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx

PIECES = 20
ENDLESS_S = 60.0
"""As good as for ever: the server gives up long before, and what is sent then fails."""

TOO_LARGE = 50_000_000


class Connection(socketserver.StreamRequestHandler):
    """Reads requests one after the other; a way may end the connection."""

    server: RawEngine
    before: bytes | None = None
    """The reply before this one."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self._one():
                pass

    def _one(self) -> bool:
        start = self.rfile.readline()
        if not start:
            return False
        headers: dict[str, str] = {}
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if not body:
            self.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return True
        asked = json.loads(body)
        way = WAYS[asked.get("user", "plain")]
        reply = self.server.generate(start.split()[1].decode(), body, headers["x-smg-routing-key"])
        goes_on, self.before = way(self, reply), reply
        return goes_on

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.request.sendall(piece)

    def send_and_close(self, data: bytes) -> bool:
        """The end of the connection comes with the last byte: no request can be sent between the two."""
        self.request.sendall(data, getattr(socket, "MSG_MORE", 0))
        self.request.shutdown(socket.SHUT_WR)
        return False

    def reset(self) -> bool:
        """End the connection as a process does that dies with data unread: RST instead of FIN."""
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.request.close()
        return False

    def drip(self, data: bytes, seconds: float) -> None:
        size = -(-len(data) // PIECES)
        for at in range(0, len(data), size):
            self.send(data[at : at + size])
            time.sleep(seconds / PIECES)


class RawEngine(socketserver.ThreadingTCPServer):
    """In threads of this process, before a simulator that makes the replies."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, simulator: str) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}"
        self.generated: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = httpx.Client(base_url=simulator, timeout=60)

    def server_close(self) -> None:
        super().server_close()
        self._http.close()

    def generate(self, path: str, body: bytes, session_id: str) -> bytes:
        with self._lock:
            self.generated[session_id] += 1
        headers = {"content-type": "application/json", "x-smg-routing-key": session_id}
        response = self._http.post(path, content=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.content


@contextlib.contextmanager
def raw_engine(simulator: str) -> Iterator[RawEngine]:
    with RawEngine(simulator) as engine:
        thread = threading.Thread(target=engine.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()


def _head(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", "Content-Type: application/json", *headers, "", "")).encode("latin-1")


def _sized(reply: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return _head(status, f"Content-Length: {len(reply)}", *headers) + reply


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


CHUNKED = _head("200 OK", "Transfer-Encoding: chunked")

Way = Callable[[Connection, bytes], bool]
"""Sends a reply in its way. May the connection be used again?"""


def plain(connection: Connection, reply: bytes) -> bool:
    connection.send(_sized(reply))
    return True


def drips(connection: Connection, reply: bytes) -> bool:
    connection.drip(_sized(reply), 0.5)
    return True


def sends_more(connection: Connection, reply: bytes) -> bool:
    connection.send(_sized(reply) + b'{"more": 1}' * 100)
    return True


def sends_two_replies(connection: Connection, reply: bytes) -> bool:
    connection.send(_sized(reply) * 2)
    return True


def sends_another_later(connection: Connection, reply: bytes) -> bool:
    """A reply that nobody asked for, while the connection is idle."""
    connection.send(_sized(reply))
    time.sleep(0.1)
    connection.send(_sized(reply))
    return True


def _unnamed(reply: bytes) -> bytes:
    return json.dumps({name: value for name, value in json.loads(reply).items() if name != "id"}).encode()


def the_last_without_id(connection: Connection, reply: bytes) -> bool:
    """The reply to the request before, once more, and then its own; neither says whose it is."""
    connection.send(_sized(_unnamed(connection.before or reply)), _sized(_unnamed(reply)))
    return True


def resets_in_body(connection: Connection, reply: bytes) -> bool:
    connection.send(_sized(reply)[: -len(reply) // 2])
    time.sleep(0.05)
    return connection.reset()


def sends_much(connection: Connection, reply: bytes) -> bool:
    connection.send(CHUNKED)
    for _ in range(TOO_LARGE // 100_000):
        connection.send(_chunk(b" " * 100_000))
    return False


def falls_silent(connection: Connection, reply: bytes) -> bool:
    connection.send(_sized(reply)[:-10])
    time.sleep(ENDLESS_S)
    return False


def speaks_no_http(connection: Connection, reply: bytes) -> bool:
    connection.send(b"\x00\xff SSH-2.0-engine\r\n" + reply)
    return False


def _status(status: str, *headers: str) -> Way:
    def way(connection: Connection, reply: bytes) -> bool:
        return connection.send_and_close(_sized(reply, *headers, status=status))

    return way


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(plain, drips, sends_more, sends_two_replies, sends_another_later, the_last_without_id),
        *(resets_in_body, sends_much, falls_silent, speaks_no_http),
    )
}
WAYS |= {
    "redirects": _status("302 Elsewhere", "Location: http://127.0.0.1:9/elsewhere"),
    **{f"says_{code}": _status(f"{code} Odd") for code in (204, 599)},
}
"""`unit/test_engine_http.py` has every way in which a reply is framed or cut; these are of each kind one or two."""

MUST_SUCCEED = frozenset(way.__name__ for way in (plain, drips))

SOUND = MUST_SUCCEED | {"sends_more", "sends_two_replies", "sends_another_later"}
"""A whole reply is in them: the turn may be committed, and where it is the client has this reply."""
