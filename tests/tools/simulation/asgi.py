"""Requests as a process's HTTP server hands them on, for what its routes alone know: names in headers, live streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Message

from app.api.head import Head
from app.api.turns import TurnRequest
from app.protocols.registry import protocol_at
from app.turn.in_flight import Stages
from tests.tools.simulation.process import Process


class Answer(msgspec.Struct):
    """What has been sent so far; `status` is 0 before that."""

    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""


class Requests:
    """Makes a schedule's requests, whose ids follow one another. `now` is the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ids: Iterator[str] = (f"r{number}" for number in itertools.count(1))

    def head(self, path: str, headers: Mapping[str, str], query: str = "") -> Head:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        fixed = {"type": "http", "method": "POST", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        return Head({**fixed, "path": path, "query_string": query.encode(), "headers": raw}, self._ids)

    async def turn(
        self,
        process: Process,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        heard: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """`heard` is told whenever more has been sent. Raises Disconnected."""
        answer, raw = Answer(), msgspec.json.encode(body)
        messages = iter([{"type": "http.request", "body": raw, "more_body": False}])

        async def receive() -> Message:
            return next(messages, None) or await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")
            heard(answer)

        async def answered() -> Answer:
            protocol = protocol_at(path)
            assert protocol is not None
            request = TurnRequest(process.service, protocol, self.head(path, headers), receive, send)
            request._stages = Stages(self._now)
            await request.run()
            return answer

        return await process.call(answered, lambda _: None)
