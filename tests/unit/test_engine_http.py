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
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Engine:
    """Reads requests; sends the next of `replies` to each, or whatever `way` does. Notes the bytes of all requests."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.closes = False
        self.way: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
        self.asked: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.ended = asyncio.Event()
        self.url = ""

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
    server.close()
    for writer in made.connections:
        writer.close()
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 24)
    yield made
    await made.close()


def post(client: EngineClient, engine: Engine, body: bytes = b"{}", **more: Any) -> Awaitable[EngineReply]:
    return client.post(engine.url + PATH, body, more.pop("headers", []), more.pop("grow", lambda size: None), **more)


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
async def test_a_body_is_read_however_it_is_framed(engine: Engine, client: EngineClient, name: str, step: int) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        for at in range(0, len(BODIES[name]), step):
            writer.write(BODIES[name][at : at + step])
            await writer.drain()
            await asyncio.sleep(0)

    engine.way, engine.closes = way, True
    reply = await post(client, engine)
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


@pytest.mark.parametrize("name", BROKEN)
async def test_a_reply_that_is_not_whole_or_can_be_read_in_two_ways_is_lost(
    engine: Engine, client: EngineClient, name: str
) -> None:
    engine.replies, engine.closes = [BROKEN[name]], True
    with pytest.raises(Lost):
        await post(client, engine)


ENDLESS = {
    "information": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a head": (OK, b"x: y\r\n"),
    "a header": (OK + b"x: ", b"y"),
    "a chunk's extension": (CHUNKED + b"2;", b"x"),
    "extensions of chunks": (CHUNKED, b"1;%b\r\n{\r\n" % (b"x" * 1000)),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: y\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_has_no_end_but_is_no_body_is_cut_off(engine: Engine, client: EngineClient, name: str) -> None:
    first, again = ENDLESS[name]

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(first)
        while True:
            writer.write(again * (4096 // len(again)))
            await writer.drain()

    engine.way = way
    with pytest.raises(Lost):
        await post(client, engine)
    await engine.ended.wait()


@pytest.mark.parametrize(
    "first", [b"", OK + b"x: ", CHUNKED + b"2;", OK + b"content-length: 99999\r\n\r\n", OK + b"\r\n"]
)
async def test_a_reply_that_drips_is_late_all_the_same(
    engine: Engine, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    client = EngineClient(connect_timeout_s=5, timeout_s=0.1, max_bytes=1 << 20)

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(first)
        while not reader.at_eof():
            writer.write(b"x" if first else b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    engine.way = way
    with pytest.raises(TimedOut):
        await post(client, engine)
    await client.close()


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, gzip", b"gzip", b"chunked\r\ntransfer-encoding: chunked"]
)
async def test_a_transfer_encoding_but_chunked_is_refused(engine: Engine, client: EngineClient, coding: bytes) -> None:
    head = b"\r\ntransfer-encoding: " + coding + b"\r\n\r\n"
    engine.replies, engine.closes = [b"HTTP/1.1 200 OK" + head + b"2\r\n{}\r\n0\r\n\r\n"], True
    with pytest.raises(Unreadable):
        await post(client, engine)


async def test_an_error_is_told_although_its_encoding_cannot_be_read(engine: Engine, client: EngineClient) -> None:
    engine.replies = [b"HTTP/1.1 503 X\r\nretry-after: 3\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"]
    reply = await post(client, engine)
    assert (reply.status, dict(reply.headers)["retry-after"]) == (503, "3")


async def test_a_switch_of_protocols_is_a_reply_and_the_end_of_the_connection(
    engine: Engine, client: EngineClient
) -> None:
    engine.replies = [b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nbytes", SOUND]
    assert (await post(client, engine)).status == 101
    engine.replies = [SOUND]
    assert (await post(client, engine)).status == 200
    assert len(engine.connections) == 2


async def test_a_connection_that_was_reset_ends_no_body(engine: Engine, client: EngineClient) -> None:
    """What has no length ends with its connection, but not with a reset."""

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(OK + b"\r\n{}")
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    engine.way, engine.closes = way, True
    with pytest.raises(Lost):
        await post(client, engine)


async def test_a_connection_is_used_again_for_one_request_at_a_time(engine: Engine, client: EngineClient) -> None:
    engine.replies = [SOUND] * 4
    for _ in range(3):
        await post(client, engine)
    assert len(engine.connections) == 1
    engine.way = lambda reader, writer: asyncio.sleep(0)
    engine.replies += [SOUND] * 2
    await asyncio.gather(post(client, engine), post(client, engine))
    assert len(engine.connections) == 2


@pytest.mark.parametrize(
    ("reply", "headers"),
    [
        (SOUND, [ONCE]),
        (SOUND.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n"), []),
        (b"HTTP/1.0" + SOUND[8:], []),
        (SOUND + SOUND, []),
        (SOUND + b"HTTP/1.1 2", []),
        (SOUND + b'{"more": 1}', []),
    ],
    ids=["once", "close", "HTTP/1.0", "two replies", "half of a second", "more"],
)
async def test_a_connection_is_not_used_again(
    engine: Engine, client: EngineClient, reply: bytes, headers: list[tuple[str, str]]
) -> None:
    engine.replies = [reply]
    assert (await post(client, engine, headers=headers)).body.joined() == b"{}"
    engine.replies = [OK + b"content-length: 3\r\n\r\n[2]"]
    assert (await post(client, engine)).body.joined() == b"[2]"
    assert len(engine.connections) == 2


async def test_what_comes_while_nobody_asks_is_nobodys(engine: Engine, client: EngineClient) -> None:
    """Whether the loop has read it already, or it still is with the kernel."""
    engine.replies = [SOUND] * 4
    for turns in (0, 20):
        await post(client, engine)
        engine.connections[-1].transport.write(OK + b"content-length: 3\r\n\r\n[1]")
        for _ in range(turns):
            await asyncio.sleep(0)
        assert (await post(client, engine)).body.joined() == b"{}"
    assert len(engine.connections) == 3


async def test_an_engine_that_speaks_first_is_not_asked(engine: Engine, client: EngineClient) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SOUND)

    engine.way, engine.replies = way, [SOUND]
    original = http.Connections._connected

    async def slow(self: http.Connections, origin: http.Origin) -> socket.socket:
        sock = await original(self, origin)
        while not select.select([sock], [], [], 0)[0]:
            await asyncio.sleep(0)
        return sock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.Connections, "_connected", slow)
        with pytest.raises(NotSent):
            await post(client, engine)
    assert engine.asked == []


async def test_a_get_is_repeated_if_the_engine_has_closed_its_connection_and_a_post_is_not(
    engine: Engine, client: EngineClient
) -> None:
    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        writer.write(SOUND)
        await engine.read(reader)

    engine.way, engine.closes = way, True
    assert (await post(client, engine)).status == 200
    with pytest.raises(Lost):
        await post(client, engine)
    assert (await client.get(engine.url + "/health", [])).status == 200
    assert (await client.get(engine.url + "/health", [])).status == 200
    assert len(engine.asked) == 5
    assert len(engine.connections) == 3


async def test_a_connection_is_not_used_that_was_idle_for_long(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.replies = [SOUND]
    await post(client, engine)
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.0)
    engine.replies = [SOUND]
    await post(client, engine)
    assert len(engine.connections) == 2


async def test_a_connection_that_was_just_made_is_not_swept_away(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the timer runs before the request that asked for it."""
    original = http.Connections.opened

    def opened(self: http.Connections, connection: http.Connection) -> None:
        original(self, connection)
        self._sweep()

    monkeypatch.setattr(http.Connections, "opened", opened)
    engine.replies = [SOUND]
    assert (await post(client, engine)).status == 200


async def test_idle_connections_are_closed_and_the_timer_ends_with_them(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    engine.replies = [SOUND]
    await post(client, engine)
    await engine.ended.wait()
    assert client._connections.open == set()


async def test_a_long_reply_may_come_before_the_request_is_sent(engine: Engine, client: EngineClient) -> None:
    """It is more than is read ahead, and the engine takes nothing before all of it is taken."""
    size = http.READ_AHEAD + (400 << 10)

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        writer.write(b"HTTP/1.1 413 X\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        await engine.ended.wait()

    engine.way = way
    reply = await post(client, engine, bytes(64 << 20))
    assert (reply.status, reply.body.size) == (413, size)
    assert client._connections._idle == {}
    engine.ended.set()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_request_that_nobody_reads_ends(engine: Engine, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    client = EngineClient(connect_timeout_s=5, timeout_s=20 if ends else 0.1, max_bytes=1 << 20)

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        if ends:
            writer.write_eof()
        await engine.ended.wait()

    engine.way = way
    with pytest.raises(Lost if ends else TimedOut):
        await post(client, engine, bytes(64 << 20))
    engine.ended.set()
    await client.close()


@pytest.mark.parametrize("status", [b"204", b"304"])
async def test_a_status_without_a_body_has_none(engine: Engine, client: EngineClient, status: bytes) -> None:
    engine.replies = [b"HTTP/1.1 %b X\r\ncontent-length: 5\r\n\r\n" % status, SOUND]
    assert (await post(client, engine)).body.joined() == b""
    assert (await post(client, engine)).body.joined() == b"{}"
    assert len(engine.connections) == 1


@pytest.mark.parametrize("turns", [0, 20], ids=["only the kernel knows", "the loop knows"])
async def test_a_connection_that_ended_while_it_was_idle_is_not_used(
    engine: Engine, client: EngineClient, turns: int
) -> None:
    engine.replies = [SOUND]
    await post(client, engine)
    with socket.socket(fileno=os.dup(engine.connections[-1].get_extra_info("socket").fileno())) as sock:
        sock.shutdown(socket.SHUT_WR)
    engine.replies = [SOUND]
    for _ in range(turns):
        await asyncio.sleep(0)
    assert (await post(client, engine)).body.joined() == b"{}"
    assert len(engine.connections) == 2


async def test_a_long_request_is_sent_whole_and_its_connection_used_again(engine: Engine, client: EngineClient) -> None:
    engine.replies = [SOUND, SOUND]
    parts = [b"[", bytes(3 << 20), memoryview(b"x" * 100), b"]"]
    reply = await client.post(engine.url + PATH, parts, [], lambda size: None)
    assert reply.status == 200
    assert engine.asked[0].endswith(b"\r\n\r\n" + b"".join(parts))
    await post(client, engine)
    assert len(engine.connections) == 1


@pytest.mark.parametrize("size", [1 << 20, 6 << 20], ids=["in pieces", "in a map"])
async def test_a_long_reply_is_read_whole(engine: Engine, client: EngineClient, size: int) -> None:
    body = bytes(range(256)) * (size // 256)
    engine.replies = [OK + b"content-length: %d\r\n\r\n" % size + body, SOUND]
    grown: list[int] = []
    assert (await post(client, engine, grow=grown.append)).body.joined() == body
    assert grown == [size]
    await post(client, engine)
    assert len(engine.connections) == 1


async def test_nothing_is_read_ahead_of_what_there_is_room_for(engine: Engine, client: EngineClient) -> None:
    class Full(Exception):
        pass

    def grow(size: int) -> None:
        raise Full

    engine.replies = [OK + b"content-length: %d\r\n\r\n" % (8 << 20) + bytes(8 << 20)]
    with pytest.raises(Full):
        await post(client, engine, grow=grow)
    await engine.ended.wait()


async def test_a_reply_that_is_too_large_ends_its_connection(engine: Engine, client: EngineClient) -> None:
    engine.replies = [OK + b"content-length: %d\r\n\r\n" % (1 << 25) + SOUND]
    with pytest.raises(TooLarge):
        await post(client, engine)
    await engine.ended.wait()
    engine.replies = [OK + b"content-length: 3\r\n\r\n[2]"]
    assert (await post(client, engine)).body.joined() == b"[2]"
    assert len(engine.connections) == 2


async def test_a_request_that_is_cancelled_ends_its_connection(engine: Engine, client: EngineClient) -> None:
    engine.replies = [b""]
    asking = asyncio.ensure_future(post(client, engine))
    while not engine.asked:
        await asyncio.sleep(0)
    asking.cancel()
    await engine.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_what_may_not_be_sent_leaves_its_connection_for_others(engine: Engine, client: EngineClient) -> None:
    engine.replies = [SOUND]
    with pytest.raises(Withheld):
        await post(client, engine, may_send=lambda: False)
    assert (await post(client, engine, may_send=lambda: True)).status == 200
    assert len(engine.connections) == len(engine.asked) == 1


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\0b"])
async def test_no_header_holds_another(engine: Engine, client: EngineClient, value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        await post(client, engine, headers=[("x-request-id", value)])
    assert engine.connections == []


async def test_headers_are_latin_1_in_both_directions(engine: Engine, client: EngineClient) -> None:
    engine.replies = [OK + b"X-Odd:\tcaf\xe9 \r\nx-odd: 2\r\nx-empty:\r\ncontent-length: 0\r\n\r\n"]
    reply = await post(client, engine, headers=[("x-request-id", "caf\xe9")])
    assert reply.headers == [("x-odd", "caf\xe9"), ("x-odd", "2"), ("x-empty", ""), ("content-length", "0")]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b\r\nx-request-id: caf\xe9\r\ncontent-length: 2\r\n\r\n{}"
    assert engine.asked == [head % engine.url.removeprefix("http://").encode()]


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a\nb", "http://" + "a" * 70, "//a", "a"])
async def test_a_url_that_is_malformed_is_not_asked(client: EngineClient, url: str) -> None:
    with pytest.raises(NotSent):
        await client.get(url + "/health", [])


async def test_a_path_is_sent_as_ascii(engine: Engine, client: EngineClient) -> None:
    engine.replies = [SOUND]
    await client.get(engine.url + "/caf\xe9 1%20/server_info?config_format=json", [])
    assert engine.asked[0].startswith(b"GET /caf%C3%A9%201%20/server_info?config_format=json HTTP/1.1\r\n")


async def test_all_addresses_of_a_name_are_tried(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refuses, one never answers, the last is the engine's."""
    port = int(engine.url.rpartition(":")[2])
    loop = asyncio.get_running_loop()
    places = [("127.0.0.1", 1), ("silent", 0), ("127.0.0.1", port)]
    connecting = loop.sock_connect

    looking_up = loop.getaddrinfo

    async def addresses(host: str, port: int, **kind: Any) -> list[Any]:
        if not host.endswith(".example"):
            return await looking_up(host, port, **kind)  # uvloop does so where it connects
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    async def connect(sock: socket.socket, place: Any) -> None:
        if place[0] == "silent":
            await asyncio.Event().wait()
        await connecting(sock, place)

    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    monkeypatch.setattr(loop, "sock_connect", connect)
    monkeypatch.setattr(http, "NEXT_ADDRESS_S", 0.01)
    engine.replies = [SOUND]
    assert (await client.get("http://engines.example:9/health", [])).status == 200
    assert b"host: engines.example:9\r\n" in engine.asked[0]
    del places[1:]
    with pytest.raises(NotSent):
        await client.get("http://others.example/health", [])


async def test_connections_share_one_look_up_and_forget_one_that_failed(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    looking_up = loop.getaddrinfo
    asked: list[str] = []

    async def addresses(host: str, port: int, **kind: Any) -> list[Any]:
        if host != "engines.example":
            return await looking_up(host, port, **kind)
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror
        await asyncio.sleep(0)
        return await looking_up("127.0.0.1", port, **kind)

    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    url = engine.url.replace("127.0.0.1", "engines.example") + "/health"
    with pytest.raises(NotSent):
        await client.get(url, [])
    engine.replies = [SOUND] * 8
    waiting = [asyncio.ensure_future(client.get(url, [])) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert [type(reply) for reply in await asyncio.gather(*waiting, return_exceptions=True)] == [
        asyncio.CancelledError,
        *[EngineReply] * 3,
    ]
    assert len(asked) == 2


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
    loop = asyncio.get_running_loop()
    trying = asyncio.Event()
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
        for _ in range(5):
            await asyncio.sleep(0)
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else NotSent):
        await asking
    for writer in engine.connections:
        writer.close()
    if scheme == "https":
        await engine.ended.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert descriptors() <= before
    assert client._connections.open == set()
    await client.close()


async def test_a_client_that_was_closed_connects_no_more(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    connecting = loop.sock_connect

    async def connect(sock: socket.socket, place: Any) -> None:
        await client.close()
        await connecting(sock, place)

    monkeypatch.setattr(loop, "sock_connect", connect)
    with pytest.raises(NotSent):
        await post(client, engine)
    assert engine.asked == []


@pytest.mark.parametrize("stood_still", [False, True])
async def test_a_connection_that_takes_too_long_is_not_sent(
    engine: Engine, stood_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was this process that did not run meanwhile."""
    monkeypatch.setattr(http, "SWEEP_S", 0.01)
    client = EngineClient(connect_timeout_s=0.05, timeout_s=5, max_bytes=1 << 20)
    loop = asyncio.get_running_loop()
    connecting = loop.sock_connect

    async def connect(sock: socket.socket, place: Any) -> None:
        if stood_still:
            time.sleep(0.1)
            await connecting(sock, place)
        else:
            await asyncio.Event().wait()

    monkeypatch.setattr(loop, "sock_connect", connect)
    engine.replies = [SOUND]
    with contextlib.nullcontext() if stood_still else pytest.raises(NotSent):
        await post(client, engine)
    await client.close()


class Unread:
    """Takes a stream that nobody waits for; notes how often it got a piece."""

    is_live = False

    def __init__(self) -> None:
        self.pieces = 0

    def feed(self, piece: bytes) -> None:
        self.pieces += 1

    def reply(self) -> bytes:
        return b"{}"


@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_what_has_come_of_a_stream_is_read_at_once(engine: Engine, client: EngineClient, coding: str) -> None:
    """Each reading rests a while: chunks that came together are not read one after the other."""
    event = b"data: x\n\n"
    if coding == "gzip":
        packing = zlib.compressobj(wbits=31)
        event = packing.compress(event * 200) + packing.flush()
    chunks = [b"%x\r\n%b\r\n" % (1, event[at : at + 1]) for at in range(len(event))] * (1 if coding == "gzip" else 100)

    async def way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read(reader)
        head = OK + b"content-type: text/event-stream\r\ncontent-encoding: %b\r\n" % coding.encode()
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks))
        await has_read.wait()
        writer.write(b"0\r\n\r\n")

    has_read = asyncio.Event()
    engine.way, stream = way, Unread()
    asked = asyncio.ensure_future(post(client, engine, stream=stream))
    while not stream.pieces:
        await asyncio.sleep(0)
    has_read.set()
    assert (await asked).body.joined() == b"{}"
    assert stream.pieces < 10


class Live(Unread):
    """A stream whose deltas somebody waits for: `ticks` says how often the event loop had come round before each."""

    is_live = True

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.ticks: list[int] = []
        self.now = 0

    async def tick(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def feed(self, piece: bytes) -> None:
        self.sizes.append(len(piece))
        self.ticks.append(self.now)


async def test_a_flood_is_read_in_slices_and_others_go_on_between_them(engine: Engine, client: EngineClient) -> None:
    body = b": alive\n\n" * 100_000
    engine.replies = [OK + b"content-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body) + body]
    stream = Live()
    ticking = asyncio.ensure_future(stream.tick())
    assert (await post(client, engine, stream=stream)).body.joined() == b"{}"
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
async def test_tls_is_checked(tmp_path: Path, client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "localhost.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["-keyout", str(certificate), "-out", str(tmp_path / "certificate")]
    subprocess.run(["openssl", "req", "-x509", *kind, *name, *made], check=True, capture_output=True)
    certificate.write_bytes(certificate.read_bytes() + (tmp_path / "certificate").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/health"
    with pytest.raises(NotSent):
        await client.get(url, [])
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    trusting = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
    engine.replies = [SOUND, OK + b"content-length: %d\r\n\r\n" % (1 << 20) + bytes(1 << 20), OK + b"\r\n{}"]
    engine.closes = True
    assert (await trusting.get(url, [])).status == 200
    assert (await trusting.get(url, [])).body.size == 1 << 20
    long = bytes(3 << 20)
    assert (await trusting.post(url.replace("/health", PATH), long, [])).body.joined() == b"{}"
    assert engine.asked[2].endswith(b"\r\n\r\n" + long)
    assert len(engine.asked) == 3
    with pytest.raises(NotSent):
        await trusting.get(url.replace("localhost", "127.0.0.1"), [])
    await trusting.close()
    server.close()
    await asyncio.sleep(0.01)
