"""python -m tests.tools.trainer_restart --steps 8 --kill-at 4

Runs a trainer that is not killed, and trainers that are killed with SIGKILL at each place of step --kill-at and started
again, with and without a restored checkpoint. Each has a server, a store and a simulated engine of its own. Prints how
many of the samples of the run that was not killed each has at the same step, how many it lacks, and how many others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.tools.trainer_restart.runs import compare, run
from tests.tools.trainer_restart.trainer import PLACES, Trainer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.trainer_restart")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=4, metavar="STEP")
    parser.add_argument("--database-url", help="of an empty PostgreSQL store, for one run (--place)")
    parser.add_argument("--place", choices=PLACES, action="append")
    worker = parser.add_argument_group("the trainer's own process")
    worker.add_argument("--url")
    worker.add_argument("--folder", type=Path)
    worker.add_argument("--die", choices=PLACES)
    worker.add_argument("--restore", action="store_true")
    options = parser.parse_args()
    if options.url is not None:
        dies_at = None if options.die is None else (options.kill_at, options.die)
        Trainer(options.url, options.folder, dies_at, restores=options.restore).run(options.steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="turnlog-restart-") as folder:
        whole = run(Path(folder) / "whole", options.steps, None)
        print(f"not killed: {sum(map(len, whole))} samples in {len(whole)} steps")
        failed = False
        for place in options.place or PLACES:
            for restores in (True, False):
                name = f"{place.replace(' ', '-')}-{restores}"
                killed = run(Path(folder) / name, options.steps, (options.kill_at, place), restores=restores)
                found = compare(whole, killed)
                how = "restored" if restores else "not restored"
                print(f"killed at step {options.kill_at}, {place}; {how}: {found}")
                failed |= restores and not found.is_same
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
