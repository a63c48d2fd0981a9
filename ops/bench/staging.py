"""CPU of a long generation with its tokens staged, over that without."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp

from ops.bench.measure import cpu_s, percentile, save_figures, table
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, started
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

INTERVALS = ("0", "1", "0.1")
"""Values of TURNLOG_STAGE_TOKENS_S; 0 is off, so that replies come whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each client with each setting")
    parser.add_argument("--tokens", type=int, default=4000, help="of each reply")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens a second of each generation, one a chunk")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    found: dict[str, list[float]] = {interval: [] for interval in INTERVALS}
    with pinned(cpu_sets.others), SimulatorProcess("--dialect", "vllm", "--reasoning", "0") as engine:
        for _ in range(arguments.rounds):
            for interval, costs in found.items():
                costs.append(await _cost(engine.base_url, interval, arguments, cpu_sets, arguments.folder))
    own = percentile(found["0"], 50)
    rows = [
        {
            "staged every": "off" if interval == "0" else f"{interval} s",
            "CPU us a token": percentile(costs, 50),
            "over off": percentile(costs, 50) / own,
            "lowest": min(costs),
            "highest": max(costs),
        }
        for interval, costs in found.items()
    ]
    table(rows)
    save_figures("staging", {"rows": rows})
    return 0


async def _cost(engine: str, interval: str, arguments: argparse.Namespace, cpu_sets: Cores, at: Path | None) -> float:
    """Microseconds of the server's CPU for each token of one turn of all clients."""
    with folder_for_bench(at) as folder:
        environment = {"TURNLOG_UPSTREAM_DIALECT": "vllm", "TURNLOG_STAGE_TOKENS_S": interval}
        server = ServerProcess(folder, upstreams=[engine], environment=environment).migrate()
        with started(server, cpu_sets):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                number = itertools.count()
                await _turn(http, server.base_url, next(number), 8, arguments.rate)
                before = cpu_s(server.pid)
                turns = [
                    _turn(http, server.base_url, next(number), arguments.tokens, arguments.rate)
                    for _ in range(arguments.clients)
                ]
                await asyncio.gather(*turns)
                spent = cpu_s(server.pid) - before
    tokens: int = arguments.clients * arguments.tokens
    return spent * 1e6 / tokens


async def _turn(http: aiohttp.ClientSession, base: str, number: int, tokens: int, rate: float) -> None:
    sim: dict[str, Any] = {"completion_tokens": tokens, "latency_s": tokens / rate, "chunk_tokens": 1}
    body = {"model": "simulator", "messages": [{"role": "user", "content": f"{number}: a story"}], "sim": sim}
    async with http.post(f"{base}/sessions", json={}) as response:
        session_id = (await response.json())["session_id"]
    async with http.post(f"{base}/sessions/{session_id}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        await response.read()
