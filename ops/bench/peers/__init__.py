"""Session servers side by side: speed, what they need, and what survives a kill and an odd engine.

Each server runs as published, before the same stand-in for an engine. The figures of a load are medians of short
periods in which the servers get it one after the other, in an order that alternates; the servers share one core,
everything else another. Then each server is killed under agents that use OpenAI's SDK, started again, and its records
are compared with what the engine sampled. A server that cannot be run has the reason in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from ops.bench.client import Broken
from ops.bench.measure import RESULTS, Figures
from ops.bench.peers.protocol import NotInstalled, Peer, Place, interpreter
from ops.bench.peers.servers import PEERS
from ops.bench.peers.speed import CASES, MEMORY, MEMORY_TURNS, Running, measured, memory
from ops.bench.peers.survival import AGENTS, Survival
from ops.bench.peers.witness import WitnessEngine
from ops.bench.stand import cores, folder_for_bench, pinned, started
from ops.server import ServerDidNotStart
from ops.simulator.process import SimulatorProcess
from ops.simulator.wire import Dialect

QUICK_CASES = ("1", "16")
FAILURES = (Broken, OSError, ServerDidNotStart, NotInstalled, httpx.HTTPError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--server", action="append", default=[], metavar="NAME=PATH", help="the checkout of a server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a period")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two loads, one round of 0.3 seconds, one kill, 8 agents")
    parser.add_argument("--install", action="store_true", help="only install the servers, which takes minutes")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")


async def main(arguments: argparse.Namespace) -> int:
    checkouts = dict(given.split("=", 1) for given in arguments.server)
    results: dict[str, Figures] = {name: {} for name in arguments.servers}
    peers = {name: PEERS[name] for name in arguments.servers}
    pythons = {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name, peer in peers.items():
        try:
            pythons[name] = prepared(peer, checkouts)
        except FAILURES as error:
            results[name]["not run"] = str(error)
    steps = () if arguments.install else (Bench.speed, Bench.survival)
    bench = Bench(arguments, {name: peers[name] for name in pythons}, pythons, checkouts)
    try:
        for step in steps:
            async for done in step(bench, results):
                print(done, file=sys.stderr, flush=True)
                arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    finally:
        print(markdown(results))
    return 0


def prepared(peer: Peer, checkouts: Mapping[str, str]) -> Path:
    """The interpreter for a server. Raises NotInstalled."""
    if peer.needs_checkout and peer.name not in checkouts:
        raise NotInstalled(f"give its checkout: --server {peer.name}=PATH")
    return interpreter(peer) if peer.requirements else Path(sys.executable)


class Bench:
    """The servers of a run."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        peers: Mapping[str, Peer],
        pythons: Mapping[str, Path],
        checkouts: Mapping[str, str],
    ) -> None:
        self._given = arguments
        self._peers = peers
        self._pythons = pythons
        self._checkouts = checkouts
        self._cores = cores()

    async def speed(self, results: dict[str, Figures]) -> AsyncIterator[str]:
        """Measure memory and all loads, while all servers run; gives the name of each step that is done."""
        rounds, seconds = (1, 0.3) if self._given.quick else (self._given.rounds, self._given.seconds)
        with contextlib.ExitStack() as stack:
            running = {}
            engines: dict[Dialect, SimulatorProcess] = {}
            stack.enter_context(pinned(self._cores.others))
            for name, peer in self._peers.items():
                if peer.dialect not in engines:
                    engine = SimulatorProcess("--dialect", peer.dialect, "--reasoning", "0")
                    engines[peer.dialect] = stack.enter_context(engine)
                try:
                    running[name] = stack.enter_context(self._running(peer, engines[peer.dialect].base_url))
                    if not self._given.quick:
                        results[name] |= await memory(running[name])
                except* FAILURES as errors:
                    results[name]["not run"] = _reason(errors)
                    running.pop(name, None)
                yield f"started: {name}"
            for case in QUICK_CASES if self._given.quick else CASES:
                for name, figures in (await measured(running, CASES[case], rounds=rounds, seconds=seconds)).items():
                    results[name].setdefault("loads", {})[case] = figures.pop("rounds", None)
                    results[name]["errors"] = results[name].get("errors", 0) + figures.pop("errors", 0)
                    if "failed" in figures:
                        results[name].setdefault("failed", {})[case] = figures.pop("failed")
                    results[name] |= figures
                yield f"load: {case}"

    async def survival(self, results: dict[str, Figures]) -> AsyncIterator[str]:
        """Kill and audit one server after the other; gives the name of each that is done."""
        kills, agents = (1, 8) if self._given.quick else (self._given.kills, AGENTS)
        for name, peer in self._peers.items():
            if peer.name == "engine" or "not run" in results[name]:
                continue
            try:
                with WitnessEngine(peer.dialect) as engine, self._running(peer, engine.base_url) as running:
                    results[name][START] = running.start_s
                    results[name] |= await Survival(peer, running.process, engine).figures(kills=kills, agents=agents)
            except* FAILURES as errors:
                results[name].setdefault("failed", {})["survival"] = _reason(errors)
            yield f"survival: {name}"

    @contextlib.contextmanager
    def _running(self, peer: Peer, engine_url: str) -> Iterator[Running]:
        """The server, started on its core."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(folder_for_bench(self._given.folder))
            checkout = self._checkouts.get(peer.name)
            place = Place(
                folder, engine_url, self._pythons[peer.name], Path(checkout).resolve() if checkout else None, stack, []
            )
            process = peer.process(place)
            began = time.monotonic()
            stack.enter_context(started(process, self._cores))
            yield Running(
                peer, process, engine_url, next(iter(place.databases), None), start_s=time.monotonic() - began
            )


def _reason(errors: BaseExceptionGroup[Exception]) -> str:
    """The last line of the first error."""
    error = errors.exceptions[0]
    lines = str(error).strip().splitlines()
    return lines[-1] if isinstance(error, ServerDidNotStart) and lines else repr(error)


START = "s from a start to the first answer"
ROWS: Sequence[str] = (
    *(ours for case in CASES.values() for ours in case.figures.values()),
    MEMORY,
    "exact turns",
    "acknowledged before and after kills",
    "lost",
    "doubled",
    "inexact after kills",
    "agents died",
    START,
    "s until it answers",
    "wrong rows",
)
OF = {
    "exact turns": "of turns without a kill",
    "lost": "acknowledged before and after kills",
    "agents died": "agents",
    "wrong rows": "odd replies",
}


def markdown(results: Mapping[str, Figures]) -> str:
    """A table with a column for each server, then the reasons of those that were not run or failed."""
    names = [name for name, figures in results.items() if "not run" not in figures]
    cells = [["", *names], *([row, *(_cell(results[name], row) for name in names)] for row in ROWS)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names) + 1)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    for name, figures in results.items():
        if "not run" in figures:
            lines.append(f"\n{name}: not run: {figures['not run']}")
        for what, why in figures.get("failed", {}).items():
            lines.append(f"\n{name}: {what} failed: {why}")
        for why, count in figures.get("deaths without a kill", {}).items():
            lines.append(f"\n{name}: {count} agents died without a kill: {why}")
        if figures.get("errors"):
            lines.append(f"\n{name}: {figures['errors']} errors under load")
    return "\n".join(lines)


def _cell(figures: Figures, row: str) -> str:
    value = figures.get(row)
    if value is None:
        return "-"
    if row == MEMORY and figures["turns"] < MEMORY_TURNS:
        return f"{value:,.0f} ({figures['turns']:,} turns)"
    of = f" of {figures[OF[row]]}" if row in OF else ""
    return f"{value:,.3g}{of}" if isinstance(value, float) and value < 100 else f"{value:,.0f}{of}"
