"""Large replies: turns a second, server CPU and latency at 2 KiB to 50 MiB, beside the ideal or beside a peer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ops.bench import peers
from ops.bench.load import Script
from ops.bench.measure import keep, table
from ops.bench.sizes import FEW_TOKENS, KIB, MIB, Payload, fitted, warm
from ops.bench.stand import cores, simulator
from ops.bench.targets import Elsewhere, Target, Turnlog, measured


class Size(NamedTuple):
    """`ideal_ms`: CPU of a whole durable turn in an ideal pipeline, where it has been measured."""

    reply_bytes: int
    clients: int
    turns_per_session: int
    completion_tokens: int
    ideal_ms: float | None

    async def script(self, engine_url: str, nested: bool, asked: bool) -> Script:
        """Sessions of such replies, which the engine has made once. Raises Broken."""
        payload = Payload(nested=nested, asked=asked) if self.completion_tokens > FEW_TOKENS else None
        made = await fitted(engine_url, self.reply_bytes, self.turns_per_session, payload, self.completion_tokens)
        await warm(engine_url, made, self.turns_per_session)
        return made


SIZES = {
    "2KiB": Size(2 * KIB, 64, 8, FEW_TOKENS, 0.19),
    "100KiB": Size(100 * KIB, 64, 4, 10, None),
    "1.3MiB": Size(13 * MIB // 10, 64, 8, 32, 2.7),
    "50MiB": Size(50 * MIB, 2, 4, 200, 140.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each; the median is shown")
    parser.add_argument("--clients", type=int, help="instead of 64 (2 at 50 MiB)")
    parser.add_argument("--peer", choices=(peers.PACKAGE,), help="measured in turns with Turnlog")
    parser.add_argument("--peer-stores", nargs="+", choices=peers.STORES, default=["sqlite-sync", "memory"])
    parser.add_argument("--peer-packages", nargs="+", default=[], help="installed beside the peer")
    parser.add_argument("--base-url", help="a running server with the same routes, in place of Turnlog")
    parser.add_argument("--pid", type=int, help="of that server, for its CPU")
    parser.add_argument("--engine-port", type=int, default=0, help="the simulator's, for that server's settings")
    parser.add_argument("--nested", action="store_true", help="routed_experts as nested lists, not base64")
    add_unasked_argument(parser)
    add_place_arguments(parser)


def add_unasked_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unasked", action="store_true", help="the engine sends the payload though no client asks")


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine, and where the processes run: the same for all benchmarks of large replies."""
    parser.add_argument("--dialect", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--spread", action="store_true", help="all processes on both cores; else the server has one")
    parser.add_argument("--folder", type=Path, help="where databases are put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    targets = _targets(arguments)
    places = cores(arguments.spread)
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    with simulator(places, arguments.dialect, arguments.engine_port) as engine:
        for name in arguments.sizes:
            size = SIZES[name]
            if arguments.clients:
                size = size._replace(clients=arguments.clients)
            script = await size.script(engine.base_url, arguments.nested, not arguments.unasked)
            found: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
            for _ in range(arguments.repeat):
                for target in targets:
                    async with target.running(engine.base_url, places) as running:
                        one = await measured(
                            running,
                            engine.pid,
                            script,
                            clients=size.clients,
                            turns_per_session=size.turns_per_session,
                            seconds=arguments.seconds,
                        )
                    found[target.name].append(one.figures())
                    raw.append({"size": name, "server": target.name, **one.figures(), "kinds": one.tally.errors})
            rows += [_row(name, size, target, found[target.name]) for target in targets]
    table(rows)
    for target in targets:
        print(f"{target.name}: {target.configured}")
    print(f"written to {keep(_file(arguments), {'rows': rows, 'measurements': raw, 'arguments': _said(arguments)})}")
    return 1 if any(row["errors"] for row in rows if row["server"] == "turnlog") else 0


def _targets(arguments: argparse.Namespace) -> Sequence[Target]:
    elsewhere = arguments.base_url and Elsewhere(arguments.base_url, arguments.pid)
    first: Target = elsewhere or Turnlog(arguments.folder)
    if not arguments.peer:
        return [first]
    return [first, *peers.gateways(arguments.folder, arguments.peer_stores, arguments.peer_packages)]


def _row(name: str, size: Size, target: Target, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; counts that must agree are summed."""
    summed = ("turns", "answered", "recorded", "errors")
    figures: dict[str, Any] = {}
    for key in found[0]:
        values = [one[key] for one in found]
        figures[key] = None if None in values else sum(values) if key in summed else median(values)
    cpu = figures["server CPU ms a turn"]
    ratio = None if cpu is None or size.ideal_ms is None else cpu / size.ideal_ms
    return {"size": name, "clients": size.clients, "server": target.name, "CPU / ideal": ratio, **figures}


def _file(arguments: argparse.Namespace) -> str:
    marks = [name for name in ("nested", "unasked", "spread") if getattr(arguments, name)]
    return "-".join(filter(None, ["replies", arguments.peer, "elsewhere" if arguments.base_url else "", *marks]))


def _said(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if isinstance(value, str | int | float | list)}
