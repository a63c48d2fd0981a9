"""What an engine receives is the request's parts joined, however large they are."""

from __future__ import annotations

import asyncio

import pytest

from app.upstream.body import JOINED, PIECE
from app.upstream.client import EngineClient

pytestmark = pytest.mark.anyio

PARTS = {
    "one short": [7],
    "one as large as a piece": [PIECE],
    "one larger than a piece": [PIECE + 1],
    "many short, larger than a piece together": [JOINED] * 40,
    "many tiny": [3] * 100_000,
    "a long one among short ones": [5, 2 * PIECE + 9, 1, 40, JOINED + 1, 2],
    "long ones, and empty ones": [0, JOINED + 1, PIECE, 0, 3 * PIECE, 0],
}


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request with its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(size)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (size, body))
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("name", PARTS)
async def test_a_body_in_parts(name: str) -> None:
    parts = [bytes([65 + place % 26]) * size for place, size in enumerate(PARTS[name])]
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    client = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 24)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"
        for body in (parts, b"".join(parts)):
            reply = await client.post(url, body, [("content-type", "application/json")])
            assert reply.body.joined() == b"".join(parts)
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
