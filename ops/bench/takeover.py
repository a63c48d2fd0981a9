"""Seconds from `kill -9` of the process that owns a session's open turn to its next committed turn, on another process.

Two API processes share one PostgreSQL. The owner has turns of two sessions in flight when it is killed. At once the
other process is sent a marked retry of the first (the same `Idempotency-Key` and body), and a new request to the
second session. A request that is refused with 409 is sent again after 20 ms.

On the same host the other process sees that the owner's pid is gone. An owner that looks as if it were on another host
runs in a space of process ids of its own (`unshare --pid --uts`, as a container does), so that only its heartbeat's age
tells: `TURNLOG_LEASE_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from ops.bench.client import Broken, Connection
from ops.bench.latency import timed
from ops.bench.load import Conversation, opening_messages, reply_message
from ops.bench.measure import keep, percentile, table
from ops.bench.primary import Primary, primary
from ops.bench.stand import cores, folder_for_bench, simulator
from ops.server import ServerProcess

REQUEST_BYTES = 2048
HELD_S = 600.0
"""How long the generations would take that the owner waits for."""

AGAIN_S = 0.02
POLL_S = 0.01
PATIENCE_S = 60.0
APART = ("unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child")
KINDS = ("marked retry", "new request")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=10, help="kills of each kind")
    parser.add_argument("--leases", type=float, nargs="+", default=[8.0, 1.0], help="TURNLOG_LEASE_S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    apart = may_be_apart()
    if not apart:
        print("no space of process ids of its own may be made here: only the same host is measured")
    rows: list[dict[str, Any]] = []
    with primary(arguments.folder) as database:
        for lease_s in arguments.leases:
            for owner_apart in (False, True) if apart else (False,):
                rows += await _measured(database, lease_s, owner_apart, arguments)
    table(rows)
    print(f"written to {keep('takeover', rows)}")
    return 0


def may_be_apart() -> bool:
    """Is a process allowed a space of process ids of its own here? As root it mostly is."""
    try:
        return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class _Apart(ServerProcess):
    """A server that shares no process ids with this machine; its `pid` is that of its keeper, with which it dies."""

    def launch(self) -> None:
        """Start without waiting."""
        self._arguments = [*APART, *(part for part in self._arguments if part not in APART)]
        super().launch()


class _Pair(NamedTuple):
    """The process that is killed, the one that takes over, and the engine of both."""

    owner: ServerProcess
    heir: ServerProcess
    engine_url: str


async def _measured(
    database: Primary, lease_s: float, owner_apart: bool, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row of the table for each kind of request."""
    url, rng = database.new_database(), random.Random(arguments.seed)
    environment = {"TURNLOG_LEASE_S": str(lease_s)}
    found: list[list[_Waited]] = []
    places = cores(spread=True)
    with folder_for_bench(arguments.folder) as folder, simulator(places) as engine:
        kind = _Apart if owner_apart else ServerProcess
        owner = kind(folder, upstreams=[engine.base_url], database_url=url, environment=environment)
        heir = ServerProcess(folder, upstreams=[engine.base_url], database_url=url, environment=environment)
        pair = _Pair(owner, heir, engine.base_url)
        heir.migrate().start()
        try:
            for number in range(arguments.rounds):
                waits = await _round(pair, number, rng.uniform(0, lease_s / 2))
                found.append(waits)
        finally:
            heir.stop()
    return [
        {
            "owner": "another host" if owner_apart else "same host",
            "lease s": lease_s,
            "request": kind_of_request,
            "kills": len(waits),
            "requests, median": percentile([one.requests for one in waits], 50),
            "median s": percentile([one.seconds for one in waits], 50),
            "worst s": max(one.seconds for one in waits),
        }
        for kind_of_request, waits in zip(KINDS, zip(*found, strict=True), strict=True)
    ]


class _Waited(NamedTuple):
    """Seconds from the kill to the committed turn's reply, and how many requests that took."""

    seconds: float
    requests: int


async def _round(pair: _Pair, number: int, pause_s: float) -> list[_Waited]:
    """`pause_s` moves the kill to another moment between two heartbeats."""
    pair.owner.start()
    held: list[asyncio.Task[Any]] = []
    async with await Connection.connect(pair.engine_url) as engine, asyncio.TaskGroup() as group:
        conversations = [await _begun(pair.owner, f"held-{number}-{index}") for index in range(len(KINDS))]
        await engine.json("POST", "/sim/latency", {"latency_s": HELD_S})
        for index, conversation in enumerate(conversations):
            held.append(group.create_task(_in_flight(pair.owner, f"held-{number}-{index}", conversation.body())))
        await _until_generating(engine, len(held))
        await engine.json("POST", "/sim/latency", {"latency_s": 0.0})
        await asyncio.sleep(pause_s)
        killed = time.perf_counter()
        pair.owner.kill()
        retried, other = (conversation.body() for conversation in conversations)
        waits = [
            group.create_task(_until_committed(pair.heir, f"held-{number}-{index}", body, marked, killed))
            for index, (body, marked) in enumerate(((retried, True), ((*other, b"\n"), False)))
        ]
    if any(task.result() for task in held):
        raise Broken("the owner answered a turn that should have been in flight when it was killed")
    return [task.result() for task in waits]


async def _until_generating(engine: Connection, count: int) -> None:
    while True:
        if (await engine.json("GET", "/sim/stats"))["in_flight"] >= count:
            return
        await asyncio.sleep(POLL_S)


async def _begun(owner: ServerProcess, name: str) -> Conversation:
    """A session of one turn; its next request."""
    conversation = Conversation(opening_messages(REQUEST_BYTES))
    async with await Connection.connect(owner.base_url) as connection:
        await connection.json("POST", "/sessions", {"session_id": name})
        reply, _ = await timed(connection, f"/sessions/{name}/v1/chat/completions", conversation.body())
    conversation.answered(reply_message(reply))
    return conversation


async def _in_flight(owner: ServerProcess, name: str, body: tuple[bytes, ...]) -> bool:
    """Send a request that the owner will not live to answer. True if it did."""
    async with await Connection.connect(owner.base_url) as connection:
        try:
            await connection.request("POST", f"/sessions/{name}/v1/chat/completions", body, _key(name))
        except Broken:
            return False
    return True


async def _until_committed(
    heir: ServerProcess, name: str, body: tuple[bytes, ...], marked: bool, killed: float
) -> _Waited:
    """Raises Broken for what is neither a reply nor a refusal that passes."""
    async with await Connection.connect(heir.base_url) as connection:
        for tried in range(1, int(PATIENCE_S / AGAIN_S)):
            path, headers = f"/sessions/{name}/v1/chat/completions", _key(name) if marked else ""
            response = await connection.request("POST", path, body, headers)
            if response.status == 200:
                return _Waited(time.perf_counter() - killed, tried)
            if response.status not in (409, 503):
                raise Broken(f"the heir answered {response.status}: {response.body[:200]!r}")
            await asyncio.sleep(AGAIN_S)
    raise Broken(f"session {name} was not served within {PATIENCE_S} s")


def _key(name: str) -> str:
    return f"idempotency-key: {name}\r\n"
