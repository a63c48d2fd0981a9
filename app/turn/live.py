"""A turn whose deltas go to its client while the engine still generates.

    undecided ─▶ live: the engine is asked to stream ─▶ begun: its first delta has come
        └──────▶ whole, for good: the engine cannot, or the client's stream had to begin before it was asked

The turn pushes and never waits; the client's side takes what there is, however slowly. All that is kept for it is the
reply's text, whose memory is reserved as that of any reply.
"""

from __future__ import annotations

import asyncio

from app.domain.events import StreamMode
from app.upstream.deltas import Delta


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
