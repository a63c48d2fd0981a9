"""`python -m tests.tools.simulation --schedules N --seed S`: N schedules, from seed S on; 1 where one fails."""

from __future__ import annotations

import argparse
import gc
import sys
import time

import msgspec

from tests.tools.simulation.schedule import Outcome, Simulation

COLLECT_EVERY = 50
"""Schedules between two collections of garbage, which otherwise cost a seventh of the time."""

SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    chosen = parser.parse_args()
    ran = run(range(chosen.seed, chosen.seed + chosen.schedules), trace=chosen.trace)
    return 1 if ran.failed else 0


class Ran(msgspec.Struct):
    """What came of some schedules."""

    turns: int = 0
    mishaps: int = 0
    searched: int = 0
    unsearched: int = 0
    failed: list[Outcome] = []


def run(seeds: range, *, trace: bool = False) -> Ran:
    """Run these schedules and print what came of them."""
    simulation = Simulation()
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
                _report(outcome)
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


def _report(outcome: Outcome) -> None:
    print(f"seed {outcome.seed} failed after {outcome.seconds:.1f} simulated seconds:")
    for problem in outcome.problems[:SHOWN]:
        print(f"  {problem}")
    if len(outcome.problems) > SHOWN:
        print(f"  and {len(outcome.problems) - SHOWN} more")
    print(f"  again: python -m tests.tools.simulation --seed {outcome.seed} --schedules 1 --trace", flush=True)


if __name__ == "__main__":
    sys.exit(main())
