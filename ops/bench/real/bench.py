"""The real load: sessions of a coding agent, beside a relay without a store, another commit and another server.

A table has the server's CPU of a later turn of a session of each size, by thread. Each size is measured in rounds, in
which the servers get such a session one after the other; figures are medians, and of a ratio's servers those of one
round. Then the sample's sessions are played, and every exported row is compared with what the
engine sampled; with --kills the server is killed under them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ops.bench.client import Connection
from ops.bench.load import Open, Session, open_session
from ops.bench.measure import (
    Figures,
    against,
    alternate,
    cpu_s_by_thread,
    disk_bytes,
    medians,
    percentile,
    report,
    resident_bytes,
    save_figures,
    table,
)
from ops.bench.peers.protocol import Place, interpreter
from ops.bench.peers.servers import PEERS
from ops.bench.real.conversation import WIRES, Conversation, Wire
from ops.bench.real.engine import SHAPES
from ops.bench.real.material import Material
from ops.bench.real.play import Compared, Talk, compared, play, sample
from ops.bench.stand import Cores, asking, cores, folder_for_bench, pinned, source_tree, started
from ops.server import PORT, ROOT, OwnProcess, ServerProcess

SIZES = (10, 50, 100, 250, 500, 900)
NEW, SAMPLED = 776, 224
"""Tokens of a later turn, as in the sample on the average."""

BASE = 15_000
GROWING = 4
"""Turns in which a session grows to its size."""

SETTLE_S = 0.1
"""After the turns, for what a server does behind them."""

COLD_TURNS = 500
CLIENTS = 4
PEER = PEERS["rllm-sqlite"]

ALL = "CPU ms a turn"
TURNLOG, FLOOR, BEFORE = "turnlog", "floor", "before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=["chat", "messages"], help="ids: token-in")
    parser.add_argument("--shape", choices=SHAPES, default="sglang", help="of the engine's replies")
    parser.add_argument("--spaced", action="store_true", help="the engine writes a space after each colon and comma")
    parser.add_argument("--text", choices=("code", "json"), default="code", help="of messages; json: full of commas")
    parser.add_argument("--live", action="store_true", help="of vLLM's shape: a client's stream is the engine's")
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--peer", action="store_true", help=f"beside {PEER.name} too, which takes chat alone")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="thousands of tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="a session of each size in each")
    parser.add_argument("--turns", type=int, default=8, help="that are measured in a round, of each session")
    parser.add_argument("--sessions", type=int, default=16, help="of the sample that are played; 0: none")
    parser.add_argument("--kills", type=int, default=0, help="of the server, while the sample is played once more")
    parser.add_argument("--quick", action="store_true", help="one round of two small sizes, four sessions, one kill")


class Side(NamedTuple):
    """A server, how a session is opened there, and the wire that it is played in."""

    server: OwnProcess
    opens: Open
    wire: Wire


async def main(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        arguments.sizes, arguments.rounds, arguments.turns = (10, 50), 1, 4
        arguments.sessions, arguments.kills = min(arguments.sessions, 4), 1
    material = Material(arguments.text, arguments.spaced)
    cpu_sets, failed = cores(), 0
    for name in arguments.wires:
        with _sides(arguments, WIRES[name], cpu_sets) as sides:
            rows = await _turns(arguments, material, sides)
            table([{"wire": name, **row} for row in rows])
            save_figures(f"real-{name}-turns", rows)
            for who in (TURNLOG, BEFORE):
                if who in sides and arguments.sessions:
                    print(f"\n{name}, {who}")
                    figures = await Played(arguments, material, sides[who], cpu_sets.server).figures()
                    report(f"real-{name}-{who}", figures)
                    failed += sum(count for what, count in figures.items() if what.startswith("!"))
    return 1 if failed else 0


# turns of sessions of each size


async def _turns(arguments: argparse.Namespace, material: Material, sides: Mapping[str, Side]) -> list[Figures]:
    """A row for each size: of Turnlog each thread's share; of the others theirs, and the ratio of Turnlog's to it."""
    numbers = itertools.count(1)
    rows = []
    for size in arguments.sizes:

        async def measure(who: str) -> Figures:
            talk = await _grown(sides[who], size * 1000, next(numbers), material)  # noqa: B023
            before = cpu_s_by_thread(sides[who].server.pid)
            for _ in range(arguments.turns):
                await talk.turn(NEW, SAMPLED, calls=True)
            await asyncio.sleep(SETTLE_S)
            after = cpu_s_by_thread(sides[who].server.pid)
            talk.close()
            cpu = {thread: (after[thread] - before[thread]) * 1000 / arguments.turns for thread in after}
            return {**cpu, ALL: sum(cpu.values())}

        periods = await alternate(sides, arguments.rounds, measure)
        row: Figures = {"prompt": f"{size}k", **medians(periods[TURNLOG])}
        for who in sorted(sides.keys() - {TURNLOG}):
            row |= {who: medians(periods[who])[ALL], **against(who, ALL, periods[TURNLOG], periods[who])}
        rows.append(row)
        print(f"{size}k of {', '.join(map(str, arguments.sizes))}", file=sys.stderr, flush=True)
    return rows


async def _grown(side: Side, size: int, number: int, material: Material) -> Talk:
    """A session whose next prompt has about so many tokens. Its last turn is as those that follow: in Messages the mark
    leaves a long message there, which is then read once more."""
    base = min(BASE, size // 2)
    conversation = Conversation(number, base, material, side.wire)
    talk = await Talk.begin(side.server.base_url, side.opens, f"grown-{number}", conversation)
    for _ in range(GROWING):
        await talk.turn((size - base - 2 * NEW) // GROWING - SAMPLED, SAMPLED, calls=True)
    await talk.turn(NEW, SAMPLED, calls=True)
    return talk


# the sample


class Played:
    """What is measured of one server with the sample's sessions, and with a long one."""

    def __init__(self, arguments: argparse.Namespace, material: Material, side: Side, cpus: set[int]) -> None:
        assert isinstance(side.server, ServerProcess)
        self._cpus = cpus
        self._server = side.server
        self._side = side
        self._given = arguments
        self._material = material
        sessions = sorted(sample().sessions, key=lambda one: len(one.turns))
        self._sessions = sessions[:: max(len(sessions) // arguments.sessions, 1)][: arguments.sessions]
        if arguments.quick:
            self._sessions = sessions[: arguments.sessions]

    async def figures(self) -> Figures:
        """Names that begin with "!" are of what must not be."""
        return {
            **await self._sample(),
            **await self._cold(),
            "/health p95 ms": await self._health(),
            **(await self._kills() if self._given.kills else {}),
        }

    async def _sample(self) -> Figures:
        # SQLite's log file begins empty: what the sizes' sessions left there would be moved into the database here, 32
        # MiB at once, on one side and not on the other.
        await asyncio.to_thread(self._restart)
        server, stored, written = self._server, self._stored(), disk_bytes(self._server.pid)
        began = time.perf_counter()
        talks = await play(
            *(server.base_url, self._side.opens, self._sessions, self._material, self._side.wire),
            first=10_000,
            clients=CLIENTS,
        )
        seconds, written = time.perf_counter() - began, disk_bytes(server.pid) - written
        found = await compared(server.base_url, talks)
        await asyncio.to_thread(self._restart)
        new = sum(one.bases[0] + sum(turn[2][0][1] + turn[3] for turn in one.turns) for one in self._sessions)
        return {
            "sessions": len(talks),
            "turns/s": found.turns / seconds,
            "bytes stored a new token": (self._stored() - stored) / new,
            "bytes written a new token": written / new,
            **_judged("", found, talks),
        }

    async def _cold(self) -> Figures:
        """A long session, and its first turn after a restart."""
        server, turns = self._server, COLD_TURNS // 10 if self._given.quick else COLD_TURNS
        cached, resident = await self._cached(), resident_bytes(server.pid)
        conversation = Conversation(30_000, BASE, self._material, self._side.wire)
        talk = await Talk.begin(server.base_url, self._side.opens, "cold", conversation)
        for _ in range(turns):
            await talk.turn(NEW, SAMPLED, calls=True)
        tokens = BASE + turns * (NEW + SAMPLED)
        figures = {
            "cache bytes a session token": (await self._cached() - cached) / tokens,
            "resident bytes a session token": (resident_bytes(server.pid) - resident) / tokens,
        }
        talk.close()
        await asyncio.to_thread(self._restart)
        async with await Connection.connect(server.base_url) as connection:
            await connection.request("GET", "/health")
        before, began = cpu_s_by_thread(server.pid), time.perf_counter()
        await talk.turn(NEW, SAMPLED, calls=True)
        seconds = time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)
        cpu = sum(cpu_s_by_thread(server.pid).values()) - sum(before.values())
        talk.close()
        name = f"first turn of a cold session of {turns} turns"
        return {**figures, f"{name}, ms": seconds * 1000, f"{name}, CPU ms": cpu * 1000}

    async def _health(self) -> float:
        """The lightest route's p95, while large turns run."""
        size = max(self._given.sizes) * 500
        talks = [await _grown(self._side, size, 40_000 + number, self._material) for number in range(CLIENTS)]

        async def turns(talk: Talk) -> None:
            for _ in range(self._given.turns):
                await talk.turn(NEW, SAMPLED, calls=True)
            talk.close()

        async with asking(self._server.base_url) as times:
            await asyncio.gather(*map(turns, talks))
        return percentile(times, 95) * 1000

    async def _kills(self) -> Figures:
        """Kill the server in the middle, at equal distances."""
        turns = sum(len(one.turns) for one in self._sessions)
        at = {turns * number // (self._given.kills + 1) for number in range(1, self._given.kills + 1)}
        done = itertools.count(1)

        async def kill() -> None:
            if next(done) in at:
                self._server.kill()
                await asyncio.to_thread(self._start)

        talks = await play(
            *(self._server.base_url, self._side.opens, self._sessions, self._material, self._side.wire),
            first=20_000,
            clients=CLIENTS,
            retries=True,
            after_turn=kill,
        )
        found = await compared(self._server.base_url, talks)
        return {"kills": len(at), **_judged("after kills, ", found, talks)}

    async def _cached(self) -> float:
        async with await Connection.connect(self._server.base_url) as connection:
            text = (await connection.request("GET", "/metrics")).body.decode()
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith("turnlog_cache_bytes ")))

    def _stored(self) -> int:
        return sum(path.stat().st_size for path in self._server.database_path.parent.glob("turnlog.db*"))

    def _start(self) -> None:
        with pinned(self._cpus):
            self._server.start()

    def _restart(self) -> None:
        self._server.stop()
        self._start()


def _judged(when: str, found: Compared, talks: Sequence[Talk]) -> dict[str, int]:
    return {
        f"{when}turns": found.turns,
        f"{when}rows compared": found.rows,
        f"!{when}rows differing": found.differing,
        f"!{when}replies differing": sum(talk.differing for talk in talks),
        f"!{when}turns lost": found.lost,
        f"!{when}turns doubled": found.doubled,
    }


# servers


@contextlib.contextmanager
def _sides(arguments: argparse.Namespace, wire: Wire, cpu_sets: Cores) -> Iterator[dict[str, Side]]:
    """All servers, with the engine that each needs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(cpu_sets.others))
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engine = stack.enter_context(engine_process(folder, arguments.shape, arguments.text, arguments.spaced))
        trees = {BEFORE: source_tree(arguments.before, folder)} if arguments.before else {}
        sides = {}
        settings = {"TURNLOG_UPSTREAM_DIALECT": arguments.shape}
        # An agent program's history is a tree.
        opens = partial(open_session, history="tree", stream_mode="live" if arguments.live else "whole")
        for who, root in {**trees, TURNLOG: ROOT}.items():
            (place := folder / f"{who}-store").mkdir()
            server = ServerProcess(place, upstreams=[engine.base_url], environment=settings, root=root).migrate()
            stack.enter_context(started(server, cpu_sets))
            sides[who] = Side(server, opens, wire)
        plain = wire if wire.is_ids else WIRES["chat"]
        floor = _module("floor", folder, "--engine", engine.base_url)
        sides[FLOOR] = Side(stack.enter_context(started(floor, cpu_sets)), _opened_nowhere, plain)
        if arguments.peer:
            ids = engine_process(folder, PEER.dialect, arguments.text, arguments.spaced)
            own = Place(folder, stack.enter_context(ids).base_url, interpreter(PEER), None, stack, [])
            process = stack.enter_context(started(PEER.process(own), cpu_sets))
            sides[PEER.name] = Side(process, PEER.open, WIRES["chat"])
        yield sides


def engine_process(folder: Path, shape: str, text: str, spaced: bool) -> OwnProcess:
    """The engine, with its log in a folder."""
    return _module("engine", folder, "--shape", shape, "--text", text, *(["--spaced"] if spaced else []))


def _module(name: str, folder: Path, *options: str) -> OwnProcess:
    """A program beside this file."""
    command = [sys.executable, "-m", f"ops.bench.real.{name}", "--port", PORT, *options]
    return OwnProcess(command, folder / f"{name}.log", environment=dict(os.environ))


async def _opened_nowhere(connection: Connection, name: str) -> Session:
    return Session(name, f"/sessions/{name}")
