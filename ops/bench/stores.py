"""Small benchmarks of what lies in a store: how long a start takes, how large trees are."""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

import aiohttp

from ops.bench.client import Connection
from ops.bench.load import Conversation, opening_messages, timed_turn
from ops.bench.measure import MIB, Figures, report, save_figures, table
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, simulator, started, turnlog
from ops.bench.stored import copy_up_to, play
from ops.server import KeptServer, ServerProcess

POLL_S = 0.005
SHAPES = {"rows": "turnlog", "trees": "tree"}
NO_LIMIT = aiohttp.ClientTimeout(total=None)


# startup


def startup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)


async def startup(arguments: argparse.Namespace) -> int:
    """Time until a started server is ready and has committed its first turn, with an empty and with a full store."""
    cpu_sets = cores()
    rows: list[Figures] = []
    with simulator(cpu_sets) as engine:
        for count in (0, arguments.sessions):
            with folder_for_bench(arguments.folder) as folder:
                engines = [engine.base_url]
                kept = KeptServer(folder, upstreams=engines, arguments=["--migrate"])
                server = ServerProcess(folder, upstreams=engines).migrate()
                if count:
                    with started(server, cpu_sets):
                        await play(server.base_url, 1, arguments.turns)
                    copy_up_to(server.database_path, count)
                row = {"sessions": count, "database MiB": server.database_path.stat().st_size / MIB}
                for name, one in {"uvicorn": server, "turnlog serve": kept}.items():
                    times = [await _first_turn(one, cpu_sets, f"{name[0]}-{turn}") for turn in range(arguments.repeat)]
                    row[f"{name}: health answers s"] = median(up for up, _ in times)
                    row[f"{name}: first turn s"] = median(turn for _, turn in times)
                rows.append(row)
    table(rows)
    save_figures("startup", rows)
    return 0


async def _first_turn(server: ServerProcess, cpu_sets: Cores, session_id: str) -> tuple[float, float]:
    """Seconds from the start of the process to its first answer, and to a first committed turn."""
    body = Conversation(opening_messages(1024)).body()
    began = time.perf_counter()
    with pinned(cpu_sets.server):
        server.launch()
    try:
        while not server.answers():
            time.sleep(POLL_S)  # noqa: ASYNC251 - nothing else runs on this loop
        up = time.perf_counter() - began
        async with await Connection.connect(server.base_url) as connection:
            await connection.json("POST", "/sessions", {"session_id": session_id})
            await timed_turn(connection, f"/sessions/{session_id}/v1/chat/completions", body)
        return up, time.perf_counter() - began
    finally:
        server.stop()


# trees


def trees_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=16, help="turns of each session; half go on, half begin a branch")
    parser.add_argument("--words", type=int, default=400, help="words of each question")


async def trees(arguments: argparse.Namespace) -> int:
    """Trees of turns: tokens and bytes of an export with a row for each leaf, and with a row for each session."""
    figures: Figures = {"sessions": arguments.sessions, "turns": arguments.turns}
    cpu_sets = cores()
    with simulator(cpu_sets, "--seed", "1") as engine, turnlog(engine, cpu_sets, arguments.folder) as server:
        async with aiohttp.ClientSession(server.base_url, timeout=NO_LIMIT, raise_for_status=True) as http:
            for seed in range(arguments.sessions):
                await _grow(http, random.Random(seed), arguments.turns, arguments.words)
            figures["tokens stored"] = _tokens(await _export(http, shape="tree", branches="all"))
            for name, shape in SHAPES.items():
                lines = await _export(http, shape=shape)
                parquet = await _export(http, shape=shape, format="parquet")
                figures |= {name: len(lines.splitlines()), f"tokens in {name}": _tokens(lines)}
                figures |= {f"NDJSON MiB of {name}": len(lines) / MIB, f"Parquet MiB of {name}": len(parquet) / MIB}
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
