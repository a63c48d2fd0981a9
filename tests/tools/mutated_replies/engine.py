"""The engine: a small HTTP server whose replies are the simulator's, mutated; any bytes as a 200 of JSON."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import msgspec
from aiohttp import web

from ops.simulator.app import Simulator
from ops.simulator.wire import Config, Dialect
from tests.tools.mutated_replies.mutate import CONTROL, mutate

CHAT = "/v1/chat/completions"
MAX_BODY = 64 << 20
KEEPALIVE_S = 600.0
"""Idle connections stay, so that one which ends is a fault."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the next request of a session is to get: reply `number` of the run of `seed`; None: a sound one."""

    seed: int
    number: int | None
    dialect: str


@dataclass(frozen=True, slots=True)
class Served:
    """A reply as it left: its bytes, the mutation's class, the first row of routed experts that was asked for."""

    body: bytes
    kind: str
    start: int


class _Request(msgspec.Struct):
    """What the engine itself looks at."""

    messages: list[msgspec.Raw]
    routed_experts_start_len: int = 0
    routed_experts_prompt_start: int = 0


class Engine:
    """Listens on a port of its own inside `async with`. `orders` is written by the clients, `served` read by them."""

    def __init__(self, seed: int) -> None:
        self.orders: dict[str, Order] = {}
        self.served: dict[str, Served] = {}
        self.faults: list[str] = []
        self.base_url = ""
        dialects: tuple[Dialect, ...] = ("sglang", "vllm")
        self._simulators = {
            dialect: Simulator(
                # Without a prefix cache a reply depends on its own session alone.
                Config(dialect=dialect, seed=seed, reasoning=0.0, experts=(1, 2, 64), indexer=(1, 2), cache_tokens=0)
            )
            for dialect in dialects
        }

    async def __aenter__(self) -> Engine:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.Response(status=200 if request.path == "/health" else 404)
        session_id = request.headers.get("x-smg-routing-key", "")
        if session_id not in self.orders or request.path != CHAT:
            self.faults.append(f"the engine was asked for {request.path} by session {session_id!r}")
            return web.Response(status=404)
        order = self.orders.pop(session_id)
        served = self.served[session_id] = await self.reply(session_id, order, await request.read())
        return web.Response(body=served.body, content_type="application/json")

    async def reply(self, session_id: str, order: Order, body: bytes) -> Served:
        """The reply to a chat body, mutated as `order` says."""
        request = msgspec.json.decode(body, type=_Request)
        vllm = order.dialect == "vllm"
        start = request.routed_experts_prompt_start if vllm else request.routed_experts_start_len
        simulator = self._simulators["vllm" if vllm else "sglang"]
        reply = await simulator.generate(CHAT, body, _never)
        if reply is None or reply.status != 200:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            fields["messages"] = msgspec.Raw(b"[" + bytes(request.messages[-1]) + b"]")
            reply = await simulator.generate(CHAT, msgspec.json.encode(fields), _never)
        assert reply is not None
        if reply.status != 200:
            self.faults.append(f"the simulator refused a request of {session_id}: {reply.body[:200]!r}")
        if order.number is None:
            return Served(reply.body, CONTROL, start)
        changed, kind = mutate(random.Random(f"{order.seed}/{order.number}"), reply.body)
        return Served(changed, kind, start)


async def _never() -> None:
    """The simulator's client does not hang up."""
    await asyncio.Event().wait()
