"""The real load: sessions of a coding agent, beside a relay without a store, another commit and another server.

A table has the server's CPU of a later turn of a session of each size, by thread. Each size is measured in rounds, in
which the servers get such a session one after the other; figures are medians, and of a ratio's servers those of one
round. Another wire stands beside the same session as chat, and chat beside texts of JSON. Then the sample's sessions
are played, all at once, and every exported row is compared with what the engine sampled; with --kills the server is
killed under them. With --processes the store is PostgreSQL, each server's own, whose work stands beside the servers'.
With --peers other session servers are compared instead (peers.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from ops.bench.primary import Database, Work, primary
from ops.bench.real import peers
from ops.bench.real.conversation import WIRES, Conversation, Wire
from ops.bench.real.engine import SHAPES
from ops.bench.real.material import Material
from ops.bench.real.play import Compared, Talk, compared, play, sample
from ops.bench.real.stand import BASE, NEW, SAMPLED, engine_process, module
from ops.bench.stand import Cores, asking, cores, folder_for_bench, pinned, source_tree, started
from ops.server import ROOT, OwnProcess, ServerProcess

SIZES = (10, 50, 100, 250, 500, 900)
GROWING = 4
"""Turns in which a session grows to its size."""

SETTLE_S = 0.1
"""After the turns, for what a server does behind them."""

LONG_TURNS = 500

ALL = "CPU ms a turn"
TURNLOG, FLOOR, BEFORE, CHAT, JSON = "turnlog", "floor", "before", "chat", "json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=["chat", "messages"], help="ids: token-in")
    parser.add_argument("--shape", choices=SHAPES, default="sglang", help="of the engine's replies")
    parser.add_argument("--spaced", action="store_true", help="the engine writes a space after each colon and comma")
    parser.add_argument("--text", choices=("code", JSON), default="code", help="of messages; json: full of commas")
    parser.add_argument("--live", action="store_true", help="of vLLM's shape: a client's stream is the engine's")
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--peers", nargs="*", choices=peers.NAMES, help="only compare these session servers, or all")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=PATH", help="the checkout of a peer")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="thousands of tokens of a prompt")
    parser.add_argument("--processes", type=int, default=0, help="of a server, on one PostgreSQL; 0: one, on SQLite")
    parser.add_argument("--at-once", type=int, default=1, help="sessions of each process that are measured together")
    parser.add_argument("--rounds", type=int, default=5, help="of such sessions of each size")
    parser.add_argument("--turns", type=int, default=8, help="that are measured in a round, of each session")
    parser.add_argument("--sessions", type=int, default=64, help="of the sample that are played; 0: none")
    parser.add_argument("--kills", type=int, default=0, help="of the server, while the sample is played once more")
    parser.add_argument("--quick", action="store_true", help="one round of two small sizes, four sessions, one kill")


class Side(NamedTuple):
    """The processes of a server, how a session is opened there, the wire and the texts in which it is played, and
    PostgreSQL's database."""

    servers: Sequence[OwnProcess]
    opens: Open
    wire: Wire
    material: Material
    database: Database | None = None

    def cpu_s(self) -> dict[str, float]:
        """Of all processes, by thread."""
        own = [cpu_s_by_thread(server.pid) for server in self.servers]
        return {thread: sum(one[thread] for one in own) for thread in own[0]}


async def main(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        arguments.sizes, arguments.rounds, arguments.turns = (10, 50), 1, 4
        arguments.sessions, arguments.kills = min(arguments.sessions, 4), 1
    cpu_sets, failed = cores(), 0
    if arguments.peers is not None:
        return await peers.main(arguments, cpu_sets)
    materials = {text: Material(text, arguments.spaced) for text in ("code", JSON)}
    for name in arguments.wires:
        with _sides(arguments, name, materials, cpu_sets) as sides:
            rows = await _turns(arguments, sides)
            table([{"wire": name, **row} for row in rows])
            save_figures(f"real-{name}-turns", rows)
            for who in (TURNLOG, BEFORE):
                if who in sides and arguments.sessions:
                    print(f"\n{name}, {who}")
                    figures = await Played(arguments, sides[who], cpu_sets.server).figures()
                    report(f"real-{name}-{who}", figures)
                    failed += sum(count for what, count in figures.items() if what.startswith("!"))
    return 1 if failed else 0


# turns of sessions of each size


async def _turns(arguments: argparse.Namespace, sides: Mapping[str, Side]) -> list[Figures]:
    """A row for each size: of Turnlog each thread's share; of the others theirs, and the ratio of Turnlog's to it."""
    numbers = itertools.count(1)
    rows = []
    for size in arguments.sizes:

        async def measure(who: str) -> Figures:
            side = sides[who]
            count = len(side.servers) * arguments.at_once
            talks = await asyncio.gather(*(_grown(side, size * 1000, next(numbers)) for _ in range(count)))  # noqa: B023
            async with side.database.work() if side.database else contextlib.nullcontext(list[Work]()) as works:
                before = side.cpu_s()
                await asyncio.gather(*(_later(talk, arguments.turns) for talk in talks))
                await asyncio.sleep(SETTLE_S)
                after, turns = side.cpu_s(), count * arguments.turns
            cpu = {thread: (after[thread] - before[thread]) * 1000 / turns for thread in after}
            return {**cpu, ALL: sum(cpu.values()), **(works[0].figures(turns) if works else {})}

        periods = await alternate(sides, arguments.rounds, measure)
        row: Figures = {"prompt": f"{size}k", **medians(periods[TURNLOG])}
        for who in sorted(sides.keys() - {TURNLOG}):
            row |= {who: medians(periods[who])[ALL], **against(who, ALL, periods[TURNLOG], periods[who])}
        rows.append(row)
        print(f"{size}k of {', '.join(map(str, arguments.sizes))}", file=sys.stderr, flush=True)
    return rows


async def _grown(side: Side, size: int, number: int) -> Talk:
    """A session whose next prompt has about so many tokens. Its last turn is as those that follow: as Messages, the
    mark leaves the long message before it there, which is then read once more."""
    base = min(BASE, size // 2)
    conversation = Conversation(number, base, side.material, side.wire)
    server = side.servers[number % len(side.servers)]
    talk = await Talk.begin(server.base_url, side.opens, f"grown-{number}", conversation)
    for _ in range(GROWING):
        await talk.turn((size - base - 2 * NEW) // GROWING - SAMPLED, SAMPLED, calls=True)
    await talk.turn(NEW, SAMPLED, calls=True)
    return talk


async def _later(talk: Talk, turns: int) -> None:
    for _ in range(turns):
        await talk.turn(NEW, SAMPLED, calls=True)
    talk.close()


# the sample


class Played:
    """What is measured of one server with the sample's sessions, and with a long one."""

    def __init__(self, arguments: argparse.Namespace, side: Side, cpus: set[int]) -> None:
        self._cpus = cpus
        self._server = side.servers[0]
        assert isinstance(self._server, ServerProcess)
        self._files = self._server.database_path
        self._side = side
        self._given = arguments
        sessions = sorted(sample().sessions, key=lambda one: len(one.turns))
        self._sessions = sessions[:: max(len(sessions) // arguments.sessions, 1)][: arguments.sessions]
        if arguments.quick:
            self._sessions = sessions[: arguments.sessions]

    async def figures(self) -> Figures:
        """Names that begin with "!" are of what must not be."""
        return {
            **await self._sample(),
            **await self._long(),
            **(await self._kills() if self._given.kills else {}),
        }

    async def _sample(self) -> Figures:
        """All sessions at once."""
        stored, _ = await self._restart()
        server, begun = self._server, disk_bytes(self._files.parent)
        async with asking(server.base_url) as times:
            began = time.perf_counter()
            talks = await play(
                *(self._urls, self._side.opens, self._sessions, self._side.material, self._side.wire),
                first=10_000,
                clients=len(self._sessions),
            )
            seconds = time.perf_counter() - began
        found = await compared(server.base_url, talks)
        after, written = await self._restart()
        stored = after - stored
        new = sum(one.bases[0] + sum(turn[2][0][1] + turn[3] for turn in one.turns) for one in self._sessions)
        return {
            "sessions": len(talks),
            "turns/s": found.turns / seconds,
            "/health p95 ms": percentile(times, 95) * 1000,
            "bytes stored a new token": stored / new,
            "bytes written over stored": (written - begun) / stored,
            **_judged("", found, talks),
        }

    async def _long(self) -> Figures:
        """One long session, and its first turn after a restart."""
        stored, _ = await self._restart()
        server, turns = self._server, LONG_TURNS // 10 if self._given.quick else LONG_TURNS
        begun, cached, resident = (
            disk_bytes(self._files.parent),
            await self._metric("cache_bytes"),
            resident_bytes(server.pid),
        )
        conversation = Conversation(30_000, BASE, self._side.material, self._side.wire)
        talk = await Talk.begin(server.base_url, self._side.opens, "long", conversation)
        await talk.turn(NEW, SAMPLED, calls=True)
        jobs, cpu = await self._metric("pool_jobs_total"), []
        for turn in range(turns):
            if turn % (turns // 5) == 0:
                cpu.append(self._cpu_s())
            await talk.turn(NEW, SAMPLED, calls=True)
        cpu.append(self._cpu_s())
        cached = await self._metric("cache_bytes") - cached
        figures = {
            f"CPU of the last fifth of {turns} turns over the first": (cpu[-1] - cpu[-2]) / (cpu[1] - cpu[0]),
            "its worker jobs after the first turn": await self._metric("pool_jobs_total") - jobs,
            "its cache over its last request": cached / talk.sent,
            "resident bytes a session token": (resident_bytes(server.pid) - resident)
            / (BASE + (turns + 1) * (NEW + SAMPLED)),
        }
        talk.close()
        after, written = await self._restart()
        # The start of a worker costs as much as such a turn.
        wanted = await self._metric('pool_workers{state="configured"}')
        while await self._metric('pool_workers{state="alive"}') < wanted:  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_S)
        cold, began = self._cpu_s(), time.perf_counter()
        await talk.turn(NEW, SAMPLED, calls=True)
        seconds = time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)
        cold = self._cpu_s() - cold
        talk.close()
        one = self._side._replace(servers=[server])
        few = await _grown(one, BASE + (turns - turns // 5) * (NEW + SAMPLED), 30_001)
        of_few = self._cpu_s()
        for _ in range(turns // 5):
            await few.turn(NEW, SAMPLED, calls=True)
        few.close()
        return {
            **figures,
            "the last fifth over a session of that length, of few turns": (cpu[-1] - cpu[-2])
            / (self._cpu_s() - of_few),
            "its bytes written over stored": (written - begun) / (after - stored),
            "its first turn after a restart, ms": seconds * 1000,
            "its first turn after a restart, CPU ms": cold * 1000,
        }

    async def _kills(self) -> Figures:
        """Kill the server in the middle, at equal distances."""
        turns = sum(len(one.turns) for one in self._sessions)
        at = {turns * number // (self._given.kills + 1) for number in range(1, self._given.kills + 1)}
        done = itertools.count(1)

        async def kill() -> None:
            if (turn := next(done)) in at:
                server = self._side.servers[turn % len(self._side.servers)]
                server.kill()
                await asyncio.to_thread(self._start, server)

        talks = await play(
            *(self._urls, self._side.opens, self._sessions, self._side.material, self._side.wire),
            first=20_000,
            clients=len(self._sessions),
            retries=True,
            after_turn=kill,
        )
        found = await compared(self._server.base_url, talks)
        return {"kills": len(at), **_judged("after kills, ", found, talks)}

    async def _metric(self, name: str) -> float:
        async with await Connection.connect(self._server.base_url) as connection:
            text = (await connection.request("GET", "/metrics")).body.decode()
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"turnlog_{name} ")))

    @property
    def _urls(self) -> list[str]:
        return [server.base_url for server in self._side.servers]

    def _cpu_s(self) -> float:
        return sum(cpu_s_by_thread(self._server.pid).values())

    def _start(self, server: OwnProcess) -> None:
        with pinned(self._cpus):
            server.start()

    async def _restart(self) -> tuple[int, float]:
        """The bytes of the database without a log file, and what has been written to its disk, before the start."""
        for server in self._side.servers:
            await asyncio.to_thread(server.stop)
        if self._side.database is None:
            stored = self._files.stat().st_size
        else:
            await self._side.database.row("CHECKPOINT")
            [stored] = await self._side.database.row("SELECT pg_database_size(current_database())")
        written = disk_bytes(self._files.parent)
        for server in self._side.servers:
            await asyncio.to_thread(self._start, server)
        return stored, written


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
def _sides(
    arguments: argparse.Namespace, name: str, materials: Mapping[str, Material], cpu_sets: Cores
) -> Iterator[dict[str, Side]]:
    """All servers, with the engine that each needs."""
    wire, chat = WIRES[name], WIRES["chat"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(cpu_sets.others))
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engines = {
            text: stack.enter_context(engine_process(folder, arguments.shape, text, arguments.spaced)).base_url
            for text in materials
        }
        placed = {BEFORE: (source_tree(arguments.before, folder), arguments.text)} if arguments.before else {}
        placed[TURNLOG] = ROOT, arguments.text
        if wire is chat:
            placed[JSON] = ROOT, JSON
        sides = {}
        settings = {"TURNLOG_UPSTREAM_DIALECT": arguments.shape}
        # An agent program's history is a tree.
        opens = partial(open_session, history="tree", stream_mode="live" if arguments.live else "whole")
        for who, (root, text) in placed.items():
            (place := folder / f"{who}-store").mkdir()
            # What a PostgreSQL does is counted as one side's.
            database = stack.enter_context(primary(arguments.folder)).new_database() if arguments.processes else None
            url = None if database is None else database.url
            servers = [
                ServerProcess(place, upstreams=[engines[text]], database_url=url, environment=settings, root=root)
                for _ in range(arguments.processes or 1)
            ]
            servers[0].migrate()
            processes = [stack.enter_context(started(server, cpu_sets)) for server in servers]
            sides[who] = Side(processes, opens, wire, materials[text], database)
        if wire is not chat and not wire.is_ids:
            sides[CHAT] = sides[TURNLOG]._replace(wire=chat)
        plain = wire if wire.is_ids else chat
        floor = module("floor", folder, "--engine", engines[arguments.text])
        material = materials[arguments.text]
        sides[FLOOR] = Side([stack.enter_context(started(floor, cpu_sets))], _opened_nowhere, plain, material)
        yield sides


async def _opened_nowhere(connection: Connection, name: str) -> Session:
    return Session(name, f"/sessions/{name}")
