"""What is held while a reply is being sent to its client."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

from app.api.head import Head, request_ids
from app.api.turns import TurnRequest
from app.domain.proofs import Proofs
from app.protocols.registry import PROTOCOLS
from app.services import Services
from app.turn.in_flight import InFlightTurn, TurnReply


def test_what_was_found_out_for_a_turn_is_let_go_before_its_reply_is_sent() -> None:
    """A slow client would keep the request, the engine's reply and its payloads in memory."""
    held: list[int] = []

    def count() -> int:
        return sum(type(value) is InFlightTurn for value in gc.get_objects())

    async def send(message: Any) -> None:
        held.append(count())

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def take(turn: InFlightTurn, *rest: Any) -> TurnReply:
        held.append(count())
        return TurnReply(200, [], [b"{}"])

    settings = SimpleNamespace(max_request_bytes=1 << 20, on_disconnect="finish", history=None)
    app = SimpleNamespace(
        proofs=Proofs(),
        settings=settings,
        inflight=None,
        turns=SimpleNamespace(take=take),
    )
    scope: dict[str, Any] = {"method": "POST", "path": "/sessions/s/v1/chat/completions", "headers": [], "client": None}
    head = Head(scope, request_ids())
    request = TurnRequest(cast(Services, app), PROTOCOLS["chat"], head, receive, send)

    async def run() -> None:
        await request._turn("s", b"{}", cast(Any, SimpleNamespace(grow=lambda size: None)))

    before = count()
    asyncio.run(run())
    assert [number - before for number in held] == [1, 0, 0], "in the turn, with its head, with its body"
