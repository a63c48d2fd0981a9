"""A stand-in for pgbouncer in transaction mode, as it was before 1.21, for tests: real clients, a real server.

Each transaction of a client runs on any of a few server connections, chosen at random, so that whoever relies on what a
connection keeps beyond a transaction is found out. Named prepared statements are passed on as they are: they belong to
the connection on which they were parsed. Start-up parameters that pgbouncer does not track are refused.

PostgreSQL's protocol 3.0: https://www.postgresql.org/docs/current/protocol-flow.html; pgbouncer's rules:
https://www.pgbouncer.org/features.html and https://www.pgbouncer.org/config.html (ignore_startup_parameters).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter
from dataclasses import dataclass

from helpers.clusters import LoopThread

STARTUP, SSL, GSS, CANCEL = 196608, 80877103, 80877104, 80877102
TRACKED = frozenset(
    {
        *("user", "database", "client_encoding", "datestyle", "timezone"),
        *("standard_conforming_strings", "application_name", "intervalstyle"),
    }
)
"""Start-up parameters that pgbouncer takes; any other ends the connection."""

ANSWERED = frozenset(b"QSF")
"""Messages each of which the server answers with ReadyForQuery: Query, Sync, FunctionCall."""


@dataclass(eq=False)
class _Server:
    """A connection to PostgreSQL; `greeting` is what it said when it was made, up to the first ReadyForQuery."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    greeting: bytes = b""
    key: bytes = b""


@dataclass(eq=False)
class _Client:
    """`awaited` ReadyForQuery are still to come before its transaction can be over."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    server: _Server | None = None
    awaited: int = 0
    answering: asyncio.Task[None] | None = None


class Pooler:
    """Listens on `port` for clients of one user and database, on a thread of its own."""

    def __init__(self, to: int, *, servers: int = 3, seed: int = 1) -> None:
        self.handed_out: Counter[int] = Counter()
        """How many transactions each server connection has run."""
        self.refused: list[str] = []
        """Start-up parameters for which a client was turned away."""
        self._to = to
        self._room = asyncio.Semaphore(servers)
        self._most, self._made = servers, 0
        self._idle: list[_Server] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._random = random.Random(seed)
        self._clients: dict[bytes, _Client] = {}
        self._keys = iter(range(1, 1 << 31))
        self._thread = LoopThread()
        self._listener = self._thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def __enter__(self) -> Pooler:
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.call(self._end)
        self._thread.close()

    def _end(self) -> None:
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            body = await self._startup(reader, writer)
            if body is not None:
                await self._session(body, reader, writer)
        writer.close()

    async def _startup(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """The start-up packet of a client that may come in; TLS is declined, a cancel request passed on."""
        while True:
            length, code = struct.unpack("!II", await reader.readexactly(8))
            body = await reader.readexactly(length - 8)
            if code in (SSL, GSS):
                writer.write(b"N")
            elif code == CANCEL:
                await self._cancel(body)
                return None
            else:
                assert code == STARTUP, code
                break
        names = [name.decode().lower() for name in body.rstrip(b"\0").split(b"\0")[::2]]
        unknown = [name for name in names if name not in TRACKED]
        if not unknown:
            return struct.pack("!II", length, code) + body
        self.refused += unknown
        text = f"unsupported startup parameter: {unknown[0]}"
        writer.write(_message(b"E", b"SFATAL\0VFATAL\0C08P01\0M" + text.encode() + b"\0\0"))
        await writer.drain()
        return None

    async def _cancel(self, key: bytes) -> None:
        client = self._clients.get(key)
        if client is None or client.server is None:
            return
        _, writer = await asyncio.open_connection("127.0.0.1", self._to)
        writer.write(struct.pack("!II", 16, CANCEL) + client.server.key)
        await writer.drain()
        writer.close()

    async def _session(self, startup: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer, struct.pack("!II", next(self._keys), 0))
        self._clients[client.key] = client
        try:
            server = await self._take(startup)
            writer.write(server.greeting + _message(b"K", client.key) + _message(b"Z", b"I"))
            self._give_back(server)
            await self._forward(client, startup)
        finally:
            del self._clients[client.key]
            if client.answering is not None:
                client.answering.cancel()
            if client.server is not None:
                # What it left unfinished ends with its connection.
                client.server.writer.transport.abort()
                self._made -= 1
                self._room.release()

    async def _forward(self, client: _Client, startup: bytes) -> None:
        """The client's messages, each on the server connection that its transaction has."""
        while True:
            kind, message = await _read(client.reader)
            if kind == b"X":
                return
            if client.server is None:
                client.server = await self._take(startup)
                self.handed_out[id(client.server)] += 1
                client.answering = asyncio.create_task(self._answer(client, client.server))
            client.awaited += kind[0] in ANSWERED
            client.server.writer.write(message)
            await client.server.writer.drain()

    async def _answer(self, client: _Client, server: _Server) -> None:
        """The server's messages, until the transaction is over and the connection is somebody else's."""
        try:
            while True:
                kind, message = await _read(server.reader)
                client.writer.write(message)
                client.awaited -= kind == b"Z"
                if kind == b"Z" and message[5:] == b"I" and client.awaited == 0:
                    client.server = None
                    self._give_back(server)
                    await client.writer.drain()
                    return
        except (OSError, asyncio.IncompleteReadError):
            client.writer.transport.abort()

    async def _take(self, startup: bytes) -> _Server:
        """A new server connection while there may be more, then any that is free, waiting for one if need be."""
        await self._room.acquire()
        try:
            while self._made == self._most:
                server = self._idle.pop(self._random.randrange(len(self._idle)))
                if not server.reader.at_eof():
                    return server
                self._made -= 1
            self._made += 1
            try:
                return await self._connect(startup)
            except BaseException:
                self._made -= 1
                raise
        except BaseException:
            self._room.release()
            raise

    def _give_back(self, server: _Server) -> None:
        self._idle.append(server)
        self._room.release()

    async def _connect(self, startup: bytes) -> _Server:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers.append(writer)
        server = _Server(reader, writer)
        writer.write(startup)
        while True:
            kind, message = await _read(reader)
            if kind == b"Z":
                return server
            if kind == b"E":
                raise ConnectionResetError(message)
            if kind == b"K":
                server.key = message[5:]
            else:
                server.greeting += message


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A message's kind, and all of its bytes."""
    head = await reader.readexactly(5)
    body = await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
    return head[:1], head + body
