"""CPU of an HTTP call to an engine by client library: what the choice on the hot path rests on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from ops.bench.load import SIM, Conversation, opening_messages
from ops.bench.measure import keep, table
from ops.bench.stand import cores, pinned
from ops.simulator.process import SimulatorProcess

WARM_UP_REQUESTS = 100

Post = Callable[[str, bytes], Awaitable[bytes]]
"""POST a body to a URL and read the reply."""

HEADERS = {"content-type": "application/json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--request-bytes", type=int, default=2048)


async def main(arguments: argparse.Namespace) -> int:
    places = cores()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        with pinned(places.others):
            engine = stack.enter_context(SimulatorProcess("--reasoning", "0"))
        stack.enter_context(pinned(places.server))
        url = f"{engine.base_url}/v1/chat/completions"
        body = b"".join(Conversation(opening_messages(arguments.request_bytes), SIM).body())
        for name, opened in CLIENTS.items():
            for concurrent in (1, 64):
                async with opened() as post:
                    await _send(post, url, body, WARM_UP_REQUESTS, concurrent)
                    rows.append(
                        {
                            "client": name,
                            "concurrent": concurrent,
                            **await _send(post, url, body, arguments.requests, concurrent),
                        }
                    )
    table(rows)
    print(f"written to {keep('clients', rows)}")
    return 0


async def _send(post: Post, url: str, body: bytes, requests: int, concurrent: int) -> dict[str, float]:
    """This process's CPU and the wall clock of so many requests."""
    waiting = iter(range(requests))

    async def work() -> None:
        for _ in waiting:
            await post(url, body)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrent)))
    used, seconds = time.process_time() - cpu, time.perf_counter() - began
    return {"CPU ms per request": used * 1000 / requests, "requests per second": requests / seconds}


@contextlib.asynccontextmanager
async def _aiohttp() -> AsyncIterator[Post]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(url: str, body: bytes) -> bytes:
            async with session.post(url, data=body, headers=HEADERS) as response:
                return await response.read()

        yield post


@contextlib.asynccontextmanager
async def _httpx(transport: httpx.AsyncBaseTransport | None = None) -> AsyncIterator[Post]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(transport=transport, limits=limits, trust_env=False, timeout=60) as client:

        async def post(url: str, body: bytes) -> bytes:
            return (await client.post(url, content=body, headers=HEADERS)).content

        yield post


@contextlib.asynccontextmanager
async def _httpx_on_aiohttp() -> AsyncIterator[Post]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with _httpx(AiohttpTransport(client=session)) as post:
        yield post


CLIENTS: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Post]]] = {
    "aiohttp": _aiohttp,
    "httpx on an aiohttp transport": _httpx_on_aiohttp,
    "httpx": _httpx,
}
