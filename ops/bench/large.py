"""50 MiB replies: how much memory one needs, and sixteen at once; and whether `/health` still answers meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

from ops.bench.client import Broken, Connection
from ops.bench.load import Script
from ops.bench.measure import foreign_cpu_s, keep, table
from ops.bench.prober import Prober
from ops.bench.replies import add_place_arguments, add_unasked_argument
from ops.bench.sampler import Sampler, family_pss
from ops.bench.sizes import MIB, Payload, fitted, warm
from ops.bench.stand import Stand, stand

COMPLETION_TOKENS = 200
SETTLE_S = 1.0
"""After a round, before the memory that is kept is read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=float, default=50.0, help="size of a reply")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two probes of /health")
    parser.add_argument("--nested", action="store_true", help="routed_experts as nested lists, not base64")
    add_unasked_argument(parser)
    add_place_arguments(parser)


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    payload = Payload(nested=arguments.nested, asked=not arguments.unasked)
    for concurrent in arguments.concurrent:
        with stand(arguments.folder, dialect=arguments.dialect, spread=arguments.spread) as made:
            wanted = round(arguments.mib * MIB)
            script = await fitted(made.engine_url, wanted, 1, payload, COMPLETION_TOKENS)
            await warm(made.engine_url, script, 1)
            await _small_turn(made)
            rows.append(await _round(made, script, concurrent, arguments))
    table(rows)
    marks = [name for name in ("nested", "unasked", "spread") if getattr(arguments, name)]
    print(f"written to {keep('-'.join(['large', *marks]), rows)}")
    return 1 if any(row["failed"] for row in rows) else 0


async def _small_turn(made: Stand) -> None:
    """So that the process's first-time costs are in the baseline. Raises Broken."""
    script = await fitted(made.engine_url, 4096, 1)
    failures = await _turns(made, script, ["small"])
    if failures:
        raise Broken(failures[0])


async def _round(made: Stand, script: Script, concurrent: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One turn in each of so many new sessions, all at once: once for the memory, once more for /health.

    Not both at once: to count a process's pages holds up its every new one. The prober has some idle probes at
    both ends.
    """
    pid = made.server.pid
    before = family_pss(pid)
    loop = asyncio.get_running_loop()
    with Sampler(pid) as sampler:
        failures = await _turns(made, script, [f"large-{number}" for number in range(concurrent)])
        samples = sampler.samples()
    await asyncio.sleep(SETTLE_S)
    kept = family_pss(pid) - before
    with Prober(made.server.base_url, arguments.interval_ms) as prober:
        began, foreign = loop.time(), foreign_cpu_s()
        failures += await _turns(made, script, [f"again-{number}" for number in range(concurrent)])
        seconds, foreign = loop.time() - began, foreign_cpu_s() - foreign
        probes = prober.probes()
    growth = samples.peak.total - samples.first.total
    health = {name: value for name, value in probes.figures().items() if name.startswith(("health", "probes"))}
    return {
        "replies at once": concurrent,
        "MiB each": arguments.mib,
        "seconds": seconds,
        "failed": len(failures),
        "baseline MiB": before / MIB,
        "peak growth MiB": growth / MIB,
        "peak / replies": growth / (arguments.mib * MIB * concurrent),
        "kept after MiB": kept / MIB,
        **health,
        "others CPU": foreign / seconds,
    }


async def _turns(made: Stand, script: Script, names: list[str]) -> list[str]:
    """What went wrong with each that failed."""
    outcomes = await asyncio.gather(*(_turn(made, script, name) for name in names))
    failures = [outcome for outcome in outcomes if outcome]
    for failure in failures:
        print(failure)
    return failures


async def _turn(made: Stand, script: Script, name: str) -> str | None:
    with contextlib.suppress(OSError):
        async with await Connection.connect(made.server.base_url) as connection:
            try:
                await connection.json("POST", "/sessions", {"session_id": name})
                path = f"/sessions/{name}/v1/chat/completions"
                response = await connection.request("POST", path, script.begin().body())
            except Broken as error:
                return f"{name}: {error}"
            return None if response.status == 200 else f"{name}: {response.status} {response.body[:200]!r}"
    return f"{name}: no connection"
