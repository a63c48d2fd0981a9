"""A server's side of HTTP for the engine and the floor: whole requests in, whole replies out, over uvloop."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, cast

import uvloop

Piece = bytes | memoryview


class Reply(NamedTuple):
    """`streamed`: each piece is a chunk, an event of a stream."""

    pieces: Sequence[Piece]
    status: int = 200
    streamed: bool = False


NOT_FOUND = Reply([b"{}"], 404)
Handler = Callable[[str, bytes], Awaitable[Reply]]


class Http(asyncio.Protocol):
    """A connection. Requests have a Content-Length, and come one after the other."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._pieces: list[bytes] = []
        self._path = ""
        self._missing = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            data = b"".join((*self._pieces, data))
            self._pieces = [data]
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = data[:end].decode("latin-1")
            self._path = head.split(" ", 2)[1]
            lengths = [line[15:] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            self._missing, self._pieces = int(lengths[0]) if lengths else 0, []
            data = data[end + 4 :]
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing <= 0:
            body, self._pieces, self._missing = b"".join(self._pieces), [], -1
            task = asyncio.create_task(self._answer(body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, body: bytes) -> None:
        reply = await self._handler(self._path, body)
        if reply.streamed:
            head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
            chunks = [part for piece in reply.pieces for part in (b"%x\r\n" % len(piece), piece, b"\r\n")]
            pieces: Sequence[Piece] = [*chunks, b"0\r\n\r\n"]
        else:
            pieces = reply.pieces
            head = b"content-type: application/json\r\ncontent-length: %d" % sum(map(len, pieces))
        if not self._transport.is_closing():
            self._transport.writelines((b"HTTP/1.1 %d x\r\n%b\r\n\r\n" % (reply.status, head), *pieces))


def serve(handler: Handler, port: int) -> None:
    """Serve on a local port until the process ends."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Http(handler), "127.0.0.1", port)
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def parser_with_port() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    return parser
