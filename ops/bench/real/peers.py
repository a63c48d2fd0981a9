"""Session servers at real lengths: the time that each adds to the engine alone, its CPU and memory, and what a kill -9
leaves. `python -m ops.bench real --peers`.

Servers and engines get sessions of a coding agent one after the other, in rounds, in an order that alternates; all
servers share a core. A server's time, until the client has read the reply, is what it adds to that of the engine alone
in the same round. Then sessions are played at each server, all at once; it is killed behind the last reply of all, and
started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from ops.bench.load import Open
from ops.bench.measure import MIB, Figures, cpu_s, resident_bytes, save_figures
from ops.bench.peers import FAILURES, prepared
from ops.bench.peers.protocol import Peer, Place
from ops.bench.peers.servers import PEERS
from ops.bench.real.conversation import WIRES, Conversation
from ops.bench.real.material import Material
from ops.bench.real.play import Failed, Talk
from ops.bench.real.stand import BASE, NEW, SAMPLED, engine_process
from ops.bench.stand import Cores, folder_for_bench, pinned, started
from ops.server import OwnProcess

NAMES = [name for name in PEERS if name != "engine"]
WARM_UP_SIZE = 10_000
KILLED_SESSIONS, KILLED_SIZE, KILLED_TURNS = 8, 50_000, 4
SETTLE_S = 1.0
"""Before the records are read: some servers write after the reply."""

FIRST, LATER = "first", "later"


class Server(NamedTuple):
    """A running server, or with no `peer` an engine alone. `engine` is the name of what stands behind it."""

    engine: str
    process: OwnProcess
    opens: Open
    peer: Peer | None = None


class Bench:
    """The servers that run, and what went wrong with the others."""

    def __init__(self, arguments: argparse.Namespace, servers: Mapping[str, Server], cpu_sets: Cores) -> None:
        self._given = arguments
        self._servers = dict(servers)
        self._cpu_sets = cpu_sets
        self._material = Material(arguments.text, arguments.spaced)
        self._numbers = itertools.count(1)
        self.failed: dict[str, str] = {}
        self.figures: dict[str, Figures] = {name: {} for name in servers}

    async def times(self) -> None:
        """Play sessions of each size in rounds: a first turn with a prompt of that size, then later ones."""
        for name, server in self._servers.items():
            with self._noting(name, "the first session"):
                await self._session(server, WARM_UP_SIZE)
        begun = {name: resident_bytes(server.process.pid) for name, server in self._servers.items()}
        for size in self._given.sizes:
            rounds: list[dict[str, dict[str, float]]] = []
            for number in range(self._given.rounds):
                rounds.append({})
                for name in sorted(self._servers, reverse=number % 2 == 1):
                    if name not in self.failed:
                        with self._noting(name, f"{size}k"):
                            rounds[-1][name] = await self._session(self._servers[name], size * 1000)
            for name, server in self._servers.items():
                self.figures[name] |= _added(name, server.engine, f"{size}k", rounds)
            print(f"{size}k of {', '.join(map(str, self._given.sizes))}", file=sys.stderr, flush=True)
        count = len(self._given.sizes) * self._given.rounds
        for name in self._servers.keys() - self.failed.keys():
            after = resident_bytes(self._servers[name].process.pid)
            self.figures[name] |= {"MiB at the start": begun[name] / MIB, f"MiB after {count} sessions": after / MIB}

    async def _session(self, server: Server, size: int) -> dict[str, float]:
        """The seconds of its first turn, and the mean and CPU milliseconds of a later one."""
        talk = await self._begun(server, size)
        began = time.perf_counter()
        await talk.turn(size - min(BASE, size // 2), SAMPLED, calls=True)
        first, cpu, later = time.perf_counter() - began, cpu_s(server.process.pid), time.perf_counter()
        for _ in range(self._given.turns):
            await talk.turn(NEW, SAMPLED, calls=True)
        seconds = time.perf_counter() - later
        talk.close()
        if talk.differing:
            raise Failed(f"{talk.differing} replies are not what the engine said")
        spent = cpu_s(server.process.pid) - cpu
        turns = self._given.turns
        return {FIRST: first * 1000, LATER: seconds * 1000 / turns, "CPU": spent * 1000 / turns}

    async def _begun(self, server: Server, size: int) -> Talk:
        number = next(self._numbers)
        conversation = Conversation(number, min(BASE, size // 2), self._material, WIRES["chat"])
        return await Talk.begin(server.process.base_url, server.opens, f"real-{number}", conversation)

    async def kill(self, name: str) -> None:
        """Play sessions, kill the server behind their last reply, and see what a trainer and an agent then have."""
        server = self._servers[name]
        assert server.peer is not None
        with self._noting(name, "kill -9"):
            talks = await asyncio.gather(*(self._begun(server, KILLED_SIZE) for _ in range(KILLED_SESSIONS)))
            await asyncio.gather(*(self._played(talk) for talk in talks))
            began = time.monotonic()
            with pinned(self._cpu_sets.server):
                await asyncio.to_thread(server.peer.crash, server.process)
            self.figures[name]["s until it answers"] = time.monotonic() - began
            await asyncio.sleep(SETTLE_S)
            kept, turns, going_on = 0, len(talks) * KILLED_TURNS, 0
            for talk in talks:
                found = await self._kept(server, talk)
                kept = kept + found if found is not None else -turns
                talk.close()
                with contextlib.suppress(Failed, *FAILURES):
                    await talk.turn(NEW, SAMPLED, calls=True)
                    going_on += 1
            self.figures[name] |= {
                "turns kept": f"{kept} of {turns}" if kept >= 0 else None,
                # A server without records forwards what it is sent.
                "sessions that go on": f"{going_on} of {len(talks)}" if kept >= 0 else None,
            }

    async def _played(self, talk: Talk) -> None:
        await talk.turn(KILLED_SIZE - BASE, SAMPLED, calls=True)
        for _ in range(KILLED_TURNS - 1):
            await talk.turn(NEW, SAMPLED, calls=True)

    async def _kept(self, server: Server, talk: Talk) -> int | None:
        """The turns of which a trainer gets what the engine sampled; None if the server records nothing."""
        assert server.peer is not None
        async with httpx.AsyncClient(base_url=server.process.base_url, timeout=60, trust_env=False) as client:
            records = await server.peer.records(client, talk.session)
        if records is None:
            return None
        ids = {tuple(record.ids) for record in records}
        turns = talk.conversation.turns
        return sum(tuple(self._material.tokens([turn.items[-1].run]).tolist()) in ids for turn in turns)

    @contextlib.contextmanager
    def _noting(self, name: str, what: str) -> Iterator[None]:
        """What goes wrong with a server ends its part."""
        try:
            yield
        except* (Failed, *FAILURES) as errors:
            error = errors.exceptions[0]
            lines = str(error).strip().splitlines()
            self.failed[name] = f"{what}: {type(error).__name__}: {lines[-1][:300] if lines else ''}"

    def markdown(self) -> str:
        """The table, with a column for each server, then the reasons of those that failed."""
        names = list(self.figures)
        rows = list(dict.fromkeys(row for figures in self.figures.values() for row in figures))
        lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
        lines += [f"| {row} | {' | '.join(_cell(self.figures[name].get(row)) for name in names)} |" for row in rows]
        return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in self.failed.items())])


def _added(name: str, engine: str, size: str, rounds: list[dict[str, dict[str, float]]]) -> Figures:
    """The medians over the rounds that both have, beside the engine alone; of that the whole times."""
    paired = [(one[name], one[engine]) for one in rounds if name in one and engine in one]
    if not paired:
        return {}
    is_engine = name == engine
    figures: Figures = {}
    for what in (FIRST, LATER):
        times = [own[what] - (0 if is_engine else alone[what]) for own, alone in paired]
        figures[f"{size}: ms of {'the first answer' if what == FIRST else 'a later turn'}"] = statistics.median(times)
    return figures | {f"{size}: CPU ms of a later turn": statistics.median(own["CPU"] for own, _ in paired)}


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


async def main(arguments: argparse.Namespace, cpu_sets: Cores) -> int:
    """Print the table. Returns 1 if a server failed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(cpu_sets.others))
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        servers: dict[str, Server] = {}
        missing: dict[str, str] = {}
        checkouts = dict(given.split("=", 1) for given in arguments.server)
        for name in arguments.peers or NAMES:
            peer = PEERS[name]
            engine = f"{peer.dialect} alone"
            if engine not in servers:
                (place := folder / peer.dialect).mkdir()
                process = engine_process(place, peer.dialect, arguments.text, arguments.spaced)
                servers[engine] = Server(engine, stack.enter_context(process), PEERS["engine"].open)
            try:
                (place := folder / name).mkdir()
                checkout = Path(checkouts[name]).resolve() if name in checkouts else None
                python = prepared(peer, checkouts)
                own = Place(place, servers[engine].process.base_url, python, checkout, stack, [])
                process = stack.enter_context(started(peer.process(own), cpu_sets))
                servers[name] = Server(engine, process, peer.open, peer)
            except* FAILURES as errors:
                missing[name] = f"not run: {errors.exceptions[0]}"
            print(f"started: {name}", file=sys.stderr, flush=True)
        bench = Bench(arguments, servers, cpu_sets)
        bench.failed |= missing
        try:
            await bench.times()
            for name, server in servers.items():
                if server.peer is not None and name not in bench.failed:
                    await bench.kill(name)
        finally:
            print(bench.markdown())
            save_figures("real-peers", bench.figures | {"failed": bench.failed})
    return 1 if bench.failed.keys() - missing.keys() else 0
