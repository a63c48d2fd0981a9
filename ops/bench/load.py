"""Latency and throughput by number of clients, for small and large replies."""

from __future__ import annotations

import argparse
from typing import Any

from ops.bench.measure import save_figures, table
from ops.bench.sizes import SIZES
from ops.bench.stand import Side, cores, simulator, turnlog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2KiB", "100KiB", "1.3MiB"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument(
        "--spread", action="store_true", help="run all processes on both cores, instead of the server on one"
    )


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    cpu_sets = cores(arguments.spread)
    with simulator(cpu_sets) as engine:
        for name in arguments.sizes:
            size = SIZES[name]
            script = await size.script(engine.base_url)
            for clients in arguments.clients:
                with turnlog(engine, cpu_sets, arguments.folder) as server:
                    side = Side([server], script, clients=clients, turns_per_session=size.turns_per_session)
                    period = await side.measured(arguments.seconds)
                rows.append({"size": name, "clients": clients, **period.figures()})
    table(rows)
    save_figures("load", rows)
    return 1 if any(row["errors"] for row in rows) else 0
