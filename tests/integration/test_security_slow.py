"""Clients that take their time: a head, a body or a reply that does not come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from app import request_memory
from app.api import connection as protocol
from app.api import limits
from app.api.connection import BoundedProtocol
from app.api.head import Guard, Head, request_ids
from app.api.limits import read_body
from app.api.replies import error_parts
from app.api.turns import send_reply
from app.errors import AppError, BodyGivenUp
from app.process import Capacity, ConnectionLimit
from app.request_memory import RequestMemory
from app.tokens import Tokens

pytestmark = pytest.mark.anyio

MUCH = 32 << 20
LARGEST = 1000
BODY = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Application:
    """Answers as Turnlog does, with its guard and its limits; `/slow` when it is `released`, `/much` at length."""

    def __init__(self) -> None:
        self.guard = Guard(Tokens(()))
        self.released = asyncio.Event()
        self.inflight = RequestMemory(1 << 20)
        self.sent_all = False
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        head = Head(scope, request_ids())
        refusal = self.guard.refusal(head, "page")
        if refusal is not None:
            await send_reply(send, *error_parts(refusal))
            return
        body: bytes | None = b"ok"
        try:
            if scope["path"] == "/echo":
                with self.inflight.reserve(peer=head.peer) as room:
                    body = await read_body(receive, [], LARGEST, room)
        except AppError as error:
            await send_reply(send, *error_parts(error))
            return
        if scope["path"] == "/slow":
            await self.released.wait()
        if scope["path"] == "/much":
            body = b"x" * MUCH
        await send_reply(send, 200, [], body or b"", head=head)
        self.sent_all = True


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def port(application: Application) -> AsyncIterator[int]:
    config = uvicorn.Config(application, log_config=None, ws="none", timeout_keep_alive=1)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for connection in list(state.connections):
        connection.transport.abort()
    await asyncio.gather(*state.tasks, return_exceptions=True)


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server hangs up, which it must."""
    came = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                came += piece
    return came


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def drip(writer: asyncio.StreamWriter, data: bytes, until: asyncio.Task[bytes]) -> None:
    """Byte by byte, until the server hangs up."""
    with contextlib.suppress(ConnectionError):
        for at in range(len(data)):
            if until.done():
                return
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.02)


@pytest.mark.threat("slow request head")
@pytest.mark.parametrize("first", [b"", WHOLE], ids=["new", "kept alive"])
@pytest.mark.parametrize(
    ("start", "status"),
    [(b"GET / HTTP/1.1\r\nx: ", b"408"), (b"", b""), (b"\r\n", b"")],
    ids=["head", "nothing", "lines"],
)
async def test_a_head_has_its_time(
    monkeypatch: pytest.MonkeyPatch, port: int, first: bytes, start: bytes, status: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    async with connected(port) as (reader, writer):
        if first:
            writer.write(first)
            await reader.readuntil(b"\r\n\r\nok")
        came = asyncio.create_task(to_the_end(reader))
        writer.write(start)
        await drip(writer, (b"a" if start.endswith(b" ") else start[-1:]) * 2000, came)
        reply = await came
    assert reply[:12] == (b"HTTP/1.1 " + status if status else b"")
    assert not status or b'"request_timeout"' in reply


async def test_a_head_that_is_done_may_wait_for_its_reply(
    monkeypatch: pytest.MonkeyPatch, application: Application, port: int
) -> None:
    """Also where the next request has begun already, and is never finished."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    async with connected(port) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
        await asyncio.sleep(0.5)
        application.released.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert (await to_the_end(reader)).startswith(b"HTTP/1.1 408")


TIMES: dict[str, tuple[dict[str, float], bytes, bytes]] = {
    "not begun": ({"IDLE_S": 0.2}, BODY, b""),
    "begun": ({"IDLE_S": 0.2}, BODY + b"12345", b""),
    "drips": ({"BODY_S": 0.5}, BODY.replace(b"10", b"900"), b"x" * 900),
    "too slow, though much came at once": (
        {"IDLE_S": 0.4, "IDLE_BYTES": 400},
        BODY.replace(b"10", b"1000") + b"x" * 900,
        b"x" * 99,
    ),
}
"""By what a body does: limits, what comes of it at once, and what drips."""


@pytest.mark.threat("slow request body")
@pytest.mark.threat("unfinished bodies fill the memory for bodies")
@pytest.mark.parametrize("case", TIMES)
async def test_a_body_that_does_not_come_in_time_is_408_and_the_end(
    monkeypatch: pytest.MonkeyPatch, port: int, case: str
) -> None:
    most, at_once, dripping = TIMES[case]
    for name, value in most.items():
        monkeypatch.setattr(limits, name, value)
    async with connected(port) as (reader, writer):
        writer.write(at_once)
        came = asyncio.create_task(to_the_end(reader))
        await drip(writer, dripping, came)
        reply = await came
    assert reply.startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in reply
    assert b"connection: close" in reply


@pytest.mark.threat("unfinished bodies fill the memory for bodies")
async def test_who_holds_bodies_back_makes_room_for_others_of_the_same_address(
    monkeypatch: pytest.MonkeyPatch, application: Application, port: int
) -> None:
    """Without tokens, or behind a proxy, everybody has the same address."""
    monkeypatch.setattr(request_memory, "SMALL", 20)
    now = 0.0
    application.inflight = RequestMemory(4 * LARGEST, clock=lambda: now)
    head = BODY.replace(b"10", b"1000")
    async with connected(port) as (first, to_first), connected(port) as (second, to_second):
        for writer, size in ((to_first, 999), (to_second, 1998)):
            writer.write(head + b"x" * 999)
            async with asyncio.timeout(20):
                while application.inflight.size < size:
                    await asyncio.sleep(0.02)
        now = request_memory.BODY_TIMEOUT_S + 1
        async with connected(port) as (honest, to_honest):
            to_honest.write(head + b"y" * 1000)
            assert (await honest.readuntil(b"y" * 1000)).startswith(b"HTTP/1.1 200")
        reply = await first.readuntil(b"}}")
        assert reply.startswith(b"HTTP/1.1 503")
        assert b'"overloaded"' in reply
        assert b"retry-after: 1" in reply
        assert application.inflight.size == 999
        to_first.write(b"x" + WHOLE)
        assert (await first.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        to_second.write(b"x")
        assert (await second.readuntil(b"x" * 1000)).startswith(b"HTTP/1.1 200")
    assert application.inflight.size == 0


@pytest.mark.threat("unfinished bodies fill the memory for bodies")
async def test_a_body_that_is_given_up_as_its_end_comes_is_given_up() -> None:
    """Its room is another's by then."""
    now = 0.0
    inflight = RequestMemory(LARGEST, clock=lambda: now)
    end = asyncio.Event()
    parts = iter([b"x" * LARGEST, b""])

    async def receive() -> dict[str, object]:
        part = next(parts)
        if not part:
            await end.wait()
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    async def read() -> bytes | None:
        with inflight.reserve() as room:
            return await read_body(receive, [], LARGEST, room)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    now = request_memory.BODY_TIMEOUT_S + 1
    end.set()
    with inflight.reserve() as other:
        other.arrive(LARGEST)
        with pytest.raises(BodyGivenUp):
            await reading
        assert inflight.size == LARGEST
    assert inflight.size == 0


async def test_a_slow_body_in_time_is_taken(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(limits, "IDLE_S", 5.0)
    async with connected(port) as (reader, writer):
        writer.write(BODY)
        for _ in range(10):
            await asyncio.sleep(0.02)
            writer.write(b"x")
        assert (await reader.readuntil(b"x" * 10)).startswith(b"HTTP/1.1 200")


REFUSED = b"POST /health/no HTTP/1.1\r\nHost: evil\r\nContent-Length: %d\r\n\r\n"


class Scarce(ConnectionLimit):
    """As if the last file descriptors were in use."""

    def capacity(self, descriptor: int) -> Capacity:
        return "scarce"


@pytest.mark.threat("slow request body")
@pytest.mark.parametrize("end", ["slow", "large"])
async def test_the_rest_of_a_body_that_was_refused_has_its_limits(
    monkeypatch: pytest.MonkeyPatch, port: int, end: str
) -> None:
    monkeypatch.setattr(protocol, "IDLE_S", 0.3 if end == "slow" else 30)
    monkeypatch.setattr(BoundedProtocol, "max_body", 1 << 20)
    async with connected(port) as (reader, writer):
        writer.write(REFUSED % (3 << 20))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403")
        came = asyncio.create_task(to_the_end(reader))
        if end == "slow":
            await drip(writer, b"x" * 1001, came)
        else:
            with contextlib.suppress(ConnectionError):
                writer.write(b"x" * ((3 << 20) - 1))
                await writer.drain()
        await came


@pytest.mark.parametrize("how", ["kept", "closed", "scarce"])
async def test_a_slow_client_reads_its_refusal_behind_all_that_it_sends(
    monkeypatch: pytest.MonkeyPatch, port: int, how: str
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    monkeypatch.setattr(protocol, "IDLE_S", 0.2)
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    monkeypatch.setattr(BoundedProtocol, "limit", Scarce(time.monotonic) if how == "scarce" else None)
    head = REFUSED % (3 << 20)
    async with connected(port) as (reader, writer):
        writer.write(head.replace(b"Host", b"Connection: close\r\nHost") if how == "closed" else head)
        for _ in range(48):
            writer.write(b"x" * (64 << 10))
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 503" if how == "scarce" else b"HTTP/1.1 403")
        if how == "kept":
            writer.write(WHOLE)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        else:
            assert await reader.read() == b""


@pytest.mark.threat("endless request head")
async def test_what_a_refused_client_still_sends_does_not_throw_the_answer_away(port: int) -> None:
    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(b"GET / HTTP/1.1\r\nx: " + b"v" * (1 << 20))
            time.sleep(0.1)
            client.sendall(b"v" * (1 << 20))
            return client.recv(1 << 16)

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 431")


CHUNKED = b"POST /%s HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.threat("endless request head")
@pytest.mark.parametrize("host", [b"localhost", b"evil"], ids=["body awaited", "refused"])
@pytest.mark.parametrize("start", [b"0\r\nx: ", b"1;"], ids=["trailer", "chunk"])
async def test_nor_does_what_stands_behind_or_within_a_body(port: int, host: bytes, start: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(CHUNKED % (b"echo", host) + start)
        came = asyncio.create_task(to_the_end(reader))
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"v" * 65536)
                await writer.drain()
                await asyncio.sleep(0.01)
        assert b"\r\n\r\nok" not in await asyncio.wait_for(came, 5)


@pytest.mark.threat("missing token")
async def test_a_trailer_is_no_header(application: Application, port: int) -> None:
    """A proxy that looks at headers, and takes some away, may pass trailers on as they are."""
    application.guard = Guard(Tokens(["a-token"]))
    async with connected(port) as (reader, writer):
        writer.write(CHUNKED % (b"echo", b"localhost") + b"1\r\nx\r\n0\r\nAuthorization: Bearer a-token\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")


@pytest.mark.threat("client that does not read its reply")
async def test_a_reply_that_nobody_reads_is_let_go(
    monkeypatch: pytest.MonkeyPatch, application: Application, port: int
) -> None:
    monkeypatch.setattr(protocol, "STALLED_S", 0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        client.sendall(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            while not application.sent_all:
                await asyncio.sleep(0.02)
        came = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
                came += len(piece)
        assert came < MUCH


@pytest.mark.threat("remote access without a token")
async def test_a_unix_socket_is_no_loopback_address(application: Application, tmp_path: Path) -> None:
    config = uvicorn.Config(application, log_config=None, ws="none")
    config.load()
    state = ServerState()
    path = str(tmp_path / "s")
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: BoundedProtocol(config, state, {}), path)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (await to_the_end(reader)).startswith(b"HTTP/1.1 403")
    writer.close()
    server.close()
    await asyncio.gather(*state.tasks, return_exceptions=True)


UPGRADE = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n"


@pytest.mark.threat("request smuggling")
@pytest.mark.parametrize("pause_s", [0, 0.1], ids=["at once", "in parts"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"Content-Length: 21", b"GET /evil HTTP/1.1\r\n\n"), (b"Transfer-Encoding: chunked", b"3\r\nGET\r\n0\r\n\r\n")],
    ids=["length", "chunked"],
)
async def test_the_body_of_a_request_that_asks_for_an_upgrade_is_its_body(
    application: Application, port: int, pause_s: float, framing: bytes, body: bytes
) -> None:
    """uvicorn loses it, or takes it for the next request: as Java's HTTP client sends it on its first."""
    async with connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + framing + b"\r\n\r\n")
            await asyncio.sleep(pause_s)
            writer.write(body[:5])
            await asyncio.sleep(pause_s)
            writer.write(body[5:])
            await reader.readuntil(b"GET")
        writer.write(WHOLE.replace(b"\r\n\r\n", b"\r\n" + UPGRADE + b"\r\n") * 2 + WHOLE)
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\nok")
    assert application.asked == ["/echo"] * 2 + ["/health"] * 3


@pytest.mark.parametrize(("given", "kept"), [(5, 75), (7, 7)], ids=["uvicorn's default", "an operator's own"])
async def test_a_connection_is_kept_longer_than_clients_keep_theirs(given: int, kept: int) -> None:
    """uvicorn's five seconds are those of the SDKs' pools: one sends while the other hangs up."""
    config = uvicorn.Config(Application(), log_config=None, ws="none", timeout_keep_alive=given)
    config.load()
    protocol.bound_connections(LifespanOn(config).receive, ConnectionLimit(time.monotonic), 1)
    assert config.timeout_keep_alive == kept


async def test_a_body_of_many_small_chunks_is_taken(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(protocol, "HEAD_BYTES", 50)
    async with connected(port) as (reader, writer):
        writer.write(CHUNKED % (b"echo", b"localhost"))
        for _ in range(20):
            await asyncio.sleep(0.01)
            writer.write(b"1\r\nx\r\n")
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"x" * 20)).startswith(b"HTTP/1.1 200")


async def test_a_reply_that_is_read_slowly_is_whole(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(protocol, "STALLED_S", 5.0)
    async with connected(port) as (reader, writer):
        writer.write(b"GET /much HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0.2)
        assert len(await to_the_end(reader)) > MUCH


async def test_what_it_says_of_its_body_must_be_true(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + b"Transfer-Encoding: gzip\r\n\r\nGET")
        assert (await to_the_end(reader)).startswith(b"HTTP/1.1 400")
