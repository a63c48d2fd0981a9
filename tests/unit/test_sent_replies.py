"""What is held while a reply is being sent to its client."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

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


@pytest.mark.parametrize("fault", [ConnectionResetError, asyncio.CancelledError])
def test_a_reply_that_could_not_be_sent_is_undelivered(fault: type[BaseException]) -> None:
    """Else its turn would count as on its way for ever, and a retry without a mark would generate again."""
    told: list[tuple[str, object]] = []

    def record_delivery(session_id: str, turn: int, *, delivered: bool, is_replay: bool) -> None:
        told.append(("delivered", delivered))

    retries = SimpleNamespace(sending=lambda *turn: told.append(("sending", turn)), record_delivery=record_delivery)
    app = cast(Services, SimpleNamespace(inflight=None, retries=retries))
    scope: dict[str, Any] = {"method": "POST", "path": "/sessions/s/v1/chat/completions", "headers": [], "client": None}
    request = TurnRequest(app, PROTOCOLS["chat"], Head(scope, request_ids()), cast(Any, None), cast(Any, None))

    async def sending() -> None:
        raise fault

    with pytest.raises(fault):
        asyncio.run(request._deliver("s", TurnReply(200, [], [b"{}"], turn=3), sending()))
    assert told == [("sending", ("s", 3)), ("delivered", False)]
