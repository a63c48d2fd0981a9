"""`python -m tests.tools.simulation --schedules N --seed S`: N schedules, from seed S on; 1 where one fails."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Iterator

import msgspec

from ops.bench.primary import primary
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.schedule import Outcome, Simulation
from tests.tools.simulation.store import MemoryStore, Store

COLLECT_EVERY = 50
"""Schedules between two collections of garbage, which otherwise cost a seventh of the time."""

SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument(
        "--store", choices=("memory", "postgresql"), default="memory", help="memory: SQLite's statements"
    )
    parser.add_argument("--trace", action="store_true", help="print what happens")
    chosen = parser.parse_args()
    with _store(chosen.store) as store:
        ran = run(range(chosen.seed, chosen.seed + chosen.schedules), trace=chosen.trace, store=store)
    return 1 if ran.failed else 0


@contextlib.contextmanager
def _store(name: str) -> Iterator[Store]:
    if name == "memory":
        yield MemoryStore()
        return
    with primary() as server:
        yield PostgresStore(server.new_database().url)


class Ran(msgspec.Struct):
    """What came of some schedules."""

    turns: int = 0
    mishaps: int = 0
    searched: int = 0
    unsearched: int = 0
    failed: list[Outcome] = []


def run(seeds: range, *, trace: bool = False, store: Store | None = None) -> Ran:
    """Run these schedules and print what came of them. The store, by default one in memory, is closed at the end."""
    simulation = Simulation(store)
    began, used = time.perf_counter(), time.process_time()
    ran = Ran()
    gc.disable()
    try:
        for number, seed in enumerate(seeds, 1):
            outcome = simulation.run(seed, trace=trace)
            ran.turns += outcome.turns
            ran.mishaps += outcome.mishaps
            ran.searched += outcome.searched
            ran.unsearched += outcome.unsearched
            if trace:
                print("\n".join(outcome.trace))
            if outcome.problems:
                ran.failed.append(outcome)
                _report(outcome, store)
            if number % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.enable()
        simulation.close()
    minutes, cpu_minutes = (time.perf_counter() - began) / 60, (time.process_time() - used) / 60
    print(
        f"{len(seeds)} schedules from seed {seeds.start}: {ran.turns} turns acknowledged, {ran.mishaps} mishaps, "
        f"{len(ran.failed)} failed",
        f"the calls of {ran.searched} sessions have been put in order; {ran.unsearched} searches took too long",
        f"{len(seeds) / minutes:.0f} a minute, {len(seeds) / cpu_minutes:.0f} a minute of one core",
        sep="\n",
        file=sys.stderr if trace else sys.stdout,
    )
    return ran


def _report(outcome: Outcome, store: Store | None) -> None:
    print(f"seed {outcome.seed} failed after {outcome.seconds:.1f} simulated seconds:")
    for problem in outcome.problems[:SHOWN]:
        print(f"  {problem}")
    if len(outcome.problems) > SHOWN:
        print(f"  and {len(outcome.problems) - SHOWN} more")
    where = " --store postgresql" if isinstance(store, PostgresStore) else ""
    print(f"  again: python -m tests.tools.simulation --seed {outcome.seed} --schedules 1 --trace{where}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
