"""Time to the first token of a live stream through Turnlog, over the engine's own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ops.bench.measure import percentile, save_figures, table
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, started
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

ASKED = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "stream_options": {"include_usage": True}}
"""What Turnlog asks of vLLM: the engine's own stream has the same in it."""

TEXT = ("content", "reasoning", "reasoning_content")


class Way(NamedTuple):
    """A protocol's path, and its names for the messages and the limit of a request."""

    path: str
    history: str
    limit: str


WAYS = {
    "chat": Way("/v1/chat/completions", "messages", "max_tokens"),
    "messages": Way("/v1/messages", "messages", "max_tokens"),
    "responses": Way("/v1/responses", "input", "max_output_tokens"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", help="base URL of a running vLLM; by default the simulator")
    parser.add_argument("--model", default="simulator", help="the model that the engine serves")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=400, help="of each way, in all")
    parser.add_argument("--tokens", type=int, default=64, help="limit of each reply")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds that the simulator generates")


async def main(arguments: argparse.Namespace) -> int:
    with _engine(arguments.engine, cores()) as url, _turnlog(url, cores(), arguments.folder) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            bench = _Bench(http, url, server.base_url, arguments)
            await bench.turn("engine")
            found: dict[str, list[float]] = {name: [] for name in ("engine", *WAYS)}
            for _ in range(-(-arguments.turns // (10 * arguments.clients))):
                for name, times in found.items():
                    clients = [bench.turns(name, 10) for _ in range(arguments.clients)]
                    times += itertools.chain(*await asyncio.gather(*clients))
    rows = [_row(name, times, found["engine"]) for name, times in found.items()]
    table(rows)
    save_figures("live", {"rows": rows})
    return 0


@contextlib.contextmanager
def _engine(url: str | None, cpu_sets: Cores) -> Iterator[str]:
    """The caller shares the core of the simulator; a real engine has its own."""
    if url is not None:
        yield url
        return
    with pinned(cpu_sets.others), SimulatorProcess("--dialect", "vllm", "--reasoning", "0") as engine:
        yield engine.base_url


@contextlib.contextmanager
def _turnlog(engine: str, cpu_sets: Cores, folder: Path | None) -> Iterator[ServerProcess]:
    with folder_for_bench(folder) as made:
        environment = {"TURNLOG_UPSTREAM_DIALECT": "vllm"}
        server = ServerProcess(made, upstreams=[engine], environment=environment).migrate()
        with started(server, cpu_sets):
            yield server


def _row(name: str, times: list[float], own: list[float]) -> dict[str, Any]:
    p50, p99 = (percentile(times, percent) for percent in (50, 99))
    return {
        "first token from": "the engine" if name == "engine" else f"Turnlog, {name}",
        "p50 ms": p50 * 1000,
        "p99 ms": p99 * 1000,
        "p50 / engine": p50 / percentile(own, 50),
        "p99 / engine": p99 / percentile(own, 99),
        "turns": len(times),
    }


class _Bench:
    def __init__(self, http: aiohttp.ClientSession, engine: str, turnlog: str, arguments: argparse.Namespace) -> None:
        self._http = http
        self._engine = engine
        self._turnlog = turnlog
        self._arguments = arguments
        self._numbers = itertools.count()

    async def turns(self, name: str, count: int) -> list[float]:
        return [await self.turn(name) for _ in range(count)]

    async def turn(self, name: str) -> float:
        """Seconds from the request to the first text of the reply, which is then read to its end. Each turn begins a
        session, and no two prompts are the same."""
        arguments = self._arguments
        way, base, more = WAYS["chat"], self._engine, dict(ASKED)
        if name != "engine":
            way, more = WAYS[name], {}
            async with self._http.post(f"{self._turnlog}/sessions", json={"stream_mode": "live"}) as response:
                base = f"{self._turnlog}/sessions/{(await response.json())['session_id']}"
        said = {"role": "user", "content": f"{next(self._numbers)}: tell me a story."}
        body = {"model": arguments.model, way.history: [said], "stream": True, way.limit: arguments.tokens, **more}
        if arguments.engine is None:
            body["sim"] = {"latency_s": arguments.latency, "completion_tokens": arguments.tokens}
        began, first = time.perf_counter(), 0.0
        async with self._http.post(base + way.path, json=body) as response:
            response.raise_for_status()
            async for data in _events(response):
                if not first and _has_text(data):
                    first = time.perf_counter() - began
            if name != "engine" and response.headers["x-turnlog-stream-mode"] != "live":
                raise ValueError("the stream was not live")
        return first


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


def _has_text(event: Any) -> bool:
    """Is it a chat's chunk with text, or a delta of Messages or Responses?"""
    if "choices" in event:
        return any(choice["delta"].get(name) for choice in event["choices"] for name in TEXT)
    return str(event["type"]).endswith(("content_block_delta", "_text.delta"))
