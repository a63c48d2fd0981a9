"""Engines that mean ill, and where an engine is asked for what: only what is listed, only where it is."""

from __future__ import annotations

import asyncio
import gzip
import re
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from helpers.answering import Answer, Answering

from app.upstream.client import PATHS, SMALL, EngineClient, TooLarge
from app.upstream.headers import to_client
from app.upstream.http import EngineError
from integration.stand import Stand, serving, user

OK = b"HTTP/1.1 200 OK\r\n"
MIB = 1 << 20
BOMB = gzip.compress(bytes(64 * MIB))

Way = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(OK)
    while not writer.is_closing():
        writer.write(b"x-more: 1\r\n" * 10_000)
        await writer.drain()


async def one_endless_header(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"x-more: ")
    while not writer.is_closing():
        writer.write(b"v" * 100_000)
        await writer.drain()


async def many_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"".join(b"x-%d: 1\r\n" % number for number in range(50_000)) + b"content-length: 2\r\n\r\n{}")


async def a_bomb(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB) + BOMB)


async def much(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"%x\r\n%b\r\n" % (MIB, bytes(MIB)))
        await writer.drain()


async def announced(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"content-length: %d\r\n\r\n" % (SMALL + 1))


async def elsewhere(writer: asyncio.StreamWriter) -> None:
    port = writer.get_extra_info("sockname")[1]
    writer.write(b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:%d/a_bomb\r\ncontent-length: 0\r\n\r\n" % port)


async def a_page(writer: asyncio.StreamWriter) -> None:
    page = b"<script>fetch('/export')</script>"
    head = b"content-type: text/html\r\nset-cookie: a=b\r\nx-accel-redirect: /etc\r\n"
    writer.write(OK + head + b"content-length: %d\r\n\r\n" % len(page) + page)


async def control_characters(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"x-odd: a\x01b\r\ncontent-length: 2\r\n\r\n{}")


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(endless_headers, one_endless_header, many_headers, a_bomb, much, announced, elsewhere),
        *(a_page, control_characters),
    )
}


class Engine:
    """Answers in the way that the first part of the path names."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.split(b"\r\n")[0])
        try:
            await WAYS[head.split(b" ")[1].split(b"/")[1].decode()](writer)
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(connect_timeout_s=5, timeout_s=60, max_bytes=256 * MIB)
    yield made
    await made.close()


@pytest.mark.anyio
@pytest.mark.threat("oversized engine reply")
@pytest.mark.parametrize(
    "way",
    ["endless_headers", "one_endless_header", "many_headers", "control_characters", "much", "announced", "a_bomb"],
)
async def test_an_engines_reply_has_limits(engine: Engine, client: EngineClient, way: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge if way in ("much", "announced", "a_bomb") else EngineError):
            await client.get(f"{engine.url}/{way}/health", [])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * SMALL


@pytest.mark.anyio
@pytest.mark.threat("redirect or proxy to another host")
async def test_no_redirect_is_followed_and_no_proxy_asked(
    engine: Engine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    reply = await client.post(f"{engine.url}/elsewhere/v1/chat/completions", b"{}", [])
    assert reply.status == 307
    assert engine.asked == [b"POST /elsewhere/v1/chat/completions HTTP/1.1"]
    assert "location" not in dict(to_client(reply.headers))


@pytest.mark.anyio
@pytest.mark.threat("engine path that Turnlog must not call")
@pytest.mark.parametrize("path", ["/set_internal_state", "/v1/files", "/", "", "/health/../start_profile", "/health#"])
async def test_an_engine_is_asked_for_what_is_listed(engine: Engine, client: EngineClient, path: str) -> None:
    for ask in (client.get(f"{engine.url}{path}", []), client.post(f"{engine.url}{path}?x=/health", b"{}", [])):
        with pytest.raises(ValueError, match="not asked"):
            await ask
    assert engine.asked == []


@pytest.mark.threat("engine path that Turnlog must not call")
def test_no_path_of_a_client_is_passed_on(stand: Stand) -> None:
    """After an ordinary turn and much that is none."""
    talk = stand.talk()
    talk.say("Hello")
    assert stand.http.get(f"{talk.path}/v1/models").status_code == 200
    for path in (
        "/start_profile",
        "/v1/embeddings",
        "/encode",
        "/open_session",
        "/v1/messages/batches",
        "/x/v1/chat/completions",
        "/v1/chat/completions/../../start_profile",
        "/get_load",
    ):
        for prefix in ("", talk.path, f"{talk.path}/v1"):
            for method in ("GET", "POST"):
                reply = stand.http.request(method, prefix + path, json={"messages": [user("x")]})
                assert reply.status_code in (404, 405), (method, prefix + path)
    seen = {one["path"] for one in stand.sim.get("/sim/requests", params={"last": 256}).json()}
    assert seen <= set(PATHS)
    assert "/v1/chat/completions" in seen


@pytest.mark.anyio
@pytest.mark.threat("script injection into the page")
async def test_a_page_from_an_engine_is_told_without_its_orders(engine: Engine, client: EngineClient) -> None:
    """`test_security.py` shows that a browser runs nothing of it."""
    reply = await client.get(f"{engine.url}/a_page/v1/models", [])
    assert to_client(reply.headers) == [("content-type", "text/html")]


EIGHT = 8


@pytest.fixture(scope="module")
def large_bomb() -> bytes:
    """Made before it is asked for: it takes seconds."""
    return gzip.compress(bytes(256 * MIB))


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10  # type: ignore[index]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.threat("decompression bomb from an engine")
@pytest.mark.parametrize(("status", "told"), [(200, 502), (500, 500)])
def test_eight_bombs_at_once_take_little_memory(tmp_path: Path, large_bomb: bytes, status: int, told: int) -> None:
    headers = (("content-type", "application/json"), ("content-encoding", "gzip"))
    with (
        Answering(lambda asked: Answer(large_bomb, headers, status)) as bombing,
        serving(tmp_path, bombing.base_url) as stand,
    ):
        talks = [stand.talk() for _ in range(EIGHT)]
        before = peak_bytes(stand.server.pid)
        calls = [stand.meanwhile(talk.chat, [user("Hello")]) for talk in talks]
        replies = [call.result() for call in calls]
        assert [reply.status_code for reply in replies] == [told] * EIGHT, [reply.text for reply in replies]
        assert peak_bytes(stand.server.pid) < 2.5 * before
