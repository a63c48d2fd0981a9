"""CPU of a turn with a long prompt: a known history, or an unknown one; beside an ideal pipeline, and another commit.

Known: the request repeats a session's history and adds a reply and a question. Unknown: it begins a session. The ideal
pipeline (`ops.bench.ideal`) reads the request once, hashes it and passes it on; it speaks chat alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ops.bench.client import Broken, Connection
from ops.bench.ideal import PATH, ideal
from ops.bench.measure import cpu_s, save_figures, table
from ops.bench.profile import top_frames
from ops.bench.sessions import CHAT, SIM, WIRES, Conversation, Wire, error_code, opening_messages
from ops.bench.sizes import REQUESTED_FIELDS
from ops.bench.stand import cores, folder_for_bench, simulator, started
from ops.bench.turns import source_tree
from ops.server import ROOT, OwnProcess, ServerProcess

SIZES = {"4KB": 4 << 10, "40KB": 40 << 10, "400KB": 400 << 10, "4MB": 4 << 20}
CLIENTS = 4
PERIOD_BYTES = 6 << 20
"""Of a client's requests in a period, about; it takes at least one turn."""

MOST_TURNS = 100
"""Of a client in a period."""

TURNS_PER_SESSION = 200
"""Of a known history, which grows by 130 bytes a turn."""

PROFILE_S = 6.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", help="a commit, or the folder of a checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=6, help="number of compared periods")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="number of clients of each server")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--histories", nargs="+", choices=("known", "unknown"), default=["known", "unknown"])
    parser.add_argument("--protocols", nargs="+", choices=WIRES, default=["chat"])
    parser.add_argument("--profile", action="store_true", help="afterwards, profile this tree's server for each row")


async def main(arguments: argparse.Namespace) -> int:
    rows: list[Mapping[str, Any]] = []
    profiles: dict[str, Any] = {}
    with _servers(arguments) as servers:
        for protocol, size, history in itertools.product(arguments.protocols, arguments.sizes, arguments.histories):
            sides = {
                name: _Side(
                    server, SIZES[size], history, None if name == "ideal" else WIRES[protocol], arguments.clients
                )
                for name, server in servers.items()
            }
            compared = await _compared(sides, arguments.rounds)
            rows.append({"protocol": protocol, "request": size, "history": history, **compared})
            if arguments.profile:
                what = f"{protocol} {size} {history}"
                frames = profiles[what] = await _profile(sides["after"], servers["after"])
                print(f"{what}:", *(f"{share} {frame}" for frame, share in frames), sep="\n  ", flush=True)
    table(rows)
    save_figures("long", {"rows": rows, "profiles": profiles})
    return 1 if any(row["errors"] for row in rows) else 0


@contextlib.contextmanager
def _servers(arguments: argparse.Namespace) -> Iterator[dict[str, OwnProcess]]:
    """The ideal pipeline, this tree's server, and with `--before` the other commit's, all on one core."""
    cpu_sets = cores()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_for_bench(arguments.folder))
        engine = stack.enter_context(simulator(cpu_sets))
        servers: dict[str, OwnProcess] = {"ideal": ideal(folder, engine.base_url)}
        trees = {"before": source_tree(arguments.before, folder)} if arguments.before else {}
        for name, root in {**trees, "after": ROOT}.items():
            (own := folder / f"{name}-store").mkdir()
            servers[name] = ServerProcess(own, upstreams=[engine.base_url], root=root).migrate()
        for server in servers.values():
            stack.enter_context(started(server, cpu_sets))
        yield servers


async def _compared(sides: Mapping[str, _Side], rounds: int) -> dict[str, Any]:
    """Alternating periods; a ratio compares the periods of one round."""
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 1):
            found = await sides[name].period()
            if number:  # the first round warms up
                cpu[name].append(found)
    figures: dict[str, Any] = {f"{name} ms": statistics.median(found) for name, found in cpu.items()}
    for before in ("before", "ideal"):
        if before in cpu:
            ratios = [after / other for after, other in zip(cpu["after"], cpu[before], strict=True)]
            figures[f"after / {before}"] = statistics.median(ratios)
    for side in sides.values():
        await side.close()
    return {**figures, "errors": sum(side.errors for side in sides.values())}


async def _profile(side: _Side, server: OwnProcess) -> list[tuple[str, str]]:
    profiling = asyncio.create_task(top_frames(server.pid, PROFILE_S, server.log_path.parent))
    while not profiling.done():
        await side.period()
    await side.close()
    return await profiling


class _Side:
    """`count` clients of one server, which take a fixed number of turns in each period. `wire` is None for the ideal
    pipeline."""

    def __init__(self, server: OwnProcess, size: int, history: str, wire: Wire | None, count: int) -> None:
        self.errors = 0
        self._server = server
        self._is_ideal = wire is None
        self._wire = wire or CHAT
        self._is_known = history == "known"
        self._size = size
        self._opening = opening_messages(size)
        self._count = count
        self._turns = max(1, min(MOST_TURNS, PERIOD_BYTES // size))
        self._clients: list[_Client] = []

    async def period(self) -> float:
        """CPU milliseconds of the server for each turn."""
        if not self._clients:
            self._clients = [await _Client.connect(self._server.base_url, self._is_ideal) for _ in range(self._count)]
        for client in self._clients:
            await self._prepare(client)
        before = cpu_s(self._server.pid)
        await asyncio.gather(*(self._take(client) for client in self._clients))
        return (cpu_s(self._server.pid) - before) * 1000 / (self._turns * self._count)

    async def close(self) -> None:
        for client in self._clients:
            client.connection.close()
        self._clients = []

    async def _prepare(self, client: _Client) -> None:
        """Create the sessions of a period; those with a known history have taken a turn."""
        if client.connection.closed:
            client.connection = await Connection.connect(self._server.base_url)
        if not self._is_known:
            client.sessions = [await client.new_session() for _ in range(self._turns)]
        elif not client.sessions or client.conversation.turns > TURNS_PER_SESSION:
            client.sessions = [await client.new_session()]
            client.conversation = self._conversation()
            await self._turn(client)

    async def _take(self, client: _Client) -> None:
        for number in range(self._turns):
            if not self._is_known:
                client.sessions = client.sessions[1:] if number else client.sessions
                client.conversation = self._conversation()
            await self._turn(client)

    def _conversation(self) -> Conversation:
        return Conversation(self._opening, SIM, REQUESTED_FIELDS if self._wire is CHAT else b"", self._wire)

    async def _turn(self, client: _Client) -> None:
        path = PATH if self._is_ideal else f"/sessions/{client.sessions[0]}{self._wire.route}"
        response = await client.connection.request("POST", path, client.conversation.body())
        if response.status != 200:
            self.errors += 1
            raise Broken(f"{response.status} {error_code(response.body)}")
        client.conversation.answered(self._wire.added(response.body))


class _Client:
    """One connection, its sessions and the conversation of the first of them."""

    def __init__(self, connection: Connection, is_ideal: bool) -> None:
        self.connection = connection
        self.sessions: list[str] = []
        self.conversation = Conversation([])
        self._is_ideal = is_ideal

    @classmethod
    async def connect(cls, base_url: str, is_ideal: bool) -> _Client:
        return cls(await Connection.connect(base_url), is_ideal)

    async def new_session(self) -> str:
        name = f"long-{secrets.token_hex(8)}"
        if not self._is_ideal:
            await self.connection.json("POST", "/sessions", {"session_id": name})
        return name
