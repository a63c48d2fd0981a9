"""Connections that are handed from one process to another; here both ends are in one process."""

from __future__ import annotations

import asyncio
import secrets
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from turnlog.keeper.handover import MAX_MESSAGE_BYTES, Handover, session_named_in

LONG = b"POST " + b"x" * (3 * MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    ("data", "session"),
    [
        (b"POST /sessions/abc/v1/chat/completions HTTP/1.1\r\n", b"abc"),
        (b"POST /sessions/a%20b/v1/messages HTTP/1.1\r\n", b"a%20b"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nX-Claude-Code-Session-Id: abc\r\n\r\n", b"abc"),
        (b"POST /v1/responses HTTP/1.1\r\nsession-id:abc\r\nthread-id: d\r\n\r\n", b"abc"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n\r\n\r\nsession-id: in the body\r\n\r\n", None),
        (b"POST /v1/messages HTTP/1.1\r\nsession-id: abc\r\n", None),  # the head may go on
        (b"GET /sessions/abc HTTP/1.1\r\n", None),
        (b"POST /sessions HTTP/1.1\r\n", None),
        (b"POST /sessions/ab", None),
    ],
)
def test_the_session_is_read_from_the_first_bytes(data: bytes, session: bytes | None) -> None:
    assert session_named_in(data) == session


class Process:
    """One of two processes, and what it was handed."""

    def __init__(self, name: str, place: int) -> None:
        self.adopted: asyncio.Queue[tuple[socket.socket, bytes]] = asyncio.Queue()
        self.handover = Handover(name, place, 2, lambda connection, first: self.adopted.put_nowait((connection, first)))
        self.handover.start()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """A client's end and a server's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


@pytest.mark.parametrize("first", [b"POST short", LONG])
def test_a_connection_moves_with_what_was_read(first: bytes) -> None:
    asyncio.run(_moves(first))


async def _moves(first: bytes) -> None:
    name = secrets.token_hex(8)
    one, other = Process(name, 0), Process(name, 1)
    async with connected() as (client, accepted):
        assert one.handover.give(1, accepted.fileno(), first)
        accepted.close()
        moved, data = await other.adopted.get()
        with moved:
            assert data == first
            assert moved.getpeername() == client.getsockname()
            moved.sendall(b"answer")
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""
    for process in (one, other):
        process.handover.close()


def test_a_process_that_is_away_takes_nothing_and_its_successor_does() -> None:
    asyncio.run(_away())


async def _away() -> None:
    name = secrets.token_hex(8)
    one = Process(name, 0)
    async with connected() as (_, accepted):
        assert not one.handover.give(1, accepted.fileno(), b"POST")
        for _ in range(2):
            other = Process(name, 1)
            assert one.handover.give(1, accepted.fileno(), b"POST")
            other.handover.close()  # takes what is waiting
            moved, _ = other.adopted.get_nowait()
            moved.close()
        assert not one.handover.give(1, accepted.fileno(), b"POST")
        assert (one.handover.given, other.handover.taken) == (2, 1)
    one.handover.close()


def test_a_busy_process_is_not_waited_for() -> None:
    """The other process reads nothing, as when its event loop is blocked."""
    asyncio.run(_busy())


async def _busy() -> None:
    name = secrets.token_hex(8)
    one, other = Process(name, 0), Process(name, 1)
    async with connected() as (_, accepted):
        given = 0
        while one.handover.give(1, accepted.fileno(), b"x" * MAX_MESSAGE_BYTES):
            given += 1
        assert given
        other.handover.close()
        assert other.adopted.qsize() == given
        while not other.adopted.empty():
            other.adopted.get_nowait()[0].close()
    one.handover.close()


def test_each_session_has_one_process() -> None:
    asyncio.run(_one_process())


async def _one_process() -> None:
    name = secrets.token_hex(8)
    processes = [Process(name, place) for place in range(2)]
    for number in range(20):
        data = b"POST /sessions/s-%d/v1/messages HTTP/1.1\r\n" % number
        owner = zlib.crc32(b"s-%d" % number) % 2
        assert [process.handover.owner(data) for process in processes] == [
            None if place == owner else owner for place in range(2)
        ]
    assert processes[0].handover.owner(b"GET / HTTP/1.1\r\n") is None
    for process in processes:
        process.handover.close()
