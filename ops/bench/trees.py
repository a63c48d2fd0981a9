"""Trees of turns: tokens and bytes of an export with a row for each leaf, and with a row for each session."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import aiohttp

from ops.bench.measure import report
from ops.bench.stand import folder_for_bench
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

MIB = 1 << 20
SHAPES = {"rows": "turnlog", "trees": "tree"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=16, help="turns of each session; half go on, half begin a branch")
    parser.add_argument("--words", type=int, default=400, help="words of each question")


async def main(arguments: argparse.Namespace) -> int:
    figures: dict[str, Any] = {"sessions": arguments.sessions, "turns": arguments.turns}
    with (
        folder_for_bench(arguments.folder) as folder,
        SimulatorProcess("--seed", "1") as engine,
        ServerProcess(folder, upstreams=[engine.base_url]).migrate() as server,
    ):
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(server.base_url, timeout=timeout, raise_for_status=True) as http:
            for seed in range(arguments.sessions):
                await _grow(http, random.Random(seed), arguments.turns, arguments.words)
            figures["tokens stored"] = _tokens(await _export(http, shape="tree", branches="all"))
            for name, shape in SHAPES.items():
                lines = await _export(http, shape=shape)
                figures |= {
                    name: len(lines.splitlines()),
                    f"tokens in {name}": _tokens(lines),
                    f"NDJSON MiB of {name}": len(lines) / MIB,
                    f"Parquet MiB of {name}": len(await _export(http, shape=shape, format="parquet")) / MIB,
                }
    report(f"trees-{arguments.sessions}x{arguments.turns}x{arguments.words}", figures)
    return 0


async def _grow(http: aiohttp.ClientSession, chance: random.Random, turns: int, words: int) -> None:
    async with http.post("/sessions", json={"history": "tree"}) as response:
        path = f"/sessions/{(await response.json())['session_id']}/v1/chat/completions"
    histories: list[list[dict[str, Any]]] = [[]]
    for turn in range(turns):
        text = f"{turn} " + " ".join(f"word{chance.randrange(1000)}" for _ in range(words))
        history = histories[-1] if chance.random() < 0.5 else chance.choice(histories[min(turn, 1) :])
        messages = [*history, {"role": "user", "content": text}]
        sim = {"tool_calls": False, "completion_tokens": words}
        async with http.post(path, json={"model": "simulator", "messages": messages, "sim": sim}) as response:
            histories.append([*messages, (await response.json())["choices"][0]["message"]])


async def _export(http: aiohttp.ClientSession, **query: str) -> bytes:
    async with http.get("/export", params=query) as response:
        return await response.read()


def _tokens(lines: bytes) -> int:
    return sum(len(json.loads(line)["tokens"]) for line in lines.splitlines())
