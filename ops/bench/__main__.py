"""Runs one benchmark: `python -m ops.bench <name>`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from ops.bench import (
    export,
    latency,
    live,
    live_sessions,
    load,
    long,
    page,
    payloads,
    postgres,
    prompts,
    protocols,
    replies,
    search,
    staging,
    startup,
    tree,
    turns,
    workers,
)

BENCHMARKS = {
    "turns": turns,
    "latency": latency,
    "load": load,
    "long": long,
    "live": live,
    "replies": replies,
    "search": search,
    "staging": staging,
    "export": export,
    "postgres": postgres,
    "sessions": live_sessions,
    "workers": workers,
    "payloads": payloads,
    "startup": startup,
    "tree": tree,
    "protocols": protocols,
    "prompts": prompts,
    "page": page,
}


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.bench") -> int:
    """Run the command line `given`, by default the process's own. `prog` is the program's name in its help."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        own = names.add_parser(name, help=(module.__doc__ or "").partition("\n")[0])
        own.add_argument("--folder", type=Path, help="folder for the databases, on the disk to measure")
        module.add_arguments(own)
    arguments = parser.parse_args(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the child processes
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(BENCHMARKS[arguments.name].main(arguments))
    return code


if __name__ == "__main__":
    sys.exit(main())
