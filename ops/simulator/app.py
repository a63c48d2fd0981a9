"""The ASGI application of the simulator: routing, and the delivery of replies.

It uses no framework, since the simulator shares its cores with the server under benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from ops.simulator import openai, sglang, vllm
from ops.simulator.control import COMMON
from ops.simulator.engine import NOT_FOUND, Engine, Wire
from ops.simulator.running import HungUp, ReceivedRequest
from ops.simulator.wire import BadRequest, Config, Dialect, Reply, json_reply

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_WIRES: dict[Dialect, Wire] = {"sglang": sglang, "vllm": vllm, "openai": openai}


class Simulator:
    """An ASGI application that answers as one inference engine."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.engine = Engine(self.config, _WIRES[self.config.dialect])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _read_body(receive) if scope["type"] == "http" else None
        if body is None:
            return
        seen = ReceivedRequest(scope["path"], scope["headers"], body)
        if not seen.path.startswith("/sim/"):
            self.engine.requests.add(seen)
        reply = await self._answer(scope, body, receive)
        if reply is not None:
            await _deliver(reply, receive, send)
            seen.answered = time.monotonic()

    async def generate(
        self, path: str, body: bytes, hung_up: HungUp, request_id: str | None = None, session: str | None = None
    ) -> Reply | None:
        """Answer a request of a route that generates; None if the client left. Raises KeyError for another route."""
        route = self.engine.wire.routes(self.engine)["POST", path]
        return await self.engine.answer(route, body, hung_up, request_id, session)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive) -> Reply | None:
        engine, method, path = self.engine, scope["method"], scope["path"]
        if self.config.dialect == "openai" and not path.startswith("/sim/"):
            refusal = openai.refusal(path, scope["headers"], body, self.config.api_key)
            if refusal is not None:
                return refusal
        routes = engine.wire.routes(engine)
        if route := routes.get((method, path)):
            names = _header(scope, b"x-request-id"), _header(scope, b"x-smg-routing-key")
            return await engine.answer(route, body, lambda: _hung_up(receive), *names)
        controls = {**COMMON, **engine.wire.control(engine, path)}
        control = controls.get((method, path))
        if control is None:
            is_known = any(path == known for _, known in (*controls, *routes))
            return json_reply({"detail": "Method Not Allowed"}, 405) if is_known else json_reply(NOT_FOUND, 404)
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        try:
            return await control.reply(engine, body, query)
        except msgspec.DecodeError as error:
            return engine.wire.error(str(error), 400, "Bad Request")
        except BadRequest as error:
            return engine.wire.error(str(error), error.status)


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; ``None`` if the client disconnected first."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _deliver(reply: Reply, receive: Receive, send: Send) -> None:
    if reply.never:
        await _hung_up(receive)
        return
    parts = reply.parts or (b"",)
    headers = [*reply.headers]
    if reply.content_type:
        headers.append((b"content-type", reply.content_type))
    if reply.content_type != b"text/event-stream":
        headers.append((b"content-length", b"%d" % sum(map(len, parts))))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.ends_at is not None:
        await send({"type": "http.response.body", "body": reply.body[: reply.ends_at], "more_body": True})
        # If the body is unfinished at the return, the server closes the socket.
        return
    if reply.over_s:
        await _stream(parts, reply.over_s, receive, send)
        return
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


async def _stream(parts: Sequence[bytes], over_s: float, receive: Receive, send: Send) -> None:
    """Send the parts over this time, unless the client leaves."""
    loop = asyncio.get_running_loop()
    began, gone = loop.time(), asyncio.create_task(_hung_up(receive))
    try:
        for number, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts) - 1})
            early = began + over_s * (number + 1) / len(parts) - loop.time()
            if gone.done():
                return
            if early > 0 and number < len(parts) - 1:
                await asyncio.sleep(early)
    finally:
        gone.cancel()
