"""One bushy tree of 10,000 turns: CPU of a turn as the tree grows, and time of its fold and export against a small one.

The turns extend one of the newest branches until it is `--depth` turns deep, then a new branch leaves one of its turns.
So requests are equally long at every size, and what grows is the tree alone.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import time
from typing import Any

import aiohttp
import msgspec

from app.domain.events import TurnCommitted
from app.domain.fold import fold
from app.domain.tree import TreeIndex
from app.store import reads
from app.store.engine import Database
from ops.bench.client import Broken, Connection
from ops.bench.measure import cpu_s, save_figures, table
from ops.bench.stand import cores, simulator, turnlog
from ops.server import ServerProcess

WINDOW = 200
"""Turns over which the CPU at one size is averaged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 1_000, 10_000], help="turns of the tree")
    parser.add_argument("--depth", type=int, default=20, help="turns of the longest branch")
    parser.add_argument("--active", type=int, default=32, help="branches that grow at the same time, the newest ones")


async def main(arguments: argparse.Namespace) -> int:
    cpu_sets = cores()
    rows: list[dict[str, Any]] = []
    with simulator(cpu_sets) as engine:
        environment = {"TURNLOG_MAX_TURNS": str(max(arguments.sizes) + 2 * WINDOW)}
        with turnlog(engine, cpu_sets, arguments.folder, environment) as server:
            await _warm_up(server, arguments)
            async with await Connection.connect(server.base_url) as connection:
                tree = await Tree.create(connection, arguments.depth, arguments.active)
                for size in arguments.sizes:
                    await tree.grow(size)
                    cpu_ms = await _window(server, tree)
                    rows.append({"turns": tree.turns, "leaves": tree.leaves, "CPU ms a turn": cpu_ms})
                    rows[-1] |= await _export(server, tree.session_id)
            server.stop()
            await _fold(server, tree.session_id, rows)
    for row in rows:
        row["CPU / first"] = row["CPU ms a turn"] / rows[0]["CPU ms a turn"]
    table(rows)
    save_figures("tree", rows)
    return 0


class Tree:
    """A client of one tree. `_histories` are the ends of branches: messages and depth of each."""

    def __init__(self, connection: Connection, session_id: str, depth: int, active: int) -> None:
        self.session_id = session_id
        self.turns, self.leaves = 0, 1
        self._connection = connection
        self._depth = depth
        self._active = active
        self._random = random.Random(16)
        self._histories: list[list[Any]] = [[]]

    @classmethod
    async def create(cls, connection: Connection, depth: int, active: int) -> Tree:
        made = await connection.json("POST", "/sessions", {"history": "tree"})
        return cls(connection, made["session_id"], depth, active)

    async def grow(self, turns: int) -> None:
        while self.turns < turns:
            await self.take()

    async def take(self) -> None:
        """One turn: at the end of a random branch, or where a new branch leaves one."""
        place = self._random.randrange(len(self._histories))
        history = self._histories[place]
        if len(history) >= 2 * self._depth:
            history = history[: 2 * self._random.randrange(self._depth // 2, self._depth)]
            if len(self._histories) == self._active:
                del self._histories[0]
            place = len(self._histories)
            self._histories.append(history)
            self.leaves += 1
        asked = {"role": "user", "content": f"Step {self.turns} " + "and so on " * 20}
        body = json.dumps({"model": "simulator", "messages": [*history, asked]}).encode()
        reply = await self._connection.request("POST", f"/sessions/{self.session_id}/v1/chat/completions", body)
        if reply.status != 200:
            raise Broken(f"a turn answered {reply.status}: {reply.body[:200]!r}")
        answer = json.loads(reply.body)["choices"][0]["message"]
        self._histories[place] = [*history, asked, answer]
        self.turns += 1


async def _warm_up(server: ServerProcess, arguments: argparse.Namespace) -> None:
    async with await Connection.connect(server.base_url) as connection:
        await (await Tree.create(connection, arguments.depth, arguments.active)).grow(WINDOW)


async def _window(server: ServerProcess, tree: Tree) -> float:
    """CPU milliseconds of the server for each of the next turns."""
    before = cpu_s(server.pid)
    for _ in range(WINDOW):
        await tree.take()
    return (cpu_s(server.pid) - before) * 1000 / WINDOW


async def _export(server: ServerProcess, session_id: str) -> dict[str, float]:
    """The tokens of all rows, and microseconds of their export for each."""
    tokens = rows = 0
    began = time.perf_counter()
    async with aiohttp.ClientSession() as client:
        parameters = {"session_id": session_id, "shape": "turnlog"}
        async with client.get(f"{server.base_url}/export", params=parameters, read_bufsize=64 << 20) as reply:
            async for line in reply.content:
                row = msgspec.json.decode(line, type=_Row)
                tokens, rows = tokens + row.prompt_length + row.response_length, rows + 1
    took = time.perf_counter() - began
    return {"rows": rows, "tokens in rows": tokens, "export us / token": took * 1e6 / max(tokens, 1)}


class _Row(msgspec.Struct):
    prompt_length: int
    response_length: int


async def _fold(server: ServerProcess, session_id: str, rows: list[dict[str, Any]]) -> None:
    """Microseconds of a fold for each turn, of the log at each size."""
    database = Database(server.environment["TURNLOG_DATABASE_URL"])
    stored = await database.read(lambda one: reads.event_rows(one, session_id))
    await database.close()
    log = reads.decode_events(stored)
    for row in rows:
        commits = itertools.accumulate(isinstance(one.event, TurnCommitted) for one in log)
        part = log[: bisect.bisect_right(list(commits), row["turns"])]
        began = time.process_time()
        session = fold(session_id, part)
        assert session is not None
        index = TreeIndex(session.turns)
        took = time.process_time() - began
        assert index.has_children(0)
        row["fold us / turn"] = took * 1e6 / row["turns"]
