"""A turn whose deltas go to its client while the engine still generates.

    undecided ─▶ live: the engine is asked to stream ─▶ begun: its first delta has come
        └──────▶ whole, for good: the engine cannot, or the client's stream had to begin before it was asked

The turn pushes and never waits; the client's side takes what there is, however slowly. All that is kept for it is the
reply's text, whose memory is reserved as that of any reply.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app.domain.events import StreamMode
from app.domain.request import ChatRequest
from app.upstream.dialects import asked_for
from app.upstream.streams import STREAM, Delta

if TYPE_CHECKING:
    from app.services import Services
    from app.turn.engine_call import EngineCall
    from app.turn.in_flight import InFlightTurn


class LiveStream:
    """`news` resolves when there is something to take.

    `turn` is the turn's number, `echo` and `left_out` as in `TurnReply`, `begun` the engine's reply with an empty
    message.
    """

    def __init__(self) -> None:
        self.mode: StreamMode | None = None
        self.turn = 0
        self.echo: bytes | None = None
        self.left_out: tuple[str, ...] = ()
        self.begun = b""
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deltas: list[Delta] = []

    def go_live(self, turn: int, echo: bytes | None, left_out: tuple[str, ...] = ()) -> None:
        self.mode, self.turn, self.echo, self.left_out = "live", turn, echo, left_out

    def push(self, begun: bytes, delta: Delta) -> None:
        self.begun = begun
        self._deltas.append(delta)
        if not self.news.done():
            self.news.set_result(None)

    def take(self) -> list[Delta]:
        """What has come since the last call."""
        taken, self._deltas = self._deltas, []
        if self.news.done():
            self.news = self.news.get_loop().create_future()
        return taken

    def decide(self) -> StreamMode:
        """The mode, from now on: the stream has to begin."""
        if self.mode is None:
            self.mode = "whole"
        return self.mode


class LiveTurns:
    """Decides which turns are sent live, when their first request is about to be sent (`points.streaming`)."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def streaming(self, turn: InFlightTurn, call: EngineCall) -> None:
        """Have the engine stream. Not if the engines may not stream with ids, if a replay payload is needed, which no
        stream has, or if the generation may be continued by another."""
        live, request, session = turn.waiter.live, turn.request, turn.session
        if live is None or not isinstance(request, ChatRequest):
            return
        if (request.stream_mode or session.config.stream_mode) == "whole" or live.mode is not None:
            return
        settings = self._services.settings
        if self._services.engines.dialect != "vllm" or settings.replay or asked_for(request.params):
            return
        if (session.config.on_abort or settings.abort_policy) == "continue":
            return
        live.go_live(turn.opened.turn, request.echo, turn.left_out)
        turn.live, call.push, call.own = live, live.push, STREAM
