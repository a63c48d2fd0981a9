"""The engine: a small HTTP server whose replies are the simulator's, mutated; any bytes as a 200 of JSON."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from types import TracebackType

import msgspec

from ops.simulator.config import Config, Dialect
from ops.simulator.engine import Engine as Simulator
from tests.tools.mutated_replies.mutate import CONTROL, mutate


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
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines if text)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        session_id = headers.get("x-smg-routing-key", "")
        if line.startswith("GET "):
            status = b"200 OK" if line.startswith("GET /health ") else b"404 Not Found"
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)
            return True
        if session_id not in self.orders or not line.startswith("POST /v1/chat/completions "):
            self.faults.append(f"the engine was asked for {line!r} by session {session_id!r}")
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return True
        served = self.served[session_id] = await self.reply(session_id, self.orders.pop(session_id), body)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(served.body)
        )
        writer.write(served.body)
        return True

    async def reply(self, session_id: str, order: Order, body: bytes) -> Served:
        """The reply to a chat body, mutated as `order` says."""
        request = msgspec.json.decode(body, type=_Request)
        vllm = order.dialect == "vllm"
        start = request.routed_experts_prompt_start if vllm else request.routed_experts_start_len
        simulator = self._simulators["vllm" if vllm else "sglang"]
        reply = await simulator.chat(body, _never)
        if reply is None or reply.status != 200:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            fields["messages"] = msgspec.Raw(b"[" + bytes(request.messages[-1]) + b"]")
            reply = await simulator.chat(msgspec.json.encode(fields), _never)
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
