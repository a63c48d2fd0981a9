"""Turnlog beside rllm-model-gateway, which records turns too, and the engine alone: latency of a client, then load.

The gateway runs from its published package in an environment of its own. Version 0.1.0 has Turnlog's routes for
sessions and chat. It writes a trace to SQLite (`journal_mode=DELETE, synchronous=NORMAL`) in the background after the
reply, its default, or before it with `sync_traces`, which exists only in its configuration file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import venv
from pathlib import Path
from typing import Any

from ops.bench.client import Connection
from ops.bench.load import REQUESTED_FIELDS, SIM, SIZES, Conversation, opening_messages, reply_message, timed_turn
from ops.bench.measure import percentile, save_figures, sync_once_s, table
from ops.bench.stand import Side, cores, folder_for_bench, simulator, started, turnlog
from ops.server import ROOT, OwnProcess

PACKAGE, VERSION = "rllm-model-gateway", "0.1.0"
STORES = ("sqlite-sync", "sqlite", "memory")
"""SQLite, written before the reply; SQLite, written after it (the gateway's defaults); memory, written before it."""

TURNS_PER_SESSION = 8
WARM_UP_TURNS = 100
OPENING_BYTES = 1400
"""Makes requests of about 2 KiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", choices=STORES, default="sqlite-sync", help="the gateway's")
    parser.add_argument("--turns", type=int, default=600, help="turns of the single client")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2KiB", "1.3MiB"], help="of the load's replies")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each period of load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spread", action="store_true", help="all processes on both cores, not each server on one")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores(arguments.spread)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engine = stack.enter_context(simulator(cpu_sets))
        gateway = _gateway(arguments.store, folder, engine.base_url)
        servers: dict[str, OwnProcess] = {
            "Turnlog": stack.enter_context(turnlog(engine, cpu_sets, folder)),
            f"{PACKAGE}, {arguments.store}": stack.enter_context(started(gateway, cpu_sets)),
        }
        await _one_client(servers, engine.base_url, folder, WARM_UP_TURNS, "warm")
        latencies = await _one_client(servers, engine.base_url, folder, arguments.turns, "timed")
        own = percentile(latencies["engine"], 50)
        alone = [
            {
                "one client": name,
                "p50 ms": percentile(times, 50) * 1000,
                "p99 ms": percentile(times, 99) * 1000,
                "added p50 ms": (percentile(times, 50) - own) * 1000 if name in servers else None,
            }
            for name, times in latencies.items()
        ]
        rows = []
        for size in arguments.sizes:
            rows += await _load(servers, size, arguments)
    table(alone)
    table(rows)
    save_figures("peer", {"alone": alone, "load": rows})
    return 1 if any(row["errors"] for row in rows) else 0


async def _one_client(
    servers: dict[str, OwnProcess], engine_url: str, folder: Path, turns: int, name: str
) -> dict[str, list[float]]:
    """Seconds of each turn through each server, of the same request at the engine, and of an fdatasync, in turns."""
    latencies: dict[str, list[float]] = {key: [] for key in (*servers, "engine", "fdatasync")}
    conversations: dict[str, Conversation] = {}
    opening = opening_messages(OPENING_BYTES)
    async with contextlib.AsyncExitStack() as stack:
        routes = {}
        for key, server in servers.items():
            routes[key] = await stack.enter_async_context(await Connection.connect(server.base_url))
        direct = await stack.enter_async_context(await Connection.connect(engine_url))
        descriptor = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        stack.callback(os.close, descriptor)
        for number in range(turns):
            session = f"{name}-{number // TURNS_PER_SESSION}"
            for key, connection in routes.items():
                if number % TURNS_PER_SESSION == 0:
                    await connection.json("POST", "/sessions", {"session_id": session})
                    conversations[key] = Conversation(opening, SIM, REQUESTED_FIELDS)
                body = conversations[key].body()
                reply, seconds = await timed_turn(connection, f"/sessions/{session}/v1/chat/completions", body)
                latencies[key].append(seconds)
                conversations[key].answered(reply_message(reply))
            latencies["engine"].append((await timed_turn(direct, "/v1/chat/completions", body))[1])
            latencies["fdatasync"].append(sync_once_s(descriptor))
    return latencies


async def _load(servers: dict[str, OwnProcess], name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternating periods; each figure is the median of its rounds."""
    size = SIZES[name]
    sides = {
        key: await Side(
            [server], size.script(), clients=size.clients, turns_per_session=size.turns_per_session
        ).warm_up()
        for key, server in servers.items()
    }
    periods: dict[str, list[dict[str, Any]]] = {key: [] for key in sides}
    for number in range(arguments.rounds):
        for key in sorted(sides, reverse=number % 2 == 1):
            await sides[key].create_ahead(arguments.seconds)
            periods[key].append((await sides[key].run_period(arguments.seconds)).figures())
    return [
        {"load": name, "clients": size.clients, "through": key}
        | {what: statistics.median(one[what] for one in own) for what in own[0]}
        for key, own in periods.items()
    ]


def _gateway(store: str, folder: Path, engine_url: str) -> OwnProcess:
    """The gateway, not started; it is installed at the first use. Raises CalledProcessError."""
    home = ROOT / "var" / "peers" / f"{PACKAGE}-{VERSION}"
    if not (home / "bin" / PACKAGE).exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", f"{PACKAGE}=={VERSION}"], check=True)
    gateway = OwnProcess(
        [str(home / "bin" / PACKAGE), "--config", str(folder / "gateway.yaml")],
        folder / "gateway.log",
        environment={name: value for name, value in os.environ.items() if not name.startswith("RLLM_")},
        stop_s=30.0,
    )
    configuration = {
        "host": "127.0.0.1",
        "port": gateway.port,
        "workers": [{"url": engine_url}],
        "store_worker": store.partition("-")[0],
        "db_path": str(folder / "gateway.db"),
        "sync_traces": store != "sqlite",
        "log_level": "WARNING",
    }
    (folder / "gateway.yaml").write_text(json.dumps(configuration))  # JSON is valid YAML
    return gateway
