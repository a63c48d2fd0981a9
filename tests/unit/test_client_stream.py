"""A live stream to a client whose engine sends what cannot be rendered."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from app.api.head import Head, request_ids
from app.api.turns import TurnRequest
from app.domain.proofs import Proofs
from app.errors import AppError
from app.protocols.registry import PROTOCOLS
from app.services import Services
from app.turn.in_flight import TurnReply
from app.turn.live import LiveStream

BEGUN = b'{"model":1e999,"choices":[{"message":{"role":"assistant"}}]}'
"""Valid JSON, of which a number is beyond a double: the reply is only validated when it is whole."""


def test_a_beginning_that_cannot_be_rendered_ends_the_stream_with_an_error() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    async def turn() -> TurnReply:
        await asyncio.sleep(0.1)
        raise AssertionError("the turn goes on by itself")

    async def run() -> str:
        settings = SimpleNamespace(stream_keepalive_s=15)
        app = cast(Services, SimpleNamespace(proofs=Proofs(), settings=settings))
        scope: dict[str, Any] = {"method": "POST", "path": "/v1/messages", "headers": [], "client": None}
        request = TurnRequest(app, PROTOCOLS["messages"], Head(scope, request_ids()), receive, send)
        live = LiveStream()
        live.go_live(1, None)
        live.push(BEGUN, {"content": "Hi"})
        task = asyncio.ensure_future(turn())
        try:
            return await request._stream("s", task, live)
        finally:
            task.cancel()

    assert asyncio.run(run()) == AppError.code
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert not sent[1]["more_body"]
    event, data = sent[1]["body"].decode().strip().split("\n")
    assert (event, json.loads(data.removeprefix("data: "))["type"]) == ("event: error", "error")
