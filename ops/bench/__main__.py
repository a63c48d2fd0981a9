"""Runs one benchmark: `python -m ops.bench <name>`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ops.bench import archive, export, payloads, peers, sessions, startup, trees, turns
from ops.bench.measure import print_results
from ops.bench.real import bench as real

BENCHMARKS = {
    "turns": turns,
    "peers": peers,
    "real": real,
    "sessions": sessions,
    "payloads": payloads,
    "export": export,
    "archive": archive,
    "trees": trees,
    "startup": startup,
}


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.bench") -> int:
    """Run the command line `given`, by default the process's own. `prog` is the program's name in its help."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        own = names.add_parser(name, help=(module.__doc__ or "").partition("\n")[0])
        own.add_argument("--folder", type=Path, help="folder for the databases, on the disk to measure")
        module.add_arguments(own)
    names.add_parser("results", help="print all saved results as a Markdown table")
    arguments = parser.parse_args(given)
    if arguments.name == "results":
        print_results()
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the child processes
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(BENCHMARKS[arguments.name].main(arguments))
    return code


if __name__ == "__main__":
    sys.exit(main())
