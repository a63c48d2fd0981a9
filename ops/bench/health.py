"""Does `/health` answer at once while 64 clients receive large replies? In the worker pool's care, and without it."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from ops.bench.load import Load
from ops.bench.measure import foreign_cpu_s, keep, table
from ops.bench.prober import Prober
from ops.bench.replies import SIZES, add_place_arguments, add_unasked_argument
from ops.bench.stand import Stand, stand

INLINE = {"TURNLOG_INLINE_MAX_BYTES": str(1 << 30)}
"""Nothing is handed to the pool."""

AIM_P95_MS = {"base64": 15.0, "nested": 60.0}
SETTINGS: dict[str, dict[str, str]] = {"default": {}, "inline only": INLINE}
WARM_UP_S = 2.0
IDLE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="1.3MiB")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two probes")
    parser.add_argument("--forms", nargs="+", choices=AIM_P95_MS, default=list(AIM_P95_MS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add_unasked_argument(parser)
    add_place_arguments(parser)


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for settings in arguments.settings:
        environment = SETTINGS[settings]
        with stand(
            arguments.folder, environment=environment, dialect=arguments.dialect, spread=arguments.spread
        ) as made:
            for form in ("none (idle)", *arguments.forms):
                figures = await (_loaded(made, arguments, form) if form in AIM_P95_MS else _idle(made, arguments))
                rows += [{"replies": form, "settings": settings, **figures}]
    table([{**row, "p95 aim ms": AIM_P95_MS.get(row["replies"])} for row in rows])
    print(f"written to {keep('health-spread' if arguments.spread else 'health', rows)}")
    return 1 if any(row["probes failed"] or row["errors"] for row in rows) else 0


async def _idle(made: Stand, arguments: argparse.Namespace) -> dict[str, Any]:
    with Prober(made.server.base_url, arguments.interval_ms) as prober:
        foreign, seconds = foreign_cpu_s(), min(arguments.seconds, IDLE_S)
        await asyncio.sleep(seconds)
        others = {"others CPU": (foreign_cpu_s() - foreign) / seconds, "errors": 0}
        return {"turns/s": 0.0, **prober.probes().figures(), **others}


async def _loaded(made: Stand, arguments: argparse.Namespace, form: str) -> dict[str, Any]:
    size = SIZES[arguments.size]
    script = await size.script(made.engine_url, form == "nested", not arguments.unasked)
    load = Load(made.server.base_url, script, clients=arguments.clients, turns_per_session=size.turns_per_session)
    await load.create_ahead(arguments.clients)
    warm = await load.run(WARM_UP_S)
    await load.create_ahead((len(warm.latencies) + warm.late) / warm.seconds * arguments.seconds)
    with Prober(made.server.base_url, arguments.interval_ms) as prober:
        foreign = foreign_cpu_s()
        tally = await load.run(arguments.seconds)
        foreign = foreign_cpu_s() - foreign
        probes = prober.probes()
    turns = len(tally.latencies) + tally.late
    others = {"others CPU": foreign / tally.seconds, "errors": sum(tally.errors.values())}
    return {"turns/s": turns / tally.seconds, **probes.figures(), **others}
