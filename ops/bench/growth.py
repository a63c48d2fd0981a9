"""Is turn 500 of a session as cheap as turn 1, in time and on disk, but for the request's own size?"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
from pathlib import Path
from typing import Any

from ops.bench.client import Connection
from ops.bench.latency import ASK, timed
from ops.bench.load import SIM, Conversation, opening_messages, reply_message
from ops.bench.measure import keep, table
from ops.bench.stand import Stand, stand

NEIGHBOURS = 9
"""Turns whose median stands for one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--request-bytes", type=int, default=2048, help="of the first request")
    parser.add_argument("--question-bytes", type=int, default=1024, help="what the client adds each turn")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    with stand(arguments.folder) as made:
        rows = await _measured(made, arguments)
    table(rows)
    print(f"written to {keep('growth', rows)}")
    return 0


async def _measured(made: Stand, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each place; a place is its neighbourhood, so that one slow sync does not decide."""
    places = [number for number in (1, 50, 100, 200, 500, 1000, 2000, 5000) if number <= arguments.turns]
    questions = opening_messages(arguments.question_bytes, seed=1)
    path = "/sessions/growth/v1/chat/completions"
    rows: list[dict[str, Any]] = []
    await _warm_up(made, arguments)
    async with (
        await Connection.connect(made.server.base_url) as server,
        await Connection.connect(made.engine_url) as engine,
    ):
        await server.json("POST", "/sessions", {"session_id": "growth"})
        conversation = Conversation(opening_messages(arguments.request_bytes), SIM, ASK)
        for place in places:
            first = max(1, place - NEIGHBOURS // 2)
            while conversation.turns < first - 1:
                reply, _ = await timed(server, path, conversation.body())
                conversation.answered(reply_message(reply), questions[0])
            before = stored_bytes(made)
            through, direct, sizes = list[float](), list[float](), list[int]()
            for _ in range(NEIGHBOURS):
                body = conversation.body()
                reply, seconds = await timed(server, path, body)
                through.append(seconds)
                direct.append((await timed(engine, "/v1/chat/completions", body))[1])
                sizes.append(sum(map(len, body)))
                conversation.answered(reply_message(reply), questions[0])
            rows.append(
                {
                    "turns": f"{first}-{conversation.turns}",
                    "through Turnlog ms": statistics.median(through) * 1000,
                    "engine directly ms": statistics.median(direct) * 1000,
                    "added ms": (statistics.median(through) - statistics.median(direct)) * 1000,
                    "request KiB": statistics.median(sizes) / 1024,
                    "bytes on disk a turn": (stored_bytes(made) - before) // NEIGHBOURS,
                }
            )
    return rows


async def _warm_up(made: Stand, arguments: argparse.Namespace) -> None:
    """Another session's turns, so that turn 1 does not pay for the process's first."""
    async with await Connection.connect(made.server.base_url) as server:
        await server.json("POST", "/sessions", {"session_id": "warm"})
        conversation = Conversation(opening_messages(arguments.request_bytes, seed=2), SIM, ASK)
        for _ in range(50):
            reply, _ = await timed(server, "/sessions/warm/v1/chat/completions", conversation.body())
            conversation.answered(reply_message(reply))


def stored_bytes(made: Stand) -> int:
    """Database and log file, after what the log file holds has been moved over."""
    connection = sqlite3.connect(made.server.database_path)
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()
    return sum(path.stat().st_size for path in made.folder.glob("turnlog.db*"))
