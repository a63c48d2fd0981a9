"""Runs one benchmark: `python -m ops.bench <name>`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from ops.bench import export, page, payloads, peers, sessions, stores, turns
from ops.bench.measure import print_results
from ops.bench.real import bench as real


class Benchmark(NamedTuple):
    """What runs, the options that it has, and what it measures in a line."""

    main: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    doc: str | None


BENCHMARKS: Mapping[str, Benchmark] = {
    "turns": Benchmark(turns.main, turns.add_arguments, turns.__doc__),
    "peers": Benchmark(peers.main, peers.add_arguments, peers.__doc__),
    "real": Benchmark(real.main, real.add_arguments, real.__doc__),
    "sessions": Benchmark(sessions.main, sessions.add_arguments, sessions.__doc__),
    "page": Benchmark(page.main, page.add_arguments, page.__doc__),
    "payloads": Benchmark(payloads.main, payloads.add_arguments, payloads.__doc__),
    "export": Benchmark(export.main, export.add_arguments, export.__doc__),
    "trees": Benchmark(stores.trees, stores.trees_arguments, stores.trees.__doc__),
    "startup": Benchmark(stores.startup, stores.startup_arguments, stores.startup.__doc__),
}


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.bench") -> int:
    """Run the command line `given`, by default the process's own. `prog` is the program's name in its help."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, benchmark in BENCHMARKS.items():
        own = names.add_parser(name, help=(benchmark.doc or "").partition("\n")[0])
        own.add_argument("--folder", type=Path, help="folder for the databases, on the disk to measure")
        benchmark.add_arguments(own)
    names.add_parser("results", help="print all saved results as a Markdown table")
    arguments = parser.parse_args(given)
    if arguments.name == "results":
        print_results()
        return 0
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the child processes
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(BENCHMARKS[arguments.name].main(arguments))


if __name__ == "__main__":
    sys.exit(main())
