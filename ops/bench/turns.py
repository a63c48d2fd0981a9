"""Turns under load: server CPU, database CPU, latency; with --before and --beside as ratios to other servers.

Each load of `LOADS` is measured in short periods, in which the servers of all sides get it one after the other. A ratio
compares two periods of one round; the report has the median of the ratios, and their quartiles. The servers share one
core, everything else another. A side that takes no turn of a load, such as an older commit without its route, is named
and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.load import REQUESTED_FIELDS, SIZES, WIRES, Script, short_turns
from ops.bench.measure import Figures, against, alternate, medians, percentile, report, save_figures, table
from ops.bench.primary import primary
from ops.bench.stand import Side, cores, direct_s, folder_for_bench, simulator, source_tree, started, top_frames
from ops.server import PORT, ROOT, OwnProcess, ServerProcess
from ops.simulator.process import SimulatorProcess

PROFILE_S = 6.0
BEFORE, BESIDE, AFTER = "before", "beside", "after"
COMPARED = (
    *("server CPU ms a turn", "database CPU ms a turn", "transactions a turn", "WAL KiB a turn", "fsyncs a turn"),
    *("turns/s", "p50 ms", "added p50 ms"),
)


class Case(NamedTuple):
    """A load. `processes`: servers on one PostgreSQL database; 0: one server on SQLite. `known`: requests of so many
    bytes, of which the server knows all but the last turn."""

    clients: int = 64
    wire: str = "chat"
    size: str | None = None
    processes: int = 0
    known: int = 0

    @property
    def turns_per_session(self) -> int:
        return 200 if self.known else SIZES[self.size].turns_per_session if self.size else 8

    @property
    def script(self) -> Script:
        if self.size is not None:
            return SIZES[self.size].script()
        return short_turns(self.known or 2048, 8, WIRES[self.wire])._replace(is_known=bool(self.known))


LOADS: Mapping[str, Case] = {
    "64": Case(),
    "8": Case(8),
    "1": Case(1),
    "1.3MiB": Case(size="1.3MiB"),
    "postgres": Case(processes=1),
    "postgres-2": Case(processes=2),
    "known": Case(8, known=400_000),
    "messages": Case(wire="messages"),
    "responses": Case(wire="responses"),
    "completions": Case(wire="completions"),
    "vllm": Case(wire="vllm"),
    "sglang": Case(wire="sglang"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--beside", help="the command of another server, with {port}, {db} and {engine}; chat, SQLite")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a period")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.7 seconds")
    parser.add_argument("--spread", action="store_true", help="all processes on both cores, not the servers on one")
    parser.add_argument("--profile", action="store_true", help="then, where the server spends its time in the load")


async def main(arguments: argparse.Namespace) -> int:
    rounds, seconds = (3, 0.7) if arguments.quick else (arguments.rounds, arguments.seconds)
    rows: list[Figures] = []
    errors = 0
    for name in arguments.loads:
        with _sides(arguments, LOADS[name]) as (sides, engine):

            async def measure(who: str) -> Figures:
                await sides[who].create_ahead(seconds)
                figures = (await sides[who].run_period(seconds)).figures()
                if LOADS[name].clients == 1:  # noqa: B023
                    direct = await direct_s(engine.base_url, LOADS["1"].script._replace(more=REQUESTED_FIELDS))
                    figures["added p50 ms"] = figures["p50 ms"] - percentile(direct, 50) * 1000
                return figures

            for who, side in list(sides.items()):
                tried = await side.warm_up(min(2.0, seconds))
                if not tried.turns:
                    print(f"{name}: the side '{who}' has no such load, it answered {tried.errors}", flush=True)
                    errors += who == AFTER
                    del sides[who]
            if AFTER not in sides:
                continue
            periods = await alternate(sides, rounds, measure)
            if arguments.profile:
                await _profile(name, sides[AFTER])
        rows += _compared(name, periods)
        errors += sum(figures["errors"] for own in periods.values() for figures in own)
        print(f"{name}: {errors} errors so far", flush=True)
    if rows:
        table(rows)
    save_figures("turns", rows)
    return 1 if errors else 0


def _compared(name: str, periods: Mapping[str, Sequence[Figures]]) -> Iterator[Figures]:
    """A row for each figure: the median of each side, and of the ratios to each other side."""
    middle = {who: medians(own) for who, own in periods.items()}
    for what in COMPARED:
        if what in middle[AFTER]:
            row = {"load": name, "figure": what, **{who: figures[what] for who, figures in middle.items()}}
            for who in sorted(periods.keys() - {AFTER}):
                row |= against(who, what, periods[AFTER], periods[who])
            yield row


async def _profile(name: str, side: Side) -> None:
    await side.create_ahead(PROFILE_S)
    running = asyncio.create_task(side.run_period(PROFILE_S + 1))
    server = side.servers[0]
    report(f"profile-{name}", dict(await top_frames(server.pid, PROFILE_S, server.log_path.parent)))
    await running


@contextlib.contextmanager
def _sides(arguments: argparse.Namespace, case: Case) -> Iterator[tuple[dict[str, Side], SimulatorProcess]]:
    """All sides by name, and the engine of all."""
    cpu_sets = cores(arguments.spread)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        postgres = stack.enter_context(primary(arguments.folder)) if case.processes else None
        engine = stack.enter_context(simulator(cpu_sets))
        trees = {AFTER: ROOT}
        if arguments.before:
            trees[BEFORE] = source_tree(arguments.before, folder)
        sides = {}

        def add(who: str, own: Sequence[OwnProcess], **database: Any) -> None:
            for server in own:
                stack.enter_context(started(server, cpu_sets))
            turns = case.turns_per_session
            sides[who] = Side(own, case.script, clients=case.clients, turns_per_session=turns, **database)

        for who, root in trees.items():
            (place := folder / f"{who}-store").mkdir()
            database = None if postgres is None else postgres.new_database()
            url = None if database is None else database.url
            own = [
                ServerProcess(place, upstreams=[engine.base_url], database_url=url, root=root)
                for _ in range(max(case.processes, 1))
            ]
            own[0].migrate()
            add(who, own, database=database)
        if arguments.beside and case.wire == "chat" and not case.processes:
            # The other server, run from the working folder.
            places = {"port": PORT, "db": folder / "beside.db", "engine": engine.base_url}
            command = [part.format(**places) for part in shlex.split(arguments.beside)]
            beside = OwnProcess(command, folder / "beside.log", environment=dict(os.environ), root=Path.cwd())
            add(BESIDE, [beside])
        yield sides, engine
