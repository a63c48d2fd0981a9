"""`python -m ops.train`: runs of asynchronous GRPO by way of Turnlog, on vLLM on the CPU.

`--all` plays each seed without faults, with faults, and with the same faults by way of a session server in memory; what
is complete in `var/train` is not played again. Then it prints the table and draws the figure of all kept results.

It needs `sh ops/setup train` and `sh ops/setup real-engine`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path

from ops.engine.process import is_installed
from ops.train import audit, figure, results
from ops.train.faults import Schedule
from ops.train.results import FAULT_FREE, FAULTS, PEER, Planned
from ops.train.run import run

STEPS = 72


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops.train", description=__doc__)
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "table", "figure", "audit"),
        default="run",
        help="audit: count the run in --folder again; table, figure: from the kept results",
    )
    parser.add_argument("--all", action="store_true", help="all runs, the table and the figure")
    parser.add_argument("--folder", type=Path, help="the run's: an empty one, or one that is not there")
    parser.add_argument("--kind", choices=(FAULT_FREE, FAULTS, PEER), default=FAULT_FREE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=results.SEEDS, help="of --all")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its processes end too
    if given.command == "figure":
        figure.draw(results.load())
        return 0
    if given.command == "table":
        return _show(results.load())
    if given.command == "run" and not is_installed():
        parser.error("there is no engine: sh ops/setup real-engine")
    if given.all:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("there is no matplotlib: sh ops/setup train")
        plan = results.plan_of(given.seeds)
        results.run_all(lambda planned, folder: _play(planned, folder, given.steps), plan, given.steps)
        figure.draw(results.load())
        return _show(results.load())
    if given.folder is None:
        parser.error("--folder or --all is needed")
    folder = given.folder.resolve()
    if given.command == "run":
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty")
        folder.mkdir(parents=True, exist_ok=True)
        counted = _play(Planned(given.kind, given.seed), folder, given.steps)
        result = results.measure(folder, given.kind, counted)
        results.show([result], figure.reward_at)
    else:
        in_memory = json.loads((folder / "run.json").read_text())["server"] == "memory"
        counted = audit.tally(folder) if in_memory else audit.audit(folder)
    audit.show(counted)
    return 1 if counted.violations else 0


def _play(planned: Planned, folder: Path, steps: int) -> audit.Audit:
    """Play a run in an empty folder, and audit it."""
    schedule = None if planned.kind == FAULT_FREE else Schedule(planned.seed)
    in_memory = planned.kind == PEER
    run(folder, planned.seed, steps, schedule, in_memory=in_memory)
    return audit.tally(folder) if in_memory else audit.audit(folder)


def _show(kept: list[results.Result]) -> int:
    results.show(kept, figure.reward_at)
    return 1 if results.failures(kept) else 0


if __name__ == "__main__":
    sys.exit(main())
