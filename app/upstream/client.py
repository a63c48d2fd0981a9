"""The client to all engines: what may be asked of them, and the bounds of what they answer."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal
from urllib.parse import quote, urlsplit

import msgspec

from app.upstream.body import PIECE, Body
from app.upstream.encoding import Decoder, Undecodable, decoder, is_bomb
from app.upstream.headers import Headers
from app.upstream.http import Connection, Connections, EngineError, Lost, NotSent, Origin
from app.upstream.streams import EVENT_STREAM, StreamReader
from workers.reply import LogprobsOf

MMAP_BYTES = 4 << 20
"""Replies larger than this get their own memory map."""

SHORT = 64 << 10
"""Parts of a body up to this size are joined before they are sent; longer bodies are sent as they lie in memory."""

PASSED_GETS = ("/version", "/get_model_info", "/model_info", "/weight_info", "/tokenizer_info", "/health_generate")
PASSED_POSTS = (
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
    *("/v1/chat/completions/render", "/v1/completions/render"),
)
"""What one engine is asked, where a trainer asks Turnlog."""

CHANGES = (
    *("/flush_cache", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/update_weights_from_disk", "/update_weight_version"),
    *("/load_lora_adapter", "/unload_lora_adapter"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""What every engine is told, where a trainer tells Turnlog."""

PATHS = (
    *PASSED_GETS,
    *PASSED_POSTS,
    *CHANGES,
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages/count_tokens"),
    *("/health", "/is_paused", "/server_info"),
    *("/abort_requests", "/inference/v1/abort_requests"),
    *("/abort_request", "/pause_generation", "/continue_generation", "/pause", "/resume"),
    *("/open_session", "/close_session"),
    "/workers",
    *("/generate", "/separate_reasoning", "/parse_function_call"),
)
"""All paths that are ever requested from an engine. No part of a client's request becomes part of a path."""

TEXT_PATHS = ("/chat/completions", "/completions")
"""Those of a text upstream, whose base URL has a version of its own."""

ASKED = PATHS + TEXT_PATHS

JSON = ("content-type", "application/json")

ONCE = ("connection", "close")
"""The header of a request whose connection is not used again: what an engine sends after its reply is nobody's."""

SMALL = 4 << 20
"""Largest reply to anything but a turn; its memory is not accounted."""

ERROR_BYTES = 1 << 20
"""Largest reply that is an error."""

REST_SHARE, MAX_REST_S = 0.02, 0.1
"""Where nobody waits for the deltas of a stream, its bytes are left with the kernel for this share of the time that it
has run, at most so many seconds: each read costs as much as reading ten tokens."""

SLICE = 16 << 10
"""Bytes of a stream that are read in one go, some ten to a hundred events."""

STREAM_SHARE, STREAM_BURST_S = 0.2, 0.02
"""A stream may take this share of the event loop, and so many seconds at once; what comes faster waits in the kernel.
An engine that generates takes a hundredth of it, and what it has not used while nothing came is not kept."""

TARGETS = 1024
"""How many URLs are kept in the form in which they are sent."""

Grow = Callable[[int], None]
"""Called with a number of bytes before they are held in memory; raises if there is no room."""


def _unbounded(size: int) -> None:
    """For small replies, whose memory is not accounted."""


class EngineReply(msgspec.Struct):
    """What an engine answered; `headers` have their names in lower case.

    What follows is of a generation (`Engines.generate`). `known` is the engine's weight version known when the request
    was sent. `dispatched` is the version of what was requested: its adapter's if known, else the engine's, else the one
    that a trainer named for the fleet. `logprobs_of` as in `TurnCommitted`. `is_native`: it is of SGLang's `/generate`,
    and its message has the whole text as content.
    """

    status: int
    headers: Headers
    body: Body
    engine: str = ""
    dispatched: str | None = None
    known: str | None = None
    logprobs_of: LogprobsOf | None = None
    is_native: bool = False


class TooLarge(EngineError):
    """The answer is larger than TURNLOG_MAX_UPSTREAM_BYTES."""


class Unreadable(EngineError):
    """The reply is compressed in a way that cannot be unpacked."""


class Withheld(Exception):
    """Nothing was sent: `may_send` refused when a connection was ready."""


class EngineClient:
    """POST and GET to an engine, without redirects, cookies or environment proxies. Compressed replies are unpacked.

    Made in a running event loop, where it is used.
    """

    def __init__(self, *, connect_timeout_s: float, timeout_s: float, max_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._connections = Connections(connect_timeout_s)
        self._targets: dict[str, tuple[Origin, str]] = {}

    async def close(self) -> None:
        await self._connections.close()

    async def post(
        self,
        url: str,
        body: bytes | Sequence[bytes | memoryview],
        headers: Headers,
        grow: Grow = _unbounded,
        may_send: Callable[[], bool] | None = None,
        stream: StreamReader | None = None,
    ) -> EngineReply:
        """`body` may be in parts. Calls `grow` with the reply's size before it is read, and `may_send` right before
        anything is sent.

        With `stream` a reply that is a stream is read into it; what is returned is the reply that it assembles.
        Raises NotSent, Lost, TimedOut, TooLarge, Unreadable; Withheld; BadStream.
        """
        parts = [body] if isinstance(body, bytes) else body
        return await self._request("POST", url, parts, headers, grow, may_send, stream)

    async def get(self, url: str, headers: Headers) -> EngineReply:
        """Raises NotSent, Lost, TimedOut, TooLarge, Unreadable."""
        return await self._request("GET", url, (), headers, _unbounded, None, None)

    async def _request(
        self,
        method: Literal["GET", "POST"],
        url: str,
        parts: Sequence[bytes | memoryview],
        headers: Headers,
        grow: Grow,
        may_send: Callable[[], bool] | None,
        stream: StreamReader | None,
    ) -> EngineReply:
        connections = self._connections
        deadline = connections.loop.time() + self._timeout_s
        origin, target = self._targets.get(url) or self._target(url)
        size = sum(map(len, parts))
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        text = "".join(lines)
        if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
            raise ValueError("a header to an engine has a line break")
        length = f"content-length: {size}\r\n" if method == "POST" else ""
        head = f"{method} {target}{text}{length}\r\n".encode("latin-1")
        while True:
            connection = connections.idle(origin) or await connections.connect(origin)
            was_used = connection.was_used
            if may_send is not None and not may_send():
                connections.keep(connection)
                raise Withheld
            is_kept, is_sent = False, True
            connection.begin(deadline)
            try:
                if size <= SHORT:
                    connection.transport.write(b"".join((head, *parts)))
                else:
                    is_sent = await _send(connection, head, parts)
                await connection.head()
                reply = await self._read(connection, grow, stream)
                is_sent = is_sent and not connection.transport.get_write_buffer_size()
                is_kept = is_sent and connection.keeps_alive and not connection.is_bad and ONCE not in headers
                return reply
            except Lost:
                # An engine may close a connection while it is asked again; a POST may have been heard, and is not
                # repeated.
                if method == "POST" or not was_used or connection.heads:
                    raise
            finally:
                if is_kept:
                    connections.keep(connection)
                else:
                    connection.transport.abort()

    def _target(self, url: str) -> tuple[Origin, str]:
        """What `target_of` says, which is kept. Raises ValueError for a path that no engine is asked for."""
        if not url.partition("?")[0].endswith(ASKED):
            raise ValueError("an engine is not asked for such a path")
        if len(self._targets) >= TARGETS:
            self._targets.clear()
        target = self._targets[url] = target_of(url)
        return target

    async def _read(self, connection: Connection, grow: Grow, stream: StreamReader | None) -> EngineReply:
        """Raises as `post`."""
        status, headers = connection.status, connection.headers
        if stream is not None and status == 200:
            kind = connection.named.get("content-type", "").partition(";")[0].strip().lower()
            if kind == EVENT_STREAM:
                return EngineReply(status, _as_json(headers), await self._read_stream(connection, grow, stream))
        most = ERROR_BYTES if status >= 400 else SMALL if grow is _unbounded else self._max_bytes
        limit = min(most, self._max_bytes)
        length = connection.length
        try:
            if length is None or "content-encoding" in connection.named:
                pieces: list[bytes] = []
                size = 0
                async for piece in _plain_pieces(connection):
                    size += len(piece)
                    if size > limit:
                        raise TooLarge(f"more than {limit} bytes")
                    grow(len(piece))
                    pieces.append(piece)
                return EngineReply(status, headers, Body(pieces))
            if length > limit:
                raise TooLarge(f"{length} bytes")
        except (Unreadable, TooLarge) as error:
            if status < 400:
                raise
            return EngineReply(status, _as_json(headers), Body([_hidden_error(error)]))
        grow(length)
        if length > MMAP_BYTES:
            return EngineReply(status, headers, await _read_to_mmap(connection, length))
        if not connection.is_complete:
            connection.takes_whole = True
            await connection.more()
        return EngineReply(status, headers, Body(connection.take()))

    async def _read_stream(self, connection: Connection, grow: Grow, stream: StreamReader) -> Body:
        """The stream's bytes count as the reply's: what is kept of them is less."""
        size = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        pace = Pace(began)
        async for piece in _plain_pieces(connection):
            size += len(piece)
            if size > self._max_bytes:
                raise TooLarge(f"more than {self._max_bytes} bytes")
            grow(len(piece))
            for at in range(0, len(piece), SLICE):
                started = loop.time()
                stream.feed(piece[at : at + SLICE])
                rest_s = pace.rest(started, loop.time())
                if rest_s or at + SLICE < len(piece) or connection.pieces:
                    await asyncio.sleep(rest_s)
            if not stream.is_live and not connection.is_complete:
                connection.pause_reading()
                await asyncio.sleep(min(REST_SHARE * (loop.time() - began), MAX_REST_S))
                connection.resume_reading()
        return Body([stream.reply()])


class Pace:
    """How fast a stream may be read that began at `ended` (seconds)."""

    def __init__(self, ended: float) -> None:
        self._ended = ended
        self._left_s = STREAM_BURST_S

    def rest(self, started: float, ended: float) -> float:
        """A slice was read from `started` to `ended`: how long the next one waits."""
        earned = STREAM_SHARE * (started - self._ended)
        self._left_s = min(self._left_s + earned, STREAM_BURST_S) - (ended - started)
        self._ended = ended
        return max(-self._left_s / STREAM_SHARE, 0)


def target_of(url: str) -> tuple[Origin, str]:
    """Where the URL leads, and a request's head behind its method, up to the headers that are its own. Raises NotSent
    for a URL that is malformed."""
    try:
        parts = urlsplit(url)
        host, port, is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        name = host if ":" in host else host.encode("idna").decode("ascii")
    except ValueError as error:
        raise NotSent("its URL is malformed") from error
    if parts.scheme not in ("http", "https") or not name or not url.isprintable() or parts.fragment:
        raise NotSent("its URL is malformed")
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
    query = f"?{quote(parts.query, safe='/?%:@!$&()*+,;=~')}" if parts.query else ""
    shown = (f"[{name}]" if ":" in name else name) + ("" if port is None else f":{port}")
    return Origin(is_tls, name, port or (443 if is_tls else 80)), f"{path}{query} HTTP/1.1\r\nhost: {shown}\r\n"


async def _send(connection: Connection, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
    """Write a long request, at most PIECE bytes at a time, as fast as the connection takes them; False if not all was
    written: the reply came first, or none will."""
    held: list[bytes | memoryview] = [head]
    size = len(head)
    for part in parts:
        for start in range(0, len(part), PIECE):
            piece = part if len(part) <= PIECE else memoryview(part)[start : start + PIECE]
            if size + len(piece) > PIECE:
                connection.transport.writelines(held)
                if not await connection.may_write():
                    return False
                held, size = [], 0
            held.append(piece)
            size += len(piece)
    connection.transport.writelines(held)
    return True


async def _plain_pieces(connection: Connection) -> AsyncIterator[bytes]:
    """The body as it comes, unpacked. Raises EngineError."""
    unpack = _decoder(connection)
    packed = unpacked = 0
    try:
        while True:
            await connection.more()
            if piece := b"".join(connection.take()):
                if unpack is None:
                    yield piece
                    continue
                packed += len(piece)
                for plain in unpack.feed(piece):
                    unpacked += len(plain)
                    if is_bomb(packed, unpacked):
                        raise TooLarge(f"{packed} bytes unpack to more than {unpacked - len(plain)}")
                    if plain:
                        yield plain
                        await asyncio.sleep(0)
            if connection.is_complete and not connection.pieces:
                break
        if unpack is not None:
            unpack.finish()
    except Undecodable as error:
        raise Unreadable(str(error)) from error


def _decoder(connection: Connection) -> Decoder | None:
    """Raises Unreadable for an unknown encoding."""

    def values(header: str) -> str:
        return ",".join(value for name, value in connection.headers if name == header).lower()

    if "transfer-encoding" in connection.named and values("transfer-encoding") != "chunked":
        raise Unreadable(f"its transfer-encoding is {values('transfer-encoding'):.32}")
    try:
        return decoder(values("content-encoding"))
    except Undecodable as error:
        raise Unreadable(str(error)) from error


def _as_json(headers: Headers) -> Headers:
    """The headers of a reply whose body was replaced by JSON."""
    return [*((name, value) for name, value in headers if name != "content-type"), JSON]


def _hidden_error(error: Unreadable | TooLarge) -> bytes:
    """In place of an engine's error: the client still gets what matters most, the status and `Retry-After`."""
    message = f"the engine's error cannot be shown: {error}"
    return msgspec.json.encode({"error": {"message": message, "type": "upstream_error", "code": None}})


async def _read_to_mmap(connection: Connection, length: int) -> Body:
    """A very large reply in its own memory map, returned to the system as soon as it is released.

    Freed pieces would stay with the process's allocator. Pages are allocated as they are written.
    """
    area = mmap.mmap(-1, length)
    at = 0
    while at < length:
        await connection.more()
        for piece in connection.take():
            area[at : at + len(piece)] = piece
            at += len(piece)
        if connection.is_complete:
            break
    return Body([memoryview(area)[:at]])
