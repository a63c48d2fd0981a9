"""Does `/health` answer at once while 32 sessions have long prompts tokenised?"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.load import SIM, Load, Script, opening_messages
from ops.bench.measure import cpu_s, foreign_cpu_s, keep, table
from ops.bench.prober import Prober
from ops.bench.stand import Stand, stand
from ops.simulator import tokenizer_files
from ops.tito_check import tokenizers

AIM_MS = 20.0
"""Of p99 above idle."""

SETTINGS = ("token-in", "capture")
WARM_UP_S = 2.0
IDLE_S = 5.0
SAMPLE_BYTES = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=30_000, help="of each prompt; every turn is a session's first")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two probes")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--spread", action="store_true", help="all processes on both cores; else the server has one")
    parser.add_argument("--folder", type=Path, help="where the database is put")


async def main(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder:
        tokenizer = Path(folder)
        tokenizer_files.write(tokenizer)
        script = _script(tokenizer, arguments.tokens)
        environments = {"token-in": {"TURNLOG_TOKENIZER": folder}, "capture": {}}
        for setting in arguments.settings:
            rows += await _setting(arguments, setting, environments[setting], script)
    table(rows)
    print(f"written to {keep('tokenising-spread' if arguments.spread else 'tokenising', rows)}")
    return 1 if any(row["probes failed"] or row["errors"] for row in rows) else 0


def _script(folder: Path, tokens: int) -> Script:
    """Sessions whose first request has about so many tokens."""
    tokenizer = tokenizers.load(folder)
    sample = [msgspec.json.decode(message) for message in opening_messages(SAMPLE_BYTES)]
    ids = tokenizer.apply_chat_template(sample, tokenize=True, return_dict=False)
    return Script(opening_messages(SAMPLE_BYTES * tokens // len(ids)), SIM)


async def _setting(
    arguments: argparse.Namespace, setting: str, environment: Mapping[str, str], script: Script
) -> list[dict[str, Any]]:
    with stand(arguments.folder, environment=environment, spread=arguments.spread) as made:
        idle = await _probed(made, arguments, None, min(arguments.seconds, IDLE_S))
        load = Load(made.server.base_url, script, clients=arguments.clients, turns_per_session=1)
        await load.create_ahead(arguments.clients)
        warm = await load.run(WARM_UP_S)
        await load.create_ahead((len(warm.latencies) + warm.late) / warm.seconds * arguments.seconds)
        loaded = await _probed(made, arguments, load, arguments.seconds)
    above = loaded["health p99 ms"] - idle["health p99 ms"]
    return [
        {"prompts": "none (idle)", "settings": setting, **idle, "p99 above idle ms": None, "aim ms": None},
        {
            "prompts": f"{arguments.clients} x {arguments.tokens} tokens",
            "settings": setting,
            **loaded,
            "p99 above idle ms": above,
            "aim ms": AIM_MS,
        },
    ]


async def _probed(made: Stand, arguments: argparse.Namespace, load: Load | None, seconds: float) -> dict[str, Any]:
    """`/health` under that load, or none. CPU is a share of one core."""
    with Prober(made.server.base_url, arguments.interval_ms) as prober:
        foreign, server, engine = foreign_cpu_s(), cpu_s(made.server.pid), cpu_s(made.engine_pid)
        turns = errors = 0
        if load is None:
            await asyncio.sleep(seconds)
        else:
            tally = await load.run(seconds)
            turns, errors, seconds = len(tally.latencies) + tally.late, sum(tally.errors.values()), tally.seconds
        foreign, server, engine = (
            foreign_cpu_s() - foreign,
            cpu_s(made.server.pid) - server,
            cpu_s(made.engine_pid) - engine,
        )
        probes = prober.probes()
    return {
        "turns/s": turns / seconds,
        "tokens/s": turns * arguments.tokens / seconds,
        "server CPU": server / seconds,
        "simulator CPU": engine / seconds,
        **probes.figures(),
        "others CPU": foreign / seconds,
        "errors": errors,
    }
