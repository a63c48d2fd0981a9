"""Latency against the number of clients, for small and large replies, and a plot of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ops.bench.measure import keep, table
from ops.bench.replies import SIZES, add_place_arguments, add_unasked_argument
from ops.bench.stand import cores, simulator
from ops.bench.targets import Turnlog, measured
from ops.server import ROOT

PLOT = ROOT / "docs" / "latency.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2KiB", "100KiB", "1.3MiB"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--plot", type=Path, default=PLOT)
    add_unasked_argument(parser)
    add_place_arguments(parser)


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    places = cores(arguments.spread)
    with simulator(places, arguments.dialect) as engine:
        for name in arguments.sizes:
            size = SIZES[name]
            script = await size.script(engine.base_url, nested=False, asked=not arguments.unasked)
            for clients in arguments.clients:
                async with Turnlog(arguments.folder).running(engine.base_url, places) as running:
                    one = await measured(
                        running,
                        engine.pid,
                        script,
                        clients=clients,
                        turns_per_session=size.turns_per_session,
                        seconds=arguments.seconds,
                    )
                figures = one.figures()
                shown = ("turns/s", "p50 ms", "p95 ms", "p99 ms", "server CPU", "simulator CPU", "others CPU", "errors")
                rows.append({"size": name, "clients": clients, **{key: figures[key] for key in shown}})
    table(rows)
    print(f"written to {keep('load-curve', rows)}")
    from ops.bench.plot import draw  # matplotlib takes a second to import, and nothing else needs it

    draw(rows, arguments.plot)
    print(f"drawn to {arguments.plot}")
    return 1 if any(row["errors"] for row in rows) else 0
