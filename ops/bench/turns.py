"""Turns under load: server CPU, database CPU, latency; with --before and --beside as ratios to other servers, with
--against to another load.

Each load of `LOADS` is measured in short periods, in which the servers of all sides get it one after the other, in an
order that alternates: a slowdown of the machine affects all of them. A ratio compares two periods of one round; the
report has the median of the ratios, and their quartiles. The servers share one core, everything else another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.client import Connection
from ops.bench.load import REQUESTED_FIELDS, SIM, SIZES, WIRES, Conversation, Script, short_turns, timed_turn
from ops.bench.measure import percentile, report, save_figures, table
from ops.bench.primary import primary
from ops.bench.stand import Period, Side, cores, folder_for_bench, simulator, source_tree, started, top_frames
from ops.server import PORT, ROOT, OwnProcess, ServerProcess
from ops.simulator.process import SimulatorProcess

PROFILE_S = 6.0
DIRECT_TURNS = 60
"""Requests to the engine alone, of which a single client's latency is a multiple."""

BEFORE, BESIDE, AFTER = "before", "beside", "after"


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
    parser.add_argument("--against", choices=LOADS, help="another load, at a server of its own, to compare with")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a period")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.7 seconds")
    parser.add_argument("--spread", action="store_true", help="all processes on both cores, not the servers on one")
    parser.add_argument("--profile", action="store_true", help="then, where the server spends its time in the load")


async def main(arguments: argparse.Namespace) -> int:
    rounds, seconds = (3, 0.7) if arguments.quick else (arguments.rounds, arguments.seconds)
    rows, errors = [], 0
    for name in arguments.loads:
        with _sides(arguments, LOADS[name]) as (sides, engine, servers):
            for side in sides.values():
                await side.warm_up(min(2.0, seconds))
            periods: dict[str, list[Figures]] = {who: [] for who in sides}
            for number in range(rounds):
                for who in sorted(sides, reverse=number % 2 == 1):
                    await sides[who].create_ahead(seconds)
                    figures = (await sides[who].run_period(seconds)).figures()
                    if LOADS[name].clients == 1:
                        figures["added p50 ms"] = figures["p50 ms"] - await _direct_ms(engine)
                    periods[who].append(figures)
            if arguments.profile:
                await _profile(name, sides[AFTER], servers[AFTER])
        rows += _compared(name, periods)
        errors += sum(figures["errors"] for own in periods.values() for figures in own)
        print(f"{name}: {errors} errors so far", flush=True)
    table(rows)
    save_figures("turns", rows)
    return 1 if errors else 0


Figures = dict[str, Any]
COMPARED = ("server CPU ms a turn", "database CPU ms a turn", "turns/s", "p50 ms", "added p50 ms")


def _compared(name: str, periods: Mapping[str, Sequence[Figures]]) -> list[Figures]:
    """A row for each figure: the median of each side, and of the ratios to each other side with their quartiles."""
    rows = []
    for what in COMPARED:
        if what not in periods[AFTER][0]:
            continue
        row: Figures = {"load": name, "figure": what}
        for who in (BEFORE, BESIDE, AFTER):
            row[who] = statistics.median(one[what] for one in periods[who]) if who in periods else None
        for who in (BEFORE, BESIDE):
            pairs = zip(periods[AFTER], periods.get(who, ()), strict=False)
            ratios = sorted(after[what] / other[what] for after, other in pairs)
            row[f"after/{who}"] = statistics.median(ratios) if ratios else None
            row[f"quartiles, {who}"] = f"{percentile(ratios, 25):.3f}-{percentile(ratios, 75):.3f}" if ratios else None
        rows.append(row)
    return rows


async def _direct_ms(engine: SimulatorProcess) -> float:
    """The median latency of the same requests at the engine itself."""
    times = []
    async with await Connection.connect(engine.base_url) as connection:
        for _ in range(DIRECT_TURNS):
            body = Conversation(LOADS["1"].script.opening, SIM, REQUESTED_FIELDS).body()
            times.append((await timed_turn(connection, "/v1/chat/completions", body))[1])
    return percentile(times, 50) * 1000


async def _profile(name: str, side: Side, server: OwnProcess) -> None:
    await side.create_ahead(PROFILE_S)
    running: asyncio.Task[Period] = asyncio.create_task(side.run_period(PROFILE_S + 1))
    report(f"profile-{name}", dict(await top_frames(server.pid, PROFILE_S, server.log_path.parent)))
    await running


Sides = tuple[dict[str, Side], SimulatorProcess, dict[str, OwnProcess]]


@contextlib.contextmanager
def _sides(arguments: argparse.Namespace, case: Case) -> Iterator[Sides]:
    """All sides by name, the engine of all, and of each side the first server."""
    cpu_sets = cores(arguments.spread)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        postgres = stack.enter_context(primary(arguments.folder)) if case.processes else None
        engine = stack.enter_context(simulator(cpu_sets))
        sides, servers = {}, {}

        def add(who: str, own: Sequence[OwnProcess], case: Case, **database: Any) -> None:
            for server in own:
                stack.enter_context(started(server, cpu_sets))
            turns = case.turns_per_session
            sides[who] = Side(own, case.script, clients=case.clients, turns_per_session=turns, **database)
            servers[who] = own[0]

        trees = {BEFORE: source_tree(arguments.before, folder)} if arguments.before else {}
        cases = {BEFORE: case, BESIDE: LOADS[arguments.against or "64"], AFTER: case}
        for who, root in {**trees, **({BESIDE: ROOT} if arguments.against else {}), AFTER: ROOT}.items():
            (place := folder / f"{who}-store").mkdir()
            database = None if postgres is None else postgres.new_database()
            url = None if database is None else database.url
            own = [
                ServerProcess(place, upstreams=[engine.base_url], database_url=url, root=root)
                for _ in range(max(case.processes, 1))
            ]
            own[0].migrate()
            add(who, own, cases[who], database=database)
        if arguments.beside and case.wire == "chat" and not case.processes:
            add(BESIDE, [_beside(arguments.beside, folder, engine.base_url)], case)
        yield sides, engine, servers


def _beside(command: str, folder: Path, engine: str) -> OwnProcess:
    """The other server, run from the working folder."""
    parts = [part.format(port=PORT, db=folder / "beside.db", engine=engine) for part in shlex.split(command)]
    return OwnProcess(parts, folder / "beside.log", environment=dict(os.environ), root=Path.cwd())
