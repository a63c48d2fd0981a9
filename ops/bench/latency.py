"""Latency that a turn adds to a direct engine call; also that of fdatasync and, with --peer, of another recorder."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ops.bench.client import Broken, Connection
from ops.bench.measure import percentile, save_figures, sync_once_s, table
from ops.bench.peer import STORES, rllm_gateway
from ops.bench.sessions import SIM, TURN_GROWTH_BYTES, Conversation, opening_messages, reply_message, short_turns
from ops.bench.sizes import REQUESTED_FIELDS
from ops.bench.stand import Side, cores, folder_for_bench, simulator, started, turnlog
from ops.server import OwnProcess

TURNS_PER_SESSION = 8
WARM_UP_TURNS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=600, help="turns of the single client")
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--clients", type=int, default=64, help="clients of a second measurement; 0: none")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the second measurement")
    parser.add_argument("--peer", choices=STORES, help="also measure rllm-model-gateway with this store")
    parser.add_argument(
        "--spread", action="store_true", help="run all processes on both cores, instead of each server on one"
    )


class _Route(NamedTuple):
    """A server with Turnlog's routes, and a connection to it."""

    name: str
    server: OwnProcess
    connection: Connection


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores(arguments.spread)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engine = stack.enter_context(simulator(cpu_sets))
        servers: dict[str, OwnProcess] = {
            "Turnlog": stack.enter_context(turnlog(engine, cpu_sets, folder)),
        }
        if arguments.peer:
            gateway = rllm_gateway(arguments.peer, folder, engine.base_url)
            servers[f"rllm-model-gateway, {arguments.peer}"] = stack.enter_context(started(gateway, cpu_sets))
        routes = [
            _Route(name, server, await stack.enter_async_context(await Connection.connect(server.base_url)))
            for name, server in servers.items()
        ]
        direct = await stack.enter_async_context(await Connection.connect(engine.base_url))
        descriptor = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        stack.callback(os.close, descriptor)
        await _one_client(routes, direct, descriptor, WARM_UP_TURNS, arguments.request_bytes, "warm")
        found = await _one_client(routes, direct, descriptor, arguments.turns, arguments.request_bytes, "timed")
        rows = _rows(found)
        for route in routes if arguments.clients else ():
            script = short_turns(arguments.request_bytes, TURNS_PER_SESSION)
            side = Side([route.server], script, clients=arguments.clients, turns_per_session=TURNS_PER_SESSION)
            many = await side.measured(arguments.seconds)
            rows.append(_row(route.name, arguments.clients, many.latencies, None))
    table(rows)
    save_figures(f"latency-{arguments.request_bytes}", rows)
    return 0


async def _one_client(
    routes: Sequence[_Route], direct: Connection, descriptor: int, turns: int, request_bytes: int, name: str
) -> dict[str, list[float]]:
    """Seconds of each turn through each server, of the same request at the engine, and of an fdatasync, in turns."""
    found: dict[str, list[float]] = {key: [] for key in (*(route.name for route in routes), "engine", "fdatasync")}
    conversations: dict[str, Conversation] = {}
    opening = opening_messages(max(64, request_bytes - TURN_GROWTH_BYTES * (TURNS_PER_SESSION - 1) // 2 - 250))
    for number in range(turns):
        session = f"{name}-{number // TURNS_PER_SESSION}"
        for route in routes:
            if number % TURNS_PER_SESSION == 0:
                await route.connection.json("POST", "/sessions", {"session_id": session})
                conversations[route.name] = Conversation(opening, SIM, REQUESTED_FIELDS)
            conversation = conversations[route.name]
            body = conversation.body()
            reply, seconds = await timed(route.connection, f"/sessions/{session}/v1/chat/completions", body)
            found[route.name].append(seconds)
            conversation.answered(reply_message(reply))
        found["engine"].append((await timed(direct, "/v1/chat/completions", body))[1])
        found["fdatasync"].append(sync_once_s(descriptor))
    return found


def _rows(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The rows of the table. Turnlog's comes first; the other servers' have Turnlog's added p50 divided by their
    own."""
    *servers, engine, _ = found
    rows = [_row(name, 1, seconds, found[engine] if name in servers else None) for name, seconds in found.items()]
    for row in rows[1 : len(servers)]:
        row["Turnlog's added p50 / its"] = rows[0]["added p50 ms"] / row["added p50 ms"]
    return rows


def _row(name: str, clients: int, seconds: Sequence[float], engine: Sequence[float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"through": name, "clients": clients}
    for percent in (50, 99):
        own = percentile(seconds, percent)
        row[f"p{percent} ms"] = own * 1000
        row[f"added p{percent} ms"] = None if engine is None else (own - percentile(engine, percent)) * 1000
    return {**row, "Turnlog's added p50 / its": None}


async def timed(connection: Connection, path: str, body: tuple[bytes, ...]) -> tuple[bytes, float]:
    """Send a chat request; returns the reply's body and the seconds. Raises Broken if the status is not 200."""
    began = time.perf_counter()
    response = await connection.request("POST", path, body)
    seconds = time.perf_counter() - began
    if response.status != 200:
        raise Broken(f"{path} answered {response.status}: {response.body[:200]!r}")
    return response.body, seconds
