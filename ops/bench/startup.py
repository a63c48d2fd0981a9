"""Time until a started server is ready and has committed its first turn, with an empty and with a full store."""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from ops.bench.client import Connection
from ops.bench.load import Conversation, opening_messages, timed_turn
from ops.bench.measure import save_figures, table
from ops.bench.stand import cores, folder_for_bench, pinned, simulator
from ops.bench.stored import fill
from ops.server import ServerProcess

POLL_S = 0.005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    rows: list[dict[str, Any]] = []
    with simulator(cpu_sets) as engine:
        for count in (0, arguments.sessions):
            with folder_for_bench(arguments.folder) as folder:
                server = ServerProcess(folder, upstreams=[engine.base_url]).migrate()
                await fill(server.environment["TURNLOG_DATABASE_URL"], count, arguments.turns)
                times = [
                    await _first_turn(server, cpu_sets.server, f"first-{number}") for number in range(arguments.repeat)
                ]
                rows.append(
                    {
                        "sessions": count,
                        "database MiB": server.database_path.stat().st_size / 2**20,
                        "health answers s": median(up for up, _ in times),
                        "first turn s": median(turn for _, turn in times),
                    }
                )
    table(rows)
    save_figures("startup", rows)
    return 0


async def _first_turn(server: ServerProcess, cpus: set[int], session_id: str) -> tuple[float, float]:
    """Seconds from the start of the process to its first answer, and to a first committed turn."""
    body = Conversation(opening_messages(1024)).body()
    began = time.perf_counter()
    with pinned(cpus):
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
