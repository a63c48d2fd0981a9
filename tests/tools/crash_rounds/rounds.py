"""The rounds: kill, start again, audit, verify."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp

from app.features.objects.bucket import Bucket
from app.store.database import Database
from app.store.dialect import StorePoints
from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import Problem, verify
from tests.tools.audit import audit
from tests.tools.crash_rounds.clients import MODES, Client, Round, Site

MOMENTS_S = (0.2, 1.2)
"""A server is killed so long after the clients have gone on."""

BUCKET_TIMEOUT_S = 60.0

GROWN = 1.05
"""The whole store is verified when it has so many times the turns it had: with every round where there are few."""


class Conductor:
    """Kills, restarts, audits. `folder` has the SQLite file; with PostgreSQL it is None."""

    def __init__(self, servers: Sequence[ServerProcess], site: Site, folder: Path | None, seed: int) -> None:
        self._servers = servers
        self._site = site
        self._folder = folder
        self._random = random.Random(f"{seed} moments")
        self._turns = 0
        self._audited = 0
        self._turns_verified = 0.0
        self.staged: Counter[str] = Counter()

    async def round(self, number: int, clients: Sequence[Client]) -> Round:
        result = self._site.round = Round(number)
        server = self._random.choice(self._servers)
        self._site.go.set()
        await asyncio.sleep(self._random.uniform(*MOMENTS_S))
        if len(self._servers) == 1:
            self._site.go.clear()
        self._site.down(server.base_url)
        self._site.killed_at = time.perf_counter()
        await asyncio.to_thread(server.kill)
        copy = self._copy_of_store() if self._is_due(result) else None
        await asyncio.to_thread(server.start)
        self._site.back(server.base_url)
        self._site.go.clear()
        for client in clients:
            await client.resting.wait()
        await asyncio.to_thread(self._count_staged, server)
        await self.audit(result, self._audited)
        self._turns += result.acknowledged
        if copy is not None:
            result.problems = await problems({**server.environment, "TURNLOG_DATABASE_URL": copy})
        return result

    async def audit(self, result: Round, since: int = 0) -> None:
        """Look up what was acknowledged since so many turns."""
        async with _database(self._servers[0].environment) as database:
            found = await audit(database, self._site.acknowledged[since:], whole=False)
        self._audited = len(self._site.acknowledged)
        result.lost += len(found.lost)
        result.twice += found.doubled
        _print(found.problems)

    def _count_staged(self, server: ServerProcess) -> None:
        """What became of staged turns in the process that was just started."""
        with urllib.request.urlopen(f"{server.base_url}/metrics") as reply:
            counted = re.findall(r'turnlog_turns_staged_total\{outcome="(\w+)"\} (\d+)', reply.read().decode())
        self.staged += Counter({outcome: int(count) for outcome, count in counted})

    def _is_due(self, result: Round) -> bool:
        turns = self._turns + result.acknowledged
        if turns < self._turns_verified * GROWN:
            return False
        self._turns_verified = turns
        return True

    def _copy_of_store(self) -> str:
        """What the kill left on disk, to be verified without touching what the server recovers from.

        PostgreSQL is looked at in place, beside its servers.
        """
        if self._folder is None:
            return self._servers[0].environment["TURNLOG_DATABASE_URL"]
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for path in self._folder.glob("turnlog.db*"):
            if path.suffix != ".lock":
                shutil.copy(path, copy / path.name)
        return f"sqlite+aiosqlite:///{copy / 'turnlog.db'}"


@contextlib.asynccontextmanager
async def _database(environment: Mapping[str, str]) -> AsyncIterator[Database]:
    """The store of a server with these variables."""
    payloads = environment.get("TURNLOG_PAYLOADS")
    bucket = None if payloads is None else Bucket(payloads, BUCKET_TIMEOUT_S)
    database = Database(environment["TURNLOG_DATABASE_URL"], bucket=bucket, points=StorePoints())
    try:
        yield database
    finally:
        await database.close()


async def problems(environment: Mapping[str, str]) -> int:
    async with _database(environment) as database:
        report = await verify(database)
    _print(report.problems)
    return len(report.problems)


def _print(found: Sequence[Problem]) -> None:
    for problem in found:
        print(f"{problem.session_id}: {problem.what}", file=sys.stderr)


async def run(
    *,
    rounds: int,
    clients: int,
    seed: int,
    folder: Path | None = None,
    database_url: str | None = None,
    processes: int = 1,
    payloads: str | None = None,
    mode: str = "plain",
) -> list[Round]:
    """All rounds, and a last one that has every session go on and audits every acknowledgement.

    `database_url` is an empty PostgreSQL database for `processes` servers; None: a new SQLite file in a folder in
    `folder`, and one server. `mode`: of `MODES`. `payloads`: as TURNLOG_PAYLOADS; the mode is `payloads` then.
    """
    turns = MODES[mode if payloads is None else "payloads"]
    environment = {**VERBATIM, **turns.environment, **({} if payloads is None else {"TURNLOG_PAYLOADS": payloads})}
    with (
        tempfile.TemporaryDirectory(prefix="turnlog-crash-", dir=folder) as made,
        SimulatorProcess("--seed", str(seed), *turns.engine) as engine,
        contextlib.ExitStack() as stack,
    ):
        own = Path(made)
        servers = [
            ServerProcess(own, upstreams=[engine.base_url], database_url=database_url, environment=environment)
            for _ in range(processes)
        ]
        servers[0].migrate()
        for server in servers:
            stack.callback(server.stop)
            server.start()
        site = Site([server.base_url for server in servers], turns)
        conductor = Conductor(servers, site, own if database_url is None else None, seed)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            every = [Client(site, http, number, seed) for number in range(clients)]
            done = await _rounds(rounds, site, conductor, every)
        stack.close()
        done[-1].problems += await problems(servers[0].environment)
    if site.refusals:
        print("refusals:", dict(site.refusals))
    if site.begun:
        print("streams that were cut behind their first bytes:", site.begun)
    if conductor.staged:
        print("turns that were staged:", dict(conductor.staged))
    return done


async def _rounds(count: int, site: Site, conductor: Conductor, clients: list[Client]) -> list[Round]:
    rounds: list[Round] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.run()) for client in clients]
        rounds += [await conductor.round(number, clients) for number in range(1, count + 1)]
        last = site.round = Round(count + 1)
        site.stopping = True
        site.go.set()
        await asyncio.gather(*tasks)
        await _all_go_on(site, clients)
        await conductor.audit(last)
        rounds.append(last)
    return rounds


async def _all_go_on(site: Site, clients: list[Client]) -> None:
    """One more turn in every session there ever was; one of token ids is then compared with what its client knows."""
    waiting = [followed for followed in site.followed if not followed.stuck]

    async def work(client: Client) -> None:
        while waiting:
            followed = waiting.pop()
            if await client.turn(followed) and followed.wire.key is not None:
                site.round.lost += not await client.holds(followed)

    await asyncio.gather(*(work(client) for client in clients))
