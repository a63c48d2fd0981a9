"""What a turn costs its client over the engine called directly, and what the disk's own sync takes of it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ops.bench.client import Broken, Connection
from ops.bench.load import SIM, TURN_GROWTH_BYTES, Conversation, opening_messages, reply_message
from ops.bench.measure import percentile, report, sync_once_s
from ops.bench.stand import Stand, stand

TURNS_PER_SESSION = 8
WARM_UP_TURNS = 100

ASK = (
    b',"logprobs":true,"top_logprobs":0,"return_meta_info":true,"return_prompt_token_ids":true,"return_token_ids":true'
)
"""What Turnlog asks an engine for. Sent both ways, so that the engine has the same work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")
    parser.add_argument("--database-url", help="another store than a new SQLite file; must be empty")


async def main(arguments: argparse.Namespace) -> int:
    with stand(arguments.folder, arguments.database_url) as made:
        await _measured(made, WARM_UP_TURNS, arguments.request_bytes, "warm")
        through, direct, syncs = await _measured(made, arguments.turns, arguments.request_bytes, "timed")
    figures: dict[str, float] = {"turns": len(through)}
    for percent in (50, 99):
        figures[f"through Turnlog p{percent} ms"] = percentile(through, percent) * 1000
        figures[f"engine directly p{percent} ms"] = percentile(direct, percent) * 1000
        figures[f"added p{percent} ms"] = (percentile(through, percent) - percentile(direct, percent)) * 1000
        figures[f"fdatasync of 4 KiB p{percent} ms"] = percentile(syncs, percent) * 1000
    report(f"latency-{arguments.request_bytes}", figures)
    return 0


async def _measured(
    made: Stand, turns: int, request_bytes: int, name: str
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each turn, of the same request at the engine, and of a sync, one after the other."""
    through, direct, syncs = list[float](), list[float](), list[float]()
    opening = opening_messages(max(64, request_bytes - TURN_GROWTH_BYTES * (TURNS_PER_SESSION - 1) // 2 - 250))
    descriptor = os.open(made.folder / "sync", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        async with (
            await Connection.connect(made.server.base_url) as server,
            await Connection.connect(made.engine_url) as engine,
        ):
            for number in range(turns):
                index = number // TURNS_PER_SESSION
                if number % TURNS_PER_SESSION == 0:
                    await server.json("POST", "/sessions", {"session_id": f"{name}-{index}"})
                    conversation = Conversation(opening, SIM, ASK)
                body = conversation.body()
                reply, seconds = await timed(server, f"/sessions/{name}-{index}/v1/chat/completions", body)
                through.append(seconds)
                direct.append((await timed(engine, "/v1/chat/completions", body))[1])
                syncs.append(sync_once_s(descriptor))
                conversation.answered(reply_message(reply))
    finally:
        os.close(descriptor)
    return through, direct, syncs


async def timed(connection: Connection, path: str, body: tuple[bytes, ...]) -> tuple[bytes, float]:
    """A chat request's reply and its seconds. Raises Broken for anything but a 200."""
    began = time.perf_counter()
    response = await connection.request("POST", path, body)
    seconds = time.perf_counter() - began
    if response.status != 200:
        raise Broken(f"{path} answered {response.status}: {response.body[:200]!r}")
    return response.body, seconds
