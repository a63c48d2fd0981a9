"""Large replies of 2 KiB to 50 MiB: turns per second, server CPU and latency, compared with the ideal CPU."""

from __future__ import annotations

import argparse
from typing import Any

from ops.bench.measure import save_figures, table
from ops.bench.sizes import SIZES
from ops.bench.stand import Side, cores, simulator, turnlog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
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
            with turnlog(engine, cpu_sets, arguments.folder) as server:
                side = Side([server], script, clients=size.clients, turns_per_session=size.turns_per_session)
                period = await side.measured(arguments.seconds)
            ratio = None if size.ideal_ms is None else period.cpu_ms / size.ideal_ms
            rows.append({"size": name, "clients": size.clients, "CPU / ideal": ratio, **period.figures()})
    table(rows)
    save_figures("replies", rows)
    return 1 if any(row["errors"] for row in rows) else 0
