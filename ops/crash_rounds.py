"""`python -m ops.crash_rounds`: kill the server at random moments and look for what it had promised.

In every round clients take turns without a pause, each turn under an Idempotency-Key, until a `kill -9` at
a seeded moment. After the restart each client sends its turn in flight again, same key, same body. Then,
seen from outside: a turn that was answered 200 must be in its session for good, to the byte and once.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ops.bench.client import Broken, Connection, Response
from ops.bench.load import Conversation, error_code, opening_messages, reply_message
from ops.bench.measure import table
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

TURNS_PER_SESSION = 12
LONGEST_LATENCY_S = 0.15
MOMENTS_S = (0.2, 1.2)
"""A server is killed so long after the clients have gone on."""

PATIENCE = 20
"""Refusals of one turn after which its session counts as one that cannot go on."""

REFUSAL_PAUSE_S = 0.1


class Ack(msgspec.Struct, frozen=True):
    """A 200 that a client has seen; `digest` is the SHA-256 of the reply's body."""

    turn: int
    digest: str
    retry_key: str


class Followed(msgspec.Struct):
    """A session as its client knows it."""

    session_id: str
    conversation: Conversation
    acks: list[Ack] = []
    audited: int = 0
    stuck: bool = False


class Round(msgspec.Struct):
    """What happened in one round; the last five are violations."""

    number: int
    killed_after_s: float = 0.0
    up_after_s: float = 0.0
    acknowledged: int = 0
    retried: int = 0
    replayed: int = 0
    other_refusals: int = 0
    lost: int = 0
    twice: int = 0
    busy: int = 0
    stuck: int = 0
    problems: int = 0

    @property
    def violations(self) -> int:
        return self.lost + self.twice + self.busy + self.stuck + self.problems


class Site:
    """What the clients share: is the server `up`, may new turns `go`, the round, every session so far."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.up = asyncio.Event()
        self.go = asyncio.Event()
        self.stopping = False
        self.round = Round(1)
        self.followed: list[Followed] = []
        self.refusals: Counter[str] = Counter()


class Client:
    """One agent: session after session, turn after turn, and never a new turn before the last is answered."""

    def __init__(self, site: Site, number: int, seed: int) -> None:
        self._site = site
        self._number = number
        self._random = random.Random(f"{seed} client {number}")
        self._opening = opening_messages(1024, seed=number)
        self._connection: Connection | None = None
        self.resting = asyncio.Event()

    async def run(self) -> None:
        index = 0
        while not self._site.stopping:
            index += 1
            latency = self._random.uniform(0, LONGEST_LATENCY_S)
            sim = b'{"completion_tokens":11,"tool_calls":false,"reasoning":false,"latency_s":%.4f}' % latency
            followed = Followed(f"crash-{self._number}-{index}", Conversation(self._opening, sim))
            await self._create(followed.session_id)
            self._site.followed.append(followed)
            while followed.conversation.turns < TURNS_PER_SESSION and not self._site.stopping:
                await self._rest()
                if not await self.turn(followed):
                    break
        self.close()

    async def _rest(self) -> None:
        """Between the rounds."""
        self.resting.set()
        await self._site.go.wait()
        self.resting.clear()

    async def _create(self, session_id: str) -> None:
        body = msgspec.json.encode({"session_id": session_id})
        while True:
            response = await self._exchange("/sessions", body, "")
            if response is not None and response.status == 200:
                return
            if response is not None:
                self._site.refusals[f"create: {response.status} {error_code(response.body)}"] += 1
                await asyncio.sleep(REFUSAL_PAUSE_S)

    async def turn(self, followed: Followed) -> bool:
        """One turn, whatever it takes; False where the session cannot go on."""
        site, path = self._site, f"/sessions/{followed.session_id}/v1/chat/completions"
        key = f"{followed.session_id}-{followed.conversation.turns}"
        body = b"".join(followed.conversation.body())
        first_retry, refused = False, 0
        while refused < PATIENCE:
            response = await self._exchange(path, body, f"idempotency-key: {key}\r\n")
            if response is None:
                site.round.retried += 1
                first_retry = True
                continue
            if response.status == 200:
                self._acknowledged(followed, key, response)
                return True
            code = error_code(response.body)
            site.refusals[f"{response.status} {code}"] += 1
            if first_retry and code == "session_busy":
                site.round.busy += 1
            else:
                site.round.other_refusals += 1
            first_retry, refused = False, refused + 1
            await asyncio.sleep(REFUSAL_PAUSE_S)
        followed.stuck = True
        site.round.stuck += 1
        return False

    def _acknowledged(self, followed: Followed, key: str, response: Response) -> None:
        turn = int(response.header("x-turnlog-turn") or 0)
        followed.acks.append(Ack(turn, hashlib.sha256(response.body).hexdigest(), _stored_key(key)))
        followed.conversation.answered(reply_message(response.body))
        self._site.round.acknowledged += 1
        self._site.round.replayed += response.header("x-turnlog-replayed") is not None

    async def _exchange(self, path: str, body: bytes, headers: str) -> Response | None:
        """One request; None where the connection broke: the server is then up again, or never was down."""
        await self._site.up.wait()
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await Connection.connect(self._site.base_url)
            return await self._connection.request("POST", path, body, headers)
        except (Broken, OSError):
            self.close()
            return None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _stored_key(key: str) -> str:
    """As the log keeps it."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class _Record(msgspec.Struct):
    turn: int
    response: msgspec.Raw


class _Records(msgspec.Struct):
    records: list[_Record]


class _LoggedEvent(msgspec.Struct):
    type: str
    turn: int | None = None
    retry_key: str | None = None


async def audit(site: Site, http: aiohttp.ClientSession, result: Round, *, everything: bool) -> None:
    """Look up, over HTTP, what was acknowledged since the last audit, or ever."""
    for followed in list(site.followed):
        acks = followed.acks[0 if everything else followed.audited :]
        if acks:
            followed.audited = len(followed.acks)
            await _audit_session(site, http, followed.session_id, acks, result)


async def _audit_session(
    site: Site, http: aiohttp.ClientSession, session_id: str, acks: list[Ack], result: Round
) -> None:
    url = f"{site.base_url}/sessions/{session_id}"
    records: dict[int, str] = {}
    async with http.get(url) as response:
        if response.status == 200:
            for record in msgspec.json.decode(await response.read(), type=_Records).records:
                records[record.turn] = hashlib.sha256(record.response).hexdigest()
    keys: Counter[str | None] = Counter()
    places: dict[str | None, int | None] = {}
    async with http.get(f"{url}/events") as response:
        for line in (await response.read()).splitlines() if response.status == 200 else ():
            event = msgspec.json.decode(line, type=_LoggedEvent)
            if event.type == "TurnCommitted":
                keys[event.retry_key] += 1
                places[event.retry_key] = event.turn
    for ack in acks:
        if records.get(ack.turn) != ack.digest or places.get(ack.retry_key) != ack.turn:
            result.lost += 1
            print(f"lost: session {session_id}, turn {ack.turn}", file=sys.stderr)
    result.twice += sum(1 for count in keys.values() if count > 1)


class Conductor:
    """Kills, restarts, audits."""

    def __init__(self, server: ServerProcess, site: Site, folder: Path, seed: int, is_sqlite: bool) -> None:
        self._server = server
        self._site = site
        self._folder = folder
        self._random = random.Random(f"{seed} moments")
        self._is_sqlite = is_sqlite

    async def round(self, number: int, clients: Sequence[Client], http: aiohttp.ClientSession) -> Round:
        result = self._site.round = Round(number)
        result.killed_after_s = self._random.uniform(*MOMENTS_S)
        self._site.go.set()
        await asyncio.sleep(result.killed_after_s)
        self._site.go.clear()
        self._site.up.clear()
        await asyncio.to_thread(self._server.kill)
        copy = self._copy_of_store() if self._is_sqlite else None
        began = time.perf_counter()
        await asyncio.to_thread(self._server.start)
        result.up_after_s = time.perf_counter() - began
        self._site.up.set()
        for client in clients:
            await client.resting.wait()
        await audit(self._site, http, result, everything=False)
        if copy is not None:
            result.problems = await _problems(f"sqlite+aiosqlite:///{copy}")
        return result

    def _copy_of_store(self) -> Path:
        """What the kill left on disk, to be verified without touching what the server recovers from."""
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for path in self._folder.glob("turnlog.db*"):
            if path.suffix != ".lock":
                shutil.copy(path, copy / path.name)
        return copy / "turnlog.db"


async def _problems(url: str) -> int:
    report = await verify_url(url)
    for problem in report.problems:
        print(f"verify: {problem.session_id}: {problem.what}", file=sys.stderr)
    return len(report.problems)


async def run(arguments: argparse.Namespace) -> list[Round]:
    """All rounds, and a last one that has every session go on and audits every acknowledgement."""
    with (
        tempfile.TemporaryDirectory(prefix="turnlog-crash-", dir=arguments.folder) as made,
        SimulatorProcess("--seed", str(arguments.seed)) as engine,
    ):
        folder = Path(made)
        server = ServerProcess(folder, upstreams=[engine.base_url], database_url=arguments.database_url)
        with server:
            site = Site(server.base_url)
            conductor = Conductor(server, site, folder, arguments.seed, arguments.database_url is None)
            rounds = await _rounds(arguments, site, conductor)
        rounds[-1].problems += await _problems(server.environment["TURNLOG_DATABASE_URL"])
    if site.refusals:
        print("refusals:", dict(site.refusals))
    return rounds


async def _rounds(arguments: argparse.Namespace, site: Site, conductor: Conductor) -> list[Round]:
    rounds: list[Round] = []
    site.up.set()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        clients = [Client(site, number, arguments.seed) for number in range(arguments.clients)]
        tasks = [group.create_task(client.run()) for client in clients]
        rounds += [await conductor.round(number, clients, http) for number in range(1, arguments.rounds + 1)]
        last = site.round = Round(arguments.rounds + 1)
        site.stopping = True
        site.go.set()
        await asyncio.gather(*tasks)
        await _all_go_on(site, clients)
        await audit(site, http, last, everything=True)
        rounds.append(last)
    return rounds


async def _all_go_on(site: Site, clients: list[Client]) -> None:
    """One more turn in every session there ever was."""
    waiting = [followed for followed in site.followed if not followed.stuck]

    async def work(client: Client) -> None:
        while waiting:
            await client.turn(waiting.pop())
        client.close()

    await asyncio.gather(*(work(client) for client in clients))


def _print(rounds: list[Round], least: int) -> bool:
    """The table and the verdict; True where nothing was violated."""
    rows: list[dict[str, Any]] = [msgspec.structs.asdict(one) for one in rounds]
    summed = {name: sum(row[name] for row in rows) for name in rows[0] if not name.endswith("_s") and name != "number"}
    slowest = max(one.up_after_s for one in rounds)
    table([*rows, {**dict.fromkeys(rows[0], ""), "number": "all", "up_after_s": slowest, **summed}])
    enough = summed["acknowledged"] >= least
    violations = sum(one.violations for one in rounds)
    print(
        f"{summed['acknowledged']} turns acknowledged{'' if enough else f', fewer than {least}'}; "
        f"{summed['lost']} lost, {summed['twice']} keys committed twice, {summed['busy']} first retries answered "
        f"session_busy, {summed['stuck']} sessions that cannot go on, {summed['problems']} problems found by verify"
    )
    return enough and not violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.crash_rounds", description="Kill the server, lose nothing.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2000, help="acknowledged turns without which nothing is shown")
    parser.add_argument("--folder", type=Path, help="where the database is put")
    parser.add_argument("--database-url", help="another store than a new SQLite file; must be empty")
    arguments = parser.parse_args()
    return 0 if _print(asyncio.run(run(arguments)), arguments.least) else 1


if __name__ == "__main__":
    sys.exit(main())
