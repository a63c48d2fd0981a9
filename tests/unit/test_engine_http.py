"""The client to engines, against engines that send bytes as they please."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.upstream import http
from app.upstream.client import (
    ONCE,
    SLICE,
    STREAM_BURST_S,
    STREAM_SHARE,
    EngineClient,
    EngineReply,
    Pace,
    TooLarge,
    Unreadable,
    Withheld,
)
from app.upstream.http import Lost, NotSent, TimedOut

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\n"
SOUND = OK + b"content-length: 2\r\n\r\n{}"
OTHER = OK + b"content-length: 3\r\n\r\n[2]"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
LARGE = bytes(64 << 20)
Way = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """Reads requests; sends the next of `replies` to each, or whatever `way` does. Notes the bytes of all requests.

    It has its own client, which waits 20 s for a reply unless a test makes it wait for less.
    """

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.closes = False
        self.way: Way | None = None
        self.asked: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.ended = asyncio.Event()
        self.url = ""
        self.client = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 24)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            if self.way is not None:
                await self.way(reader, writer)
            while self.replies and await self.read(reader):
                writer.write(self.replies.pop(0))
            if not self.closes:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.set()

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        sizes = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        self.asked.append(head + await reader.readexactly(sizes[0] if sizes else 0))
        return head

    async def post(self, *replies: bytes, body: bytes = b"{}", **more: Any) -> EngineReply:
        """The reply to a request, after which `replies` are what is left to send."""
        self.replies += replies
        headers, grow = more.pop("headers", []), more.pop("grow", lambda size: None)
        return await self.client.post(self.url + PATH, body, headers, grow, **more)

    async def said(self, *replies: bytes, **more: Any) -> bytes:
        return (await self.post(*replies, **more)).body.joined()

    async def get(self, path: str = "/health", url: str = "") -> EngineReply:
        return await self.client.get((url or self.url) + path, [])


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Servers run on uvloop where it is installed; their transports differ where a connection ends."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    await made.client.close()
    server.close()
    for writer in made.connections:
        writer.close()
    await rounds(5)


@pytest.fixture
async def impatient(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine, whose client waits a tenth of a second."""
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    await engine.client.close()
    engine.client = EngineClient(connect_timeout_s=0.05, timeout_s=0.1, max_bytes=1 << 20)
    return engine


async def rounds(count: int) -> None:
    """The event loop comes round so often."""
    for _ in range(count):
        await asyncio.sleep(0)


BODIES = {
    "sized": OK + b"content-length: 7\r\n\r\n[1,2,3]",
    "chunks": CHUNKED + b"3\r\n[1,\r\n4;x=y\r\n2,3]\r\n0\r\nx-trailer: 1\r\n\r\n",
    "until closed": OK + b"\r\n[1,2,3]",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n[1,2,3]",
    "after information": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK + b"\r\n[1,2,3]",
    "without a reason": b"HTTP/1.1 200\r\ncontent-length: 7\r\n\r\n[1,2,3]",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("step", [1, 1 << 20], ids=["byte by byte", "at once"])
async def test_a_body_is_read_however_it_is_framed(engine: Engine, name: str, step: int) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        for at in range(0, len(BODIES[name]), step):
            writer.write(BODIES[name][at : at + step])
            await writer.drain()
            await asyncio.sleep(0)

    engine.way, engine.closes = way, True
    reply = await engine.post()
    assert (reply.status, reply.body.joined()) == (200, b"[1,2,3]")
    assert "x-trailer" not in dict(reply.headers)


BROKEN = {
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a list of lengths": OK + b"content-length: 2, 2\r\n\r\n{}",
    "a signed length": OK + b"content-length: +2\r\n\r\n{}",
    "length and chunks": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks and length": OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size ends in LF": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a chunk's size is too large": CHUNKED + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "lines end in LF": b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}",
    "a folded header": OK + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
    "a space before the colon": OK + b"content-length : 2\r\n\r\n{}",
    "a NUL": OK + b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}",
    "a body of information": b"HTTP/1.1 104 X\r\ncontent-length: 2\r\n\r\n{}" + SOUND,
    "HTTP/2": b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "a status below 100": b"HTTP/1.1 000 X\r\ncontent-length: 0\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 X\r\ncontent-length: 0\r\n\r\n",
    "a space before the colon of chunks": CHUNKED.replace(b":", b" :") + b"2\r\n{}\r\n0\r\n\r\n",
    "folded chunks": CHUNKED.replace(b": ", b":\r\n ") + b"2\r\n{}\r\n0\r\n\r\n",
    "no length": OK + b"content-length:\r\n\r\n{}",
    "a length without end": OK + b"content-length: %b\r\n\r\n{}" % (b"9" * 40),
    "a chunk's extension ends in LF": CHUNKED + b"2;x\n{}\r\n0\r\n\r\n",
    "a chunk is longer than its size": CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n",
    "a chunk's size has a sign": CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n",
    "a chunk's size has a prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a length as a trailer": CHUNKED + b"2\r\n{}\r\n0\r\ncontent-length: 2\r\n\r\n",
    "another protocol": b"RTSP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "half a head": SOUND[:20],
    "half a body": SOUND[:-1],
    "half of the chunks": CHUNKED + b"2\r\n{}\r\n",
    "nothing": b"",
}
CODINGS = (b"gzip, chunked", b"chunked, gzip", b"gzip", b"chunked\r\ntransfer-encoding: chunked")
REFUSED = [
    *((reply, Lost) for reply in BROKEN.values()),
    *((CHUNKED.replace(b"chunked", coding) + b"2\r\n{}\r\n0\r\n\r\n", Unreadable) for coding in CODINGS),
]


@pytest.mark.parametrize(("reply", "error"), REFUSED, ids=[*BROKEN, *map(str, CODINGS)])
async def test_a_reply_that_is_not_whole_or_can_be_read_in_two_ways_is_none(
    engine: Engine, reply: bytes, error: type[Exception]
) -> None:
    engine.closes = True
    with pytest.raises(error):
        await engine.post(reply)


ENDLESS = {
    "information": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a head": (OK, b"x: y\r\n"),
    "a header": (OK + b"x: ", b"y"),
    "a chunk's extension": (CHUNKED + b"2;", b"x"),
    "extensions of chunks": (CHUNKED, b"1;%b\r\n{\r\n" % (b"x" * 1000)),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: y\r\n"),
}


@pytest.mark.parametrize(("first", "again"), ENDLESS.values(), ids=ENDLESS)
async def test_what_has_no_end_but_is_no_body_is_cut_off(engine: Engine, first: bytes, again: bytes) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(first)
        while True:
            writer.write(again * (4096 // len(again)))
            await writer.drain()

    engine.way = way
    with pytest.raises(Lost):
        await engine.post()
    await engine.ended.wait()


BEGUN = [b"", OK + b"x: ", CHUNKED + b"2;", OK + b"content-length: 99999\r\n\r\n", OK + b"\r\n"]


@pytest.mark.parametrize("drips", [True, False])
@pytest.mark.parametrize("first", BEGUN)
async def test_a_reply_that_drips_or_stops_is_late(impatient: Engine, first: bytes, drips: bool) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await impatient.read(reader)
        writer.write(first)
        while drips and not reader.at_eof():
            writer.write(b"x" if first else b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    impatient.way = way
    with pytest.raises(TimedOut):
        await impatient.post()


async def test_an_error_is_told_although_its_encoding_cannot_be_read(engine: Engine) -> None:
    reply = await engine.post(b"HTTP/1.1 503 X\r\nretry-after: 3\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    assert (reply.status, dict(reply.headers)["retry-after"]) == (503, "3")


async def test_a_connection_that_was_reset_ends_no_body(engine: Engine) -> None:
    """What has no length ends with its connection, but not with a reset."""

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(OK + b"\r\n{}")
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    engine.way, engine.closes = way, True
    with pytest.raises(Lost):
        await engine.post()


async def test_a_connection_is_used_again_for_one_request_at_a_time(engine: Engine) -> None:
    engine.replies = [SOUND] * 6
    for _ in range(3):
        await engine.post()
    assert len(engine.connections) == 1
    await asyncio.gather(engine.post(), engine.post())
    assert len(engine.connections) == 2


@pytest.mark.parametrize(
    ("reply", "headers", "body"),
    [
        (SOUND, [ONCE], b"{}"),
        (SOUND.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n"), [], b"{}"),
        (b"HTTP/1.0" + SOUND[8:], [], b"{}"),
        (SOUND + SOUND, [], b"{}"),
        (SOUND + b"HTTP/1.1 2", [], b"{}"),
        (SOUND + b'{"more": 1}', [], b"{}"),
        (b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nbytes", [], b""),
    ],
    ids=["once", "close", "HTTP/1.0", "two replies", "half of a second", "more", "another protocol"],
)
async def test_a_connection_is_not_used_again(
    engine: Engine, reply: bytes, headers: list[tuple[str, str]], body: bytes
) -> None:
    assert await engine.said(reply, headers=headers) == body
    assert await engine.said(OTHER) == b"[2]"
    assert len(engine.connections) == 2


async def test_what_comes_while_nobody_asks_is_nobodys(engine: Engine) -> None:
    """Whether the loop has read it already, or it still is with the kernel."""
    engine.replies = [SOUND] * 4
    for turns in (0, 20):
        await engine.post()
        engine.connections[-1].transport.write(OTHER)
        await rounds(turns)
        assert await engine.said() == b"{}"
    assert len(engine.connections) == 3


async def test_an_engine_that_speaks_first_is_not_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SOUND)

    async def slow(self: http.Connections, origin: http.Origin) -> socket.socket:
        sock = await original(self, origin)
        while not select.select([sock], [], [], 0)[0]:
            await asyncio.sleep(0)
        return sock

    engine.way, original = way, http.Connections._connected
    monkeypatch.setattr(http.Connections, "_connected", slow)
    with pytest.raises(NotSent):
        await engine.post(SOUND)
    assert engine.asked == []


async def test_a_get_is_repeated_if_the_engine_has_closed_its_connection_and_a_post_is_not(engine: Engine) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(SOUND)
        await engine.read(reader)

    engine.way, engine.closes = way, True
    assert (await engine.post()).status == 200
    with pytest.raises(Lost):
        await engine.post()
    assert [(await engine.get()).status for _ in range(2)] == [200, 200]
    assert (len(engine.asked), len(engine.connections)) == (5, 3)


async def test_idle_connections_are_not_used_for_long_and_closed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the timer ends with them."""
    await engine.post(SOUND)
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    engine.ended.clear()
    await engine.post(SOUND)
    assert len(engine.connections) == 2
    while engine.client._connections.open:
        await asyncio.sleep(0.001)
    await engine.ended.wait()


async def test_a_connection_that_was_just_made_is_not_swept_away(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the timer runs before the request that asked for it."""
    original = http.Connections.opened

    def opened(self: http.Connections, connection: http.Connection) -> None:
        original(self, connection)
        self._sweep()

    monkeypatch.setattr(http.Connections, "opened", opened)
    assert (await engine.post(SOUND)).status == 200


async def test_a_long_reply_may_come_before_the_request_is_sent(engine: Engine) -> None:
    """It is more than is read ahead, and the engine takes nothing before all of it is taken."""
    size = http.READ_AHEAD + (400 << 10)

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        writer.write(b"HTTP/1.1 413 X\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        await engine.ended.wait()

    engine.way = way
    reply = await engine.post(body=LARGE)
    assert (reply.status, reply.body.size) == (413, size)
    assert engine.client._connections._idle == {}
    engine.ended.set()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_request_that_nobody_reads_ends(impatient: Engine, ends: bool) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        if ends:
            writer.write_eof()
        await impatient.ended.wait()

    impatient.way = way
    if ends:
        await impatient.client.close()
        impatient.client = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
    with pytest.raises(Lost if ends else TimedOut):
        await impatient.post(body=LARGE)
    impatient.ended.set()


@pytest.mark.parametrize("status", [b"204", b"304"])
async def test_a_status_without_a_body_has_none(engine: Engine, status: bytes) -> None:
    assert await engine.said(b"HTTP/1.1 %b X\r\ncontent-length: 5\r\n\r\n" % status, SOUND) == b""
    assert await engine.said() == b"{}"
    assert len(engine.connections) == 1


@pytest.mark.parametrize("turns", [0, 20], ids=["only the kernel knows", "the loop knows"])
async def test_a_connection_that_ended_while_it_was_idle_is_not_used(engine: Engine, turns: int) -> None:
    await engine.post(SOUND)
    with socket.socket(fileno=os.dup(engine.connections[-1].get_extra_info("socket").fileno())) as sock:
        sock.shutdown(socket.SHUT_WR)
    await rounds(turns)
    assert await engine.said(SOUND) == b"{}"
    assert len(engine.connections) == 2


async def test_a_long_request_is_sent_whole_and_its_connection_used_again(engine: Engine) -> None:
    engine.replies = [SOUND, SOUND]
    parts = [b"[", bytes(3 << 20), memoryview(b"x" * 100), b"]"]
    assert (await engine.client.post(engine.url + PATH, parts, [], lambda size: None)).status == 200
    assert engine.asked[0].endswith(b"\r\n\r\n" + b"".join(parts))
    await engine.post()
    assert len(engine.connections) == 1


@pytest.mark.parametrize("size", [1 << 20, 6 << 20], ids=["in pieces", "in a map"])
async def test_a_long_reply_is_read_whole(engine: Engine, size: int) -> None:
    body, grown = bytes(range(256)) * (size // 256), list[int]()
    assert await engine.said(OK + b"content-length: %d\r\n\r\n" % size + body, SOUND, grow=grown.append) == body
    assert grown == [size]
    await engine.post()
    assert len(engine.connections) == 1


async def test_nothing_is_read_ahead_of_what_there_is_room_for(engine: Engine) -> None:
    def grow(size: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        await engine.post(OK + b"content-length: %d\r\n\r\n" % (8 << 20) + bytes(8 << 20), grow=grow)
    await engine.ended.wait()


async def test_a_reply_that_is_too_large_ends_its_connection(engine: Engine) -> None:
    with pytest.raises(TooLarge):
        await engine.post(OK + b"content-length: %d\r\n\r\n" % (1 << 25) + SOUND)
    await engine.ended.wait()
    assert await engine.said(OTHER) == b"[2]"
    assert len(engine.connections) == 2


async def test_a_request_that_is_cancelled_ends_its_connection(engine: Engine) -> None:
    asking = asyncio.ensure_future(engine.post(b""))
    while not engine.asked:
        await asyncio.sleep(0)
    asking.cancel()
    await engine.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_what_may_not_be_sent_leaves_its_connection_for_others(engine: Engine) -> None:
    with pytest.raises(Withheld):
        await engine.post(SOUND, may_send=lambda: False)
    assert (await engine.post(may_send=lambda: True)).status == 200
    assert len(engine.connections) == len(engine.asked) == 1


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\0b"])
async def test_no_header_holds_another(engine: Engine, value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        await engine.post(headers=[("x-request-id", value)])
    assert engine.connections == []


async def test_headers_are_latin_1_in_both_directions_and_a_path_is_ascii(engine: Engine) -> None:
    head = OK + b"X-Odd:\tcaf\xe9 \r\nx-odd: 2\r\nx-empty:\r\ncontent-length: 0\r\n\r\n"
    reply = await engine.post(head, SOUND, headers=[("x-request-id", "caf\xe9")])
    assert reply.headers == [("x-odd", "caf\xe9"), ("x-odd", "2"), ("x-empty", ""), ("content-length", "0")]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b\r\nx-request-id: caf\xe9\r\ncontent-length: 2\r\n\r\n{}"
    assert engine.asked == [head % engine.url.removeprefix("http://").encode()]
    await engine.get("/caf\xe9 1%20/server_info?config_format=json")
    assert engine.asked[1].startswith(b"GET /caf%C3%A9%201%20/server_info?config_format=json HTTP/1.1\r\n")


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a\nb", "http://" + "a" * 70, "//a", "a"])
async def test_a_url_that_is_malformed_is_not_asked(engine: Engine, url: str) -> None:
    with pytest.raises(NotSent):
        await engine.get(url=url)


async def test_all_addresses_of_a_name_are_tried_and_looked_up_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refuses, one never answers, the last is the engine's. A look-up that failed is forgotten."""
    port, loop = int(engine.url.rpartition(":")[2]), asyncio.get_running_loop()
    places, names = [("127.0.0.1", 1), ("silent", 0), ("127.0.0.1", port)], list[str]()
    connecting, looking_up = loop.sock_connect, loop.getaddrinfo

    async def addresses(host: str, port: int, **kind: Any) -> list[Any]:
        if not host.endswith(".example"):
            return await looking_up(host, port, **kind)  # uvloop does so where it connects
        names.append(host)
        if len(names) == 1:
            raise socket.gaierror
        await asyncio.sleep(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    async def connect(sock: socket.socket, place: Any) -> None:
        if place[0] == "silent":
            await asyncio.Event().wait()
        await connecting(sock, place)

    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    monkeypatch.setattr(loop, "sock_connect", connect)
    monkeypatch.setattr(http, "NEXT_ADDRESS_S", 0.01)
    url = "http://engines.example:9"
    with pytest.raises(NotSent):
        await engine.get(url=url)
    engine.replies = [SOUND] * 8
    waiting = [asyncio.ensure_future(engine.get(url=url)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError, *[EngineReply] * 3]
    assert b"host: engines.example:9\r\n" in engine.asked[0]
    assert len(names) == 2
    del places[1:]
    with pytest.raises(NotSent):
        await engine.get(url="http://others.example")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_connection_that_is_not_made_leaves_no_descriptor(
    engine: Engine, scheme: str, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes the connection and says nothing of TLS; without TLS it is never connected."""
    client = EngineClient(connect_timeout_s=20 if is_cancelled else 0.05, timeout_s=20, max_bytes=1 << 20)
    loop, trying = asyncio.get_running_loop(), asyncio.Event()
    connecting = loop.sock_connect

    async def connect(sock: socket.socket, place: Any) -> None:
        if scheme == "https":
            await connecting(sock, place)
        trying.set()
        if scheme == "http":
            await asyncio.Event().wait()

    monkeypatch.setattr(loop, "sock_connect", connect)
    before = descriptors()
    asking = asyncio.ensure_future(client.get(engine.url.replace("http", scheme) + "/health", []))
    await trying.wait()
    if is_cancelled:
        await rounds(5)
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else NotSent):
        await asking
    for writer in engine.connections:
        writer.close()
    if scheme == "https":
        await engine.ended.wait()
    await rounds(20)
    assert descriptors() <= before
    assert client._connections.open == set()
    await client.close()


@pytest.mark.parametrize(
    ("meanwhile", "is_sent"),
    [("the client is closed", False), ("nothing comes", False), ("this process stands still", True)],
)
async def test_a_connection_that_comes_too_late_is_not_sent_on(
    impatient: Engine, meanwhile: str, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was this process that did not run."""
    await impatient.client.close()
    impatient.client = EngineClient(connect_timeout_s=0.05, timeout_s=20, max_bytes=1 << 20)
    loop = asyncio.get_running_loop()
    connecting = loop.sock_connect

    async def connect(sock: socket.socket, place: Any) -> None:
        if meanwhile == "nothing comes":
            await asyncio.Event().wait()
        if meanwhile == "the client is closed":
            await impatient.client.close()
        else:
            time.sleep(0.06)
        await connecting(sock, place)

    monkeypatch.setattr(loop, "sock_connect", connect)
    with contextlib.nullcontext() if is_sent else pytest.raises(NotSent):
        await impatient.post(SOUND)
    assert len(impatient.asked) == is_sent


class Unread:
    """Takes a stream that nobody waits for; notes how large the pieces were."""

    is_live = False

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def feed(self, piece: bytes) -> None:
        self.sizes.append(len(piece))

    def reply(self) -> bytes:
        return b"{}"


STREAM = OK + b"content-type: text/event-stream\r\n"


@pytest.mark.parametrize("coding", [b"identity", b"gzip"])
async def test_what_has_come_of_a_stream_is_read_at_once(engine: Engine, coding: bytes) -> None:
    """Each reading rests a while: chunks that came together are not read one after the other."""
    event = b"data: x\n\n" * 100
    if coding == b"gzip":
        packing = zlib.compressobj(wbits=31)
        event = packing.compress(event * 2) + packing.flush()
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, event[at : at + 1]) for at in range(len(event)))
    has_read, stream = asyncio.Event(), Unread()

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(STREAM + b"content-encoding: %b\r\ntransfer-encoding: chunked\r\n\r\n" % coding + chunks)
        await has_read.wait()
        writer.write(b"0\r\n\r\n")

    engine.way = way
    asked = asyncio.ensure_future(engine.said(stream=stream))
    while not stream.sizes:
        await asyncio.sleep(0)
    has_read.set()
    assert await asked == b"{}"
    assert len(stream.sizes) < 10


class Live(Unread):
    """A stream whose deltas somebody waits for: `ticks` says how often the event loop had come round before each."""

    is_live = True

    def __init__(self) -> None:
        super().__init__()
        self.ticks: list[int] = []
        self.now = 0

    async def tick(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def feed(self, piece: bytes) -> None:
        super().feed(piece)
        self.ticks.append(self.now)


async def test_a_flood_is_read_in_slices_and_others_go_on_between_them(engine: Engine) -> None:
    body, stream = b": alive\n\n" * 100_000, Live()
    ticking = asyncio.ensure_future(stream.tick())
    assert await engine.said(STREAM + b"content-length: %d\r\n\r\n" % len(body) + body, stream=stream) == b"{}"
    ticking.cancel()
    assert sum(stream.sizes) == len(body)
    assert max(stream.sizes) <= SLICE
    assert all(before < after for before, after in itertools.pairwise(stream.ticks))


def test_a_stream_takes_its_share_of_the_event_loop_and_saves_nothing_up() -> None:
    pace = Pace(0.0)
    assert pace.rest(0.0, STREAM_BURST_S) == 0
    assert pace.rest(STREAM_BURST_S, STREAM_BURST_S + 0.01) == pytest.approx(0.01 / STREAM_SHARE)
    # Minutes without anything, as before a long prompt's first token, are no allowance for what follows.
    later = 600.0
    assert pace.rest(later, later + STREAM_BURST_S) == 0
    assert pace.rest(later + STREAM_BURST_S, later + STREAM_BURST_S + 1.0) == pytest.approx(1.0 / STREAM_SHARE)
    # A fiftieth of the time is never too much.
    calm = Pace(0.0)
    assert not any(calm.rest(at, at + 0.001) for at in (number * 0.05 for number in range(100)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
async def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, engine = tmp_path / "localhost.pem", Engine()
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["-keyout", str(certificate), "-out", str(tmp_path / "certificate")]
    subprocess.run(["openssl", "req", "-x509", *kind, *name, *made], check=True, capture_output=True)
    certificate.write_bytes(certificate.read_bytes() + (tmp_path / "certificate").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=context)
    engine.url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(NotSent):
        await engine.get()
    await engine.client.close()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    engine.client, long = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20), bytes(3 << 20)
    engine.replies = [SOUND, OK + b"content-length: %d\r\n\r\n" % (1 << 20) + bytes(1 << 20), OK + b"\r\n{}"]
    engine.closes = True
    assert (await engine.get()).status == 200
    assert (await engine.get()).body.size == 1 << 20
    assert await engine.said(body=long) == b"{}"
    assert engine.asked[2].endswith(b"\r\n\r\n" + long)
    assert len(engine.asked) == 3
    with pytest.raises(NotSent):
        await engine.get(url=engine.url.replace("localhost", "127.0.0.1"))
    await engine.client.close()
    server.close()
    await asyncio.sleep(0.01)
