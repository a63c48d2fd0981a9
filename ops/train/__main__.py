"""`python -m ops.train --folder FOLDER`: a run of asynchronous GRPO by way of Turnlog, on vLLM on the CPU.

It needs `sh ops/setup demo` and `sh ops/setup real-engine`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ops.engine.process import is_installed
from ops.train.run import read_steps, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="ops.train", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="an empty one, or one that is not there"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    if not is_installed():
        parser.error("there is no engine: sh ops/setup real-engine")
    if given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty")
    outcome = run(given.folder.resolve(), given.seed, given.steps)
    print("step  reward  ratio   staleness  tokens  seconds")
    for step in read_steps(given.folder):
        print(
            f"{step['step']:4}  {step['reward']:6.3f}  {step['ratio_mean']:6.4f}  {step['staleness']:9}"
            f"  {step['tokens']:6}  {step['seconds']:7.2f}"
        )
    print(f"ratio before the first update: 1 ± {outcome['ratio_error_first']:.1e}")
    print(
        f"ratio where the trainer's own weights sampled, over all steps: 1 ± {outcome['ratio_error_max']:.1e}"
    )
    print(
        f"staleness: {outcome['staleness_mean']:.2f} on average, at most {outcome['staleness_max']}"
    )
    print(f"{outcome['tokens']} tokens, {outcome['tokens_a_second']:.0f} a second")
    print(
        f"reward: {outcome['reward_first']:.3f} in the first step, {outcome['reward_last_5']:.3f} in the last five"
    )


if __name__ == "__main__":
    main()
