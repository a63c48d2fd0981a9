"""Replay payloads in the database and in object storage: what a turn costs the database, the server and the client.

The same turns on one PostgreSQL: without replay payloads, with them in the database, and in a bucket of a local S3
server. The ceiling is what the database's CPU allows on one core at this load: the fewer turns a second, the fewer
share a transaction. So compare the costs of a transaction too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ops.bench.load import REQUESTED_FIELDS, SIZES, Script
from ops.bench.measure import Figures, alternate, cpu_s, medians, save_figures, table
from ops.bench.primary import primary
from ops.bench.stand import Cores, Side, folder_for_bench, simulator, turnlog
from ops.server import PORT, OwnProcess

CEILING = "database's ceiling, turns/s"

PLACES = ("none", "database", "bucket")

COMPLETION_TOKENS = 200
"""Enough for each turn's chunk to be an object: a turn stores the payload of its new tokens alone, and a small chunk
stays in its row (`SMALL_BYTES`)."""

KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--size", choices=SIZES, default="100KiB")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)


async def main(arguments: argparse.Namespace) -> int:
    everywhere = Cores(os.sched_getaffinity(0), os.sched_getaffinity(0))
    size = SIZES[arguments.size]
    size = size._replace(completion_tokens=max(size.completion_tokens, COMPLETION_TOKENS))
    with (
        primary(arguments.folder) as database,
        simulator(everywhere) as engine,
        folder_for_bench(arguments.folder) as folder,
        S3Server(folder) as s3,
    ):
        whole = size.script()
        places: dict[str, tuple[Script, Mapping[str, str]]] = {
            "none": (_without_payloads(whole), {}),
            "database": (whole, {}),
            "bucket": (whole, s3.bucket()),
        }

        async def measure(place: str) -> Figures:
            script, environment = places[place]
            before = cpu_s(s3.pid)
            store = database.new_database()
            load = {"clients": arguments.clients, "turns_per_session": size.turns_per_session}
            with turnlog(engine, everywhere, arguments.folder, environment, store.url) as server:
                period = await Side([server], script, database=store, **load).measured(arguments.seconds)
            storage = (cpu_s(s3.pid) - before) * 1000 / max(period.turns, 1)
            return {**period.figures(), "storage ms/turn": storage}

        periods = await alternate(arguments.places, arguments.rounds, measure)
    rows = [{"payloads": place, **_shown(row)} for place, own in periods.items() for row in own]
    table(rows)
    middle = {place: medians([_shown(row) for row in own]) for place, own in periods.items()}
    first = next(iter(middle.values()))
    ratio = f"of that of {next(iter(middle))}"
    table([{"payloads": place, **row, ratio: row[CEILING] / first[CEILING]} for place, row in middle.items()])
    save_figures(f"payloads-{arguments.clients}x{arguments.size}", rows)
    return 1 if any(row["errors"] for own in periods.values() for row in own) else 0


def _shown(row: Figures) -> Figures:
    load = ("turns/s", "p50 ms", "p99 ms", "transactions a turn")
    costs = ("server CPU ms a turn", "database CPU ms a turn", "storage ms/turn", "WAL KiB a turn", "reply KiB")
    found = {name: row[name] for name in (*load, *costs)}
    cost = row["database CPU ms a turn"]
    return {**found, "database CPU ms a transaction": cost / row["transactions a turn"], CEILING: 1000 / cost}


def _without_payloads(script: Script) -> Script:
    """The same prompts and tokens, without expert routing."""
    sim = msgspec.json.decode(script.sim, type=dict[str, Any])
    sim.pop("experts", None)
    return script._replace(sim=msgspec.json.encode(sim), more=REQUESTED_FIELDS)


class S3Server(OwnProcess):
    """A local S3 server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            [sys.executable, "-m", "moto.server", "-p", PORT], folder / "s3.log", environment=dict(os.environ)
        )

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/moto-api/").is_success
        except httpx.TransportError:
            return False

    def bucket(self) -> dict[str, str]:
        """The environment of a server that uses a new bucket."""
        assert httpx.put(f"{self.base_url}/payloads").is_success
        places = {
            "TURNLOG_PAYLOADS": "s3://payloads/bench",
            "AWS_ENDPOINT_URL": self.base_url,
            "AWS_ALLOW_HTTP": "true",
        }
        return {**KEYS, **places}
