"""What one request does to everybody else: the event loop's largest lag, and the slowest of others' turns meanwhile.

Each hostile request goes to a server of this tree and to one of an earlier commit, while a few clients take turns of
2 KiB. The lag is measured inside the server (`ops.bench.lagged`), which has a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from ops.bench.canned import canned_engine
from ops.bench.client import Broken, Connection
from ops.bench.load import Conversation, reply_message, short_turns
from ops.bench.measure import keep, table
from ops.bench.requests import HOSTILE, Hostile
from ops.bench.stand import Cores, cores, folder_for_bench, pinned, simulator
from ops.bench.versions import tree_of
from ops.server import ROOT, ServerProcess

BEFORE = "d7078c7"
"""The last commit without limits on what a body holds."""

PROBE = Path("ops/bench/lagged.py")
FRIENDLY, OTHER = "friendly", "hostile"
"""Sessions, by whose engines others begin."""

CLIENTS, PAUSE_S = 4, 0.02
"""Who takes turns meanwhile, and how long each waits between two: a tenth of what the server can do."""

QUIET_S = 0.5
TURNS_PER_SESSION = 8
AIM_MS = 50.0

HELD = {"TURNLOG_INFLIGHT_BYTES": str(64 << 20), "TURNLOG_MAX_REQUEST_BYTES": str(16 << 20)}
"""A 32nd of the default, so that few bodies that are held back fill it."""

HELD_SIZES = [15 << 20] * 12 + [1 << 20] * 12 + [64 << 10] * 24 + [4 << 10] * 24 + [1 << 10] * 12
"""However much room the larger ones leave, the smaller ones take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with; none: this tree alone")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="requests whose name has one of these words")
    parser.add_argument("--held-s", type=float, default=10.0, help="for how long ends of bodies are held back")
    parser.add_argument("--spread", action="store_true", help="both processors for everybody, instead of one each")
    parser.add_argument("--folder", type=Path, help="where the databases are put")


async def main(arguments: argparse.Namespace) -> int:
    wanted = [one for one in HOSTILE if not arguments.only or any(word in one.name for word in arguments.only)]
    rows: list[dict[str, Any]] = []
    places = cores(arguments.spread)
    async with canned_engine() as other:
        with folder_for_bench(arguments.folder) as folder, simulator(places) as engine:
            for name, root in _trees(arguments.before, folder):
                with _server(folder / f"{name}-store", root, engine.base_url, {}, places) as server:
                    await _place(server, engine.base_url, other)
                    rows += [{"tree": name, **await _asked(server, one)} for one in wanted]
                if not arguments.only:
                    with _server(folder / f"{name}-held", root, engine.base_url, HELD, places) as server:
                        await _place(server, engine.base_url, other)
                        rows.append({"tree": name, **await _held_back(server, arguments.held_s)})
    rows.sort(key=lambda row: row["request"])
    table(rows)
    print(f"written to {keep('hostile', rows)}")
    late = [row for row in rows if row["tree"] == "after" and row["of which CPU ms"] > AIM_MS]
    return 1 if late else 0


def _trees(before: str, folder: Path) -> Iterator[tuple[str, Path]]:
    if before != "none":
        tree = tree_of(before, folder)
        shutil.copy(ROOT / PROBE, tree / PROBE)
        yield "before", tree
    yield "after", ROOT


@contextlib.contextmanager
def _server(folder: Path, root: Path, engine: str, settings: dict[str, str], places: Cores) -> Iterator[ServerProcess]:
    folder.mkdir()
    application = ".".join(PROBE.with_suffix("").parts) + ":app"
    server = ServerProcess(folder, upstreams=[engine], environment=settings, root=root, application=application)
    with pinned(places.server):
        server.migrate().start()
    try:
        yield server
    finally:
        server.stop()


async def _place(server: ServerProcess, engine: str, other: str) -> None:
    """A session at each engine, so that those who begin there do not wait for what the hostile request costs it."""
    async with await Connection.connect(server.base_url) as connection:

        async def turn(name: str) -> None:
            await connection.json("POST", "/sessions", {"session_id": name})
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            await connection.json("POST", f"/sessions/{name}/v1/chat/completions", body)

        await turn(FRIENDLY)
        await connection.json("POST", "/engines", {"url": other})
        await connection.json("POST", "/engines", {"url": engine, "state": "draining"})
        await turn(OTHER)
        await connection.json("POST", "/engines", {"url": engine})


class _Others:
    """Clients that take turns; `slowest_s` of those turns, and how many there were and were refused."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.slowest_s = 0.0
        self.turns = self.refused = 0
        self._goes_on = True

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client())
            await asyncio.sleep(QUIET_S)
            self.slowest_s, self.turns, self.refused = 0.0, 0, 0
            try:
                yield
            finally:
                await asyncio.sleep(QUIET_S)
                self._goes_on = False

    async def _client(self) -> None:
        while self._goes_on:
            with contextlib.suppress(OSError):
                async with await Connection.connect(self._server.base_url) as connection:
                    await self._sessions(connection)

    async def _sessions(self, connection: Connection) -> None:
        script = short_turns(2048, TURNS_PER_SESSION)
        while self._goes_on:
            try:
                made = await connection.json("POST", "/sessions", {"parent_session_id": FRIENDLY})
            except Broken:
                self.turns, self.refused = self.turns + 1, self.refused + 1
                await asyncio.sleep(PAUSE_S)
                return
            path = f"/sessions/{made['session_id']}/v1/chat/completions"
            await self._session(connection, path, script.begin())

    async def _session(self, connection: Connection, path: str, conversation: Conversation) -> None:
        while self._goes_on and conversation.turns < TURNS_PER_SESSION:
            began = time.perf_counter()
            response = await connection.request("POST", path, conversation.body())
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            self.turns += 1
            if response.status != 200:
                self.refused += 1
                return
            conversation.answered(reply_message(response.body))
            await asyncio.sleep(PAUSE_S)


async def _lag(connection: Connection) -> tuple[float, float]:
    by_clock, by_cpu = (await connection.request("GET", "/lag")).body.split()
    return float(by_clock), float(by_cpu)


async def _asked(server: ServerProcess, hostile: Hostile) -> dict[str, Any]:
    others = _Others(server)
    body = hostile.body()
    async with await Connection.connect(server.base_url) as connection, others.at_work():
        paths = [await hostile.path(connection, OTHER) for _ in range(hostile.at_once)]
        await connection.request("GET", "/lag")
        began = time.perf_counter()
        statuses = await asyncio.gather(*(_status(server, hostile.method, path, body) for path in paths))
        took = time.perf_counter() - began
        async with await Connection.connect(server.base_url) as another:
            lag, busy = await _lag(another)
    return {
        "request": hostile.name,
        "MiB": round(len(body) / (1 << 20), 1),
        "status": " ".join(sorted(set(statuses))),
        "took ms": took * 1000,
        "lag ms": lag,
        "of which CPU ms": busy,
        "others' slowest ms": others.slowest_s * 1000,
        "others refused": f"{others.refused} of {others.turns}",
    }


async def _status(server: ServerProcess, method: str, path: str, body: bytes) -> str:
    async with await Connection.connect(server.base_url) as connection:
        try:
            return str((await connection.request(method, path, body)).status)
        except Broken:
            return "cut"


async def _held_back(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Large bodies without their last byte, from as many connections as fill the room for all bodies."""
    others = _Others(server)
    port = server.port
    head = b"POST /sessions/held-%d/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    async with await Connection.connect(server.base_url) as connection, others.at_work():
        await connection.request("GET", "/lag")
        writers = []
        for number, size in enumerate(HELD_SIZES):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(head % (number, size + 1) + b"{" * size)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        began = time.perf_counter()
        others.turns = others.refused = 0
        await asyncio.sleep(seconds)
        held = others.refused, others.turns
        async with await Connection.connect(server.base_url) as another:
            lag, busy = await _lag(another)
        took = time.perf_counter() - began
        for writer in writers:
            writer.transport.abort()
    return {
        "request": f"{len(HELD_SIZES)} bodies without their last byte",
        "MiB": sum(HELD_SIZES) / (1 << 20),
        "status": "held",
        "took ms": took * 1000,
        "lag ms": lag,
        "of which CPU ms": busy,
        "others' slowest ms": others.slowest_s * 1000,
        "others refused": "{} of {}".format(*held),
    }
