"""Turns a second, server CPU and latency under load; with --before, compared with the server of another commit.

`--protocol`, `--size`, `--request-bytes` and `--known` choose the turns; `--postgres` and `--processes` the store and
the servers. With `--before` both commits' servers run on one core with the same engine and settings, each with a store
of its own. They get the same load in short alternating periods, and the first of each pair alternates, so that any
slowdown of the machine affects both. A ratio compares two adjacent periods.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ops.bench.load import SIZES, WIRES, Script, short_turns
from ops.bench.measure import report
from ops.bench.primary import primary
from ops.bench.stand import (
    Period,
    Side,
    cores,
    folder_for_bench,
    simulator,
    source_tree,
    started,
    top_frames,
)
from ops.server import ROOT, ServerProcess

PROFILE_S = 5.0
TURNS_PER_SESSION, KNOWN_TURNS = 8, 200
"""Of a session; of one with a known history, which a turn makes 130 bytes longer."""

PER_SIDE = ("server CPU ms a turn", "turns/s", "p50 ms", "p99 ms", "database CPU ms a turn", "WAL KiB a turn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--protocol", choices=WIRES, default="chat")
    parser.add_argument("--request-bytes", type=int, default=2048)
    parser.add_argument("--known", action="store_true", help="of the request, the server knows all but the last turn")
    parser.add_argument("--size", choices=SIZES, help="of a reply, instead of --request-bytes; chat")
    parser.add_argument("--turns-per-session", type=int, help=f"{TURNS_PER_SESSION}; {KNOWN_TURNS} with --known")
    parser.add_argument("--postgres", action="store_true", help="on a new PostgreSQL server")
    parser.add_argument("--processes", type=int, default=1, help="servers on one store, with --postgres")
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=16, help="compared pairs, with --before")
    parser.add_argument("--seconds", type=float, help="default 10, with --before 1.5 for each period")
    parser.add_argument("--spread", action="store_true", help="all processes on both cores, not the servers on one")
    parser.add_argument("--profile", action="store_true", help="afterwards, profile the server under the same load")


async def main(arguments: argparse.Namespace) -> int:
    if arguments.processes > 1 and not arguments.postgres:
        raise SystemExit("several processes need --postgres")
    seconds = arguments.seconds or (1.5 if arguments.before else 10.0)
    pairs: list[dict[str, Period]] = []
    with _sides(arguments) as sides:
        for side, _ in sides.values():
            await side.warm_up()
        for number in range(arguments.rounds if arguments.before else 1):
            for side, _ in sides.values():
                await side.create_ahead(seconds)
            order = sorted(sides, reverse=number % 2 == 1)
            pairs.append({name: await sides[name][0].run_period(seconds) for name in order})
        figures = _compared(pairs) if arguments.before else pairs[0]["after"].figures()
        if arguments.profile:
            side, server = sides["after"]
            await side.create_ahead(PROFILE_S)
            running = asyncio.create_task(side.run_period(PROFILE_S + 1))
            figures |= dict(await top_frames(server.pid, PROFILE_S, server.database_path.parent))
            await running
    report(_name(arguments), figures)
    return 1 if figures["errors"] else 0


def _name(arguments: argparse.Namespace) -> str:
    """Of the file with the results."""
    given = vars(arguments)
    parts = [f"{arguments.clients}x{arguments.size or arguments.request_bytes}", arguments.protocol]
    parts += [name for name in ("known", "postgres") if given[name]]
    return "-".join(["turns", *parts, f"{arguments.processes}p", *(["before"] if arguments.before else [])])


def _script(arguments: argparse.Namespace, turns: int) -> Script:
    if arguments.size is not None:
        return SIZES[arguments.size].script()
    script = short_turns(arguments.request_bytes, TURNS_PER_SESSION if arguments.known else turns)
    return script._replace(wire=WIRES[arguments.protocol], is_known=arguments.known)


@contextlib.contextmanager
def _sides(arguments: argparse.Namespace) -> Iterator[dict[str, tuple[Side, ServerProcess]]]:
    """This tree's servers as "after", and the other commit's as "before": all of a side, and one of its servers."""
    cpu_sets = cores(arguments.spread)
    size = None if arguments.size is None else SIZES[arguments.size]
    usual = KNOWN_TURNS if arguments.known else TURNS_PER_SESSION if size is None else size.turns_per_session
    turns = arguments.turns_per_session or usual
    script = _script(arguments, turns)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        postgres = stack.enter_context(primary(arguments.folder)) if arguments.postgres else None
        engine = stack.enter_context(simulator(cpu_sets))
        trees = {"before": source_tree(arguments.before, folder)} if arguments.before else {}
        sides = {}
        for name, root in {**trees, "after": ROOT}.items():
            (own := folder / f"{name}-store").mkdir()
            database = None if postgres is None else postgres.new_database()
            url = None if database is None else database.url
            servers = [
                ServerProcess(own, upstreams=[engine.base_url], database_url=url, root=root)
                for _ in range(arguments.processes)
            ]
            servers[0].migrate()
            for server in servers:
                stack.enter_context(started(server, cpu_sets))
            side = Side(servers, script, clients=arguments.clients, turns_per_session=turns, database=database)
            sides[name] = side, servers[0]
        yield sides


def _compared(pairs: Sequence[dict[str, Period]]) -> dict[str, Any]:
    """Medians over the periods of each side, and over the ratios of adjacent ones."""
    periods = {name: [pair[name] for pair in pairs] for name in ("before", "after")}
    figures: dict[str, Any] = {"rounds": len(pairs), "turns": sum(one.turns for pair in pairs for one in pair.values())}
    for name, side in periods.items():
        own = [period.figures() for period in side]
        figures |= {
            f"{what} {name}": statistics.median(one[what] for one in own) for what in PER_SIDE if what in own[0]
        }
    for what in ("server CPU ms a turn", "p50 ms"):
        ratios = sorted(pair["after"].figures()[what] / pair["before"].figures()[what] for pair in pairs)
        margin, middle = math.ceil(0.98 * math.sqrt(len(ratios))), len(ratios) // 2
        interval = ratios[max(0, middle - margin) : middle + margin + 1]
        figures[f"{what}, after / before"] = statistics.median(ratios)
        figures[f"{what}, its 95 %"] = [round(interval[0], 3), round(interval[-1], 3)]
    every = [one.figures() for pair in pairs for one in pair.values()]
    return {**figures, **{name: sum(one[name] for one in every) for name in ("sessions created within", "errors")}}
