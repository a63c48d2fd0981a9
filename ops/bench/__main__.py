"""`python -m ops.bench <name>`: one benchmark."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

import uvloop

from ops.bench import (
    clients,
    curve,
    export,
    fleet,
    gated,
    growth,
    health,
    hostile,
    large,
    latency,
    memory,
    observed,
    page,
    postgres,
    prefix,
    prepare,
    replies,
    restarts,
    sessions,
    startup,
    takeover,
    tokenising,
    turns,
    weights,
)

BENCHMARKS = {
    "turns": turns,
    "latency": latency,
    "growth": growth,
    "startup": startup,
    "restarts": restarts,
    "clients": clients,
    "replies": replies,
    "health": health,
    "hostile": hostile,
    "memory": memory,
    "large": large,
    "load-curve": curve,
    "prepare": prepare,
    "tokenising": tokenising,
    "export": export,
    "postgres": postgres,
    "sessions": sessions,
    "weights": weights,
    "takeover": takeover,
    "prefix": prefix,
    "gated": gated,
    "fleet": fleet,
    "observed": observed,
    "page": page,
}


def main(given: Sequence[str] | None = None, prog: str = "python -m ops.bench") -> int:
    """The command, called `prog` in its help; `given` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        module.add_arguments(names.add_parser(name, help=module.__doc__))
    arguments = parser.parse_args(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is stopped then too
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(BENCHMARKS[arguments.name].main(arguments))
    return code


if __name__ == "__main__":
    sys.exit(main())
