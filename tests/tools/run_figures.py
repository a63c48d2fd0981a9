"""`python -m tests.tools.run_figures`: how long the figures of runs take, and by how many queries, in a store of many.

The heads are written as they are after some turns, a fifth of them open, in groups of eight; one run has its events,
too, and one more is played by way of a server, which is then asked over HTTP. Times are the best and the median of
`--repeat`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fault.hosted import hosted
from helpers.databases import Postgres, connected, database_at, migrate, read_engine
from helpers.log import committed
from sqlalchemy import Connection, event, insert, text

from app.domain.events import encode
from app.features.runs import figures, reads
from app.features.runs.figures import Tally
from app.features.runs.schema import room, runs
from app.store.database import Database
from app.store.schema import events, sessions
from ops.simulator.process import SimulatorProcess

GROUP = 8

PLAYED = "played"

PATHS = (
    "/runs",
    f"/runs/{PLAYED}",
    f"/sessions?run={PLAYED}",
    f"/sessions?run={PLAYED}&limit=1000",
    "/sessions?run=run-0000",
    f"/groups?run={PLAYED}",
    "/groups?run=run-0000",
    f"/export?run={PLAYED}",
    f"/export?run={PLAYED}&advantage=grpo",
    f"/export/groups?run={PLAYED}&consumer=c&size=10",
    f"/events?run={PLAYED}",
)


def heads(run: int, count: int, turns: int, chance: random.Random) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        is_open = number % 5 == 0
        rows.append(
            {
                "session_id": f"{chance.randbytes(6).hex()}-{run}-{number}",
                "version": 1 + 2 * turns,
                "status": "open" if is_open else "closed",
                "open_turns": 0,
                "turns": turns,
                "group_id": f"{run}-{number // GROUP}",
                "reward": None if is_open else chance.random(),
                "created_at": 1e9 + number,
                "updated_at": 1e9 + 2 * number,
                "body_hash": "0" * 32,
                "weight_version": number // 50,
                "engine": "http://127.0.0.1:30000",
                "run": f"run-{run:04}",
            }
        )
    return rows


def fill(connection: Connection, arguments: argparse.Namespace) -> None:
    chance = random.Random(0)
    every = [head for run in range(arguments.runs) for head in heads(run, arguments.sessions, arguments.turns, chance)]
    chance.shuffle(every)  # sessions of different runs are neighbours, as they are where runs go on side by side
    for at in range(0, len(every), 1000):
        connection.execute(insert(sessions), every[at : at + 1000])
    rows = [
        {
            "session_id": head["session_id"],
            "seq": 2 * turn + 1,
            "type": "TurnCommitted",
            "version": 1,
            "at": 1e9,
            "data": encode(committed(turn, parent=turn - 1, fence=2 * turn)),
            "position": position,
        }
        for position, (head, turn) in enumerate(
            (head, turn) for head in every if head["run"] == "run-0000" for turn in range(1, arguments.turns + 1)
        )
    ]
    for at in range(0, len(rows), 1000):
        connection.execute(insert(events), rows[at : at + 1000])
    connection.execute(insert(runs), [{"run": "run-0001", "status": "open", "max_live": 10**6}])
    connection.execute(text("ANALYZE"))


class Counted:
    """A database whose statements are counted."""

    def __init__(self, database: Database) -> None:
        self.statements = 0
        event.listen(read_engine(database), "before_cursor_execute", self._count)

    def _count(self, *_: Any) -> None:
        self.statements += 1


async def measured(counted: Counted, repeat: int, name: str, call: Callable[[], Awaitable[object]]) -> None:
    times = []
    for _ in range(repeat):
        before, began = counted.statements, time.perf_counter()
        await call()
        times.append(1000 * (time.perf_counter() - began))
        queries = counted.statements - before
    print(f"{name:<44} {min(times):8.1f} {statistics.median(times):8.1f} ms {queries:6} queries")


def play(client: httpx.Client, number: int) -> None:
    """A session of the run that is played: one turn, a reward, an end."""
    given = {"run": PLAYED, "group_id": f"task-{number // GROUP}", "attempt": number % GROUP}
    path = f"/sessions/{client.post('/sessions', json=given).json()['session_id']}"
    body = {"model": "simulator", "messages": [{"role": "user", "content": f"Task {number // GROUP}"}]}
    client.post(f"{path}/v1/chat/completions", json=body).raise_for_status()
    client.put(f"{path}/reward", json={"reward": number % GROUP}).raise_for_status()
    client.delete(path).raise_for_status()


def over_http(arguments: argparse.Namespace, url: str) -> None:
    """What a server answers, every reply whole."""
    with (
        SimulatorProcess() as engine,
        hosted(url, engine.base_url) as server,
        httpx.Client(base_url=server.base_url, timeout=600.0) as client,
    ):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(partial(play, client), range(arguments.sessions)))
        counted = Counted(server.services.database)
        for path in PATHS:
            times = []
            for _ in range(arguments.repeat):
                before, began = counted.statements, time.perf_counter()
                reply = client.get(path).raise_for_status()
                times.append(1000 * (time.perf_counter() - began))
                queries = counted.statements - before
            size = f"{len(reply.content) // 1024:6} KiB"
            print(f"GET {path:<40} {min(times):8.1f} {statistics.median(times):8.1f} ms {queries:6} queries {size}")


async def main(arguments: argparse.Namespace, url: str) -> None:
    began = time.perf_counter()
    async with connected(url, writes=True) as connection:
        await connection.run_sync(fill, arguments)
    print(f"{arguments.runs} runs of {arguments.sessions} sessions, written in {time.perf_counter() - began:.0f} s")
    async with database_at(url) as database:
        counted = Counted(database)
        measure = partial(measured, counted, arguments.repeat)

        def page(connection: Connection, limit: int) -> object:
            names = reads.names(connection, "", limit)
            return figures.listed(names, *reads.figures(connection, names))

        def read(function: Callable[[Connection], object]) -> Callable[[], Awaitable[object]]:
            return lambda: database.read(function)

        def write(run: str) -> Callable[[], Awaitable[object]]:
            return lambda: database.write(partial(room, wanted={run: 1}), durable=False)

        for limit in sorted({100, arguments.runs}):
            await measure(f"GET /runs?limit={limit}", read(partial(page, limit=limit)))
        await measure("GET /runs/{run}: heads", read(partial(reads.figures, names=["run-0000"])))
        await measure("GET /runs/{run}: events, first", lambda: Tally(database).of("run-0000"))
        tally = Tally(database)
        await tally.of("run-0000")
        await measure("GET /runs/{run}: events, again", lambda: tally.of("run-0000"))
        await measure("a creation's look at its run: no row", write("run-0000"))
        await measure("a creation's look at its run: a limit", write("run-0001"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.store == "sqlite":
            own = f"sqlite+aiosqlite:///{folder}/turnlog.db"
            migrate(own)
            asyncio.run(main(given, own))
            over_http(given, own)
        else:
            server = Postgres(Path(folder))
            with server.database() as own:
                asyncio.run(main(given, own))
                over_http(given, own)
            server.stop()
