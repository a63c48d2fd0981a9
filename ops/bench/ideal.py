"""The least that a durable server between client and engine does with a chat: it reads the request once, hashes it,
passes it on, and passes the reply back. Run as a process: `python -m ops.bench.ideal <port> <engine's URL>`.

It stores, checks and keeps nothing. Request and reply are passed on as a whole, as Turnlog passes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path
from typing import cast

import uvloop

from ops.bench.client import Broken, Connection
from ops.server import PORT, OwnProcess

PATH = "/v1/chat/completions"


class _Client(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self._engine: Connection | None = None
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._missing = -1
        self._passing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._engine is not None:
            self._engine.close()

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            data = b"".join((*self._pieces, data))
            head, ended, data = data.partition(b"\r\n\r\n")
            if not ended:
                self._pieces = [head]
                return
            length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self._missing, self._pieces = int(length or 0), []
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing == 0:
            self._missing = -1
            body, self._pieces = b"".join(self._pieces), []
            self._passing = asyncio.ensure_future(self._pass(body))

    async def _pass(self, body: bytes) -> None:
        """Answer a request; one without a body is a probe."""
        if not body:
            self._write(200, b"{}")
            return
        hashlib.sha256(body).digest()
        if self._engine is None or self._engine.closed:
            self._engine = await Connection.connect(self._engine_url)
        try:
            reply = await self._engine.request("POST", PATH, body)
        except Broken:
            self._write(502, b"")
            return
        self._write(reply.status, reply.body)

    def _write(self, status: int, body: bytes) -> None:
        if self._transport is not None:
            self._transport.writelines((b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n" % (status, len(body)), body))


def ideal(folder: Path, engine_url: str) -> OwnProcess:
    """The pipeline as a process, not started."""
    command = [sys.executable, "-m", "ops.bench.ideal", PORT, engine_url]
    return OwnProcess(command, folder / "ideal.log", environment=dict(os.environ))


async def main(port: int, engine_url: str) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Client(engine_url), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
