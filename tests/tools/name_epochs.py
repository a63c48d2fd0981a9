"""`python -m tests.tools.name_epochs --epochs 100`: trajectories whose names come again in each epoch, as SkyRL's do,
at servers that are killed in the middle of a turn, and between the end of a session and the next one's first turn.

A client names its session in `X-Session-ID` alone, takes two turns an epoch, asks again after whatever broke, and ends
with `POST /finish_session`. In the next epoch it repeats one request of the last, as a late retry. `--processes 2`:
two servers on PostgreSQL, of which each request goes to another.

    wrong      turns in the session of another epoch than the one that asked for them
    lost       turns that were answered and are not in the store; doubled: that are there twice
    late       retries of an ended session's request that did not get its reply
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

NAMES, TURNS = 4, 2
PAUSE_S = 0.05
LATENCY_S = 0.05
MOST_TRIES = 2000


class Result(msgspec.Struct):
    epochs: int = 0
    turns: int = 0
    kills: int = 0
    wrong: int = 0
    lost: int = 0
    doubled: int = 0
    late: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(self).items())

    @property
    def faults(self) -> int:
        return self.wrong + self.lost + self.doubled + self.late


class Site:
    """The servers, and the client that all trajectories share."""

    def __init__(self, servers: list[ServerProcess], http: aiohttp.ClientSession) -> None:
        self.servers = servers
        self.http = http
        self._turns = itertools.cycle(servers)

    async def ask(self, method: str, path: str, **request: Any) -> tuple[int, bytes]:
        """Ask one server after another until one answers what a retry cannot mend."""
        for _ in range(MOST_TRIES):
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self.http.request(method, next(self._turns).base_url + path, **request) as response:
                    body = await response.read()
                    if response.status < 500 and response.headers.get("x-should-retry") != "true":
                        return response.status, body
            await asyncio.sleep(PAUSE_S)
        raise TimeoutError(f"{method} {path} was asked in vain")

    async def kill(self, server: ServerProcess) -> None:
        """And start it again."""
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


def _key(name: str, epoch: int, turn: int) -> str:
    return f"{name}-{epoch}-{turn}"


async def _turn(site: Site, name: str, messages: list[dict[str, Any]], key: str) -> bytes:
    body = {"model": "simulator", "messages": messages, "sim": {"latency_s": LATENCY_S}}
    headers = {"X-Session-ID": name, "Idempotency-Key": key}
    status, reply = await site.ask("POST", "/v1/chat/completions", json=body, headers=headers)
    if status != 200:
        raise ValueError(f"a turn of {name} was answered {status}: {reply[:300]!r}")
    return reply


async def _epoch(site: Site, name: str, epoch: int, earlier: list[bytes], result: Result) -> list[bytes]:
    """The replies of an epoch's turns; `earlier` are those of the one before."""
    replies: list[bytes] = []
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"epoch {epoch} turn {turn}"})
        replies.append(await _turn(site, name, messages, _key(name, epoch, turn)))
        messages.append(msgspec.json.decode(replies[-1])["choices"][0]["message"])
        if turn < len(earlier) and turn == epoch % TURNS == 0:
            first = [{"role": "user", "content": f"epoch {epoch - 1} turn 0"}]
            result.late += await _turn(site, name, first, _key(name, epoch - 1, 0)) != earlier[0]
    status, said = await site.ask("POST", "/finish_session", params={"session_id": name})
    if status != 200:
        raise ValueError(f"the end of {name} was answered {status}: {said[:300]!r}")
    return replies


async def _kills(site: Site, seed: int, stop: asyncio.Event, result: Result) -> None:
    """Kill a server again and again, at any moment."""
    draws = random.Random(seed)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), draws.uniform(0.2, 1.0))
        if not stop.is_set():
            await site.kill(draws.choice(site.servers))
            result.kills += 1


async def _count(site: Site, name: str, acknowledged: dict[int, list[bytes]], result: Result) -> None:
    """Compare the sessions of a name with what their epochs were answered."""
    for epoch, replies in acknowledged.items():
        status, body = await site.ask("GET", f"/sessions/{name}/messages", params={"generation": str(epoch)})
        messages = msgspec.json.decode(body)["messages"] if status == 200 else []
        asked = [one["message"]["content"] for one in messages if one["message"]["role"] == "user"]
        result.wrong += sum(not text.startswith(f"epoch {epoch} ") for text in asked)
        texts = [one["message"]["content"] for one in messages if one["message"]["role"] == "assistant"]
        for reply in replies:
            found = texts.count(msgspec.json.decode(reply)["choices"][0]["message"]["content"])
            result.lost += found == 0
            result.doubled += max(found - 1, 0)
    status, body = await site.ask("GET", "/sessions", params={"name": name, "limit": "1000"})
    listed = msgspec.json.decode(body)["sessions"]
    result.wrong += abs(len(listed) - len(acknowledged))
    result.doubled += max(sum(one["turns"] for one in listed) - TURNS * len(acknowledged), 0)


async def run(servers: list[ServerProcess], epochs: int, seed: int) -> Result:
    result = Result(epochs=epochs)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
        site, stop = Site(servers, http), asyncio.Event()
        killing = asyncio.create_task(_kills(site, seed, stop, result))
        names = [f"task-{number}_0" for number in range(NAMES)]
        told: dict[str, dict[int, list[bytes]]] = {name: {} for name in names}

        async def play(name: str) -> None:
            for epoch in range(1, epochs + 1):
                told[name][epoch] = await _epoch(site, name, epoch, told[name].get(epoch - 1, []), result)
                result.turns += TURNS

        try:
            await asyncio.gather(*map(play, names))
        finally:
            stop.set()
            await killing
        for name in names:
            await _count(site, name, told[name], result)
    return result


@contextlib.contextmanager
def serving(processes: int, folder: Path | None = None) -> Iterator[list[ServerProcess]]:
    """One server on SQLite, or several on a PostgreSQL of their own, before an engine."""
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-names-", dir=folder)))
        url = None
        if processes > 1:
            from ops.bench.primary import primary  # needs a package of the tests

            url = stack.enter_context(primary(folder)).new_database().url
        engine = stack.enter_context(SimulatorProcess("--seed", "46"))
        environment = {"TURNLOG_WORKERS": "1"}
        servers = [
            ServerProcess(own, upstreams=[engine.base_url], database_url=url, environment=environment)
            for _ in range(processes)
        ]
        servers[0].migrate()
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield servers


def main() -> int:
    parser = argparse.ArgumentParser(description="Names that come again in each epoch, over kills.")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, help="above 1: on PostgreSQL")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="where the stores are put")
    given = parser.parse_args()
    with serving(given.processes, given.folder) as servers:
        result = asyncio.run(run(servers, given.epochs, given.seed))
    print(result)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
