"""One turn's stream to its client: kept alive until the reply is committed, or live while it is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Send

from app.api.replies import ROLLED_BACK, left_out_header, start_reply
from app.protocols.base import CommittedReply, LiveRenderer, WireProtocol
from app.protocols.errors import ErrorFields
from app.protocols.sse import comment
from app.turn.in_flight import TurnReply
from app.turn.live import LiveStream
from app.upstream.headers import Headers

STREAM_MODE = "x-turnlog-stream-mode"


class ClientStream:
    """`proof_of` gives the proof of a turn's number. A slow client delays only what is sent to it, never the turn."""

    def __init__(self, send: Send, protocol: WireProtocol, live: LiveStream, proof_of: Callable[[int], str]) -> None:
        self.has_begun = False
        self._send = send
        self._protocol = protocol
        self._live = live
        self._proof_of = proof_of
        self._renderer: LiveRenderer | None = None

    async def until_reply(self, task: asyncio.Task[TurnReply], keepalive_s: float | None) -> None:
        """Send the deltas as they come, and keep the stream alive, until the task is done."""
        live = self._live
        while not task.done():
            news: set[asyncio.Future[Any]] = {task, live.news}
            await asyncio.wait(news, timeout=keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            if live.news.done():
                await self._send_deltas()
            elif not task.done():
                if not self.has_begun:
                    await self.begin()
                await self.write(self._protocol.keepalive, more=True)

    def head(self, headers: Headers) -> Headers:
        """The stream's headers with those of the reply."""
        headers = [(STREAM_MODE, self._live.decide()), *(header for header in headers if header[0] != "content-type")]
        return [*headers, ("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]

    async def begin(self) -> None:
        """Send the head before the reply is there."""
        self.has_begun = True
        await start_reply(self._send, 200, self.head(left_out_header(self._live.left_out)))

    async def _send_deltas(self) -> None:
        live = self._live
        deltas = live.take()
        if self._renderer is None:
            if not self.has_begun:
                await self.begin()
            self._renderer = self._protocol.live(CommittedReply(live.begun, self._proof_of(live.turn), live.echo))
        if events := b"".join(map(self._renderer.delta, deltas)):
            await self.write(events, more=True)

    def render(self, reply: CommittedReply) -> bytes:
        """The committed reply's stream, or what of it is left. Raises as `LiveRenderer.end`."""
        if self._renderer is None:
            return self._protocol.events(reply)
        return b"".join(map(self._renderer.delta, self._live.take())) + self._renderer.end(reply)

    async def tell(self, reply: TurnReply) -> None:
        """Say as comments what the head said of the reply, had the stream not begun before."""
        if reply.rolled_back:
            await self.write(comment(f"{ROLLED_BACK}: {reply.rolled_back}"), more=True)
        for name, value in () if self._live.left_out else left_out_header(reply.left_out):
            await self.write(comment(f"{name}: {value}"), more=True)

    async def fail(self, error: ErrorFields) -> None:
        await self.write((self._renderer.error if self._renderer else self._protocol.error_event)(error))

    async def write(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
