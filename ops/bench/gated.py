"""Many sessions held back by one gate, and let go: until when is the last dispatched, and what do they cost meanwhile?

Each session takes three turns: some at a time to warm up; all at once before a paused adapter's gate, which opens after
a while; and, as long after that, all at once with an open gate, for comparison. The engines say when they saw each
request, on the same clock. Afterwards every session's log must have exactly three turns, the engines each session three
times, and none of them a request while the gate was shut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ops.bench.client import Connection
from ops.bench.load import SIM, Conversation, error_code, opening_messages, reply_message
from ops.bench.measure import percentile, report
from ops.bench.primary import primary
from ops.bench.profile import top_frames
from ops.bench.sampler import family_pss
from ops.bench.stand import folder_for_bench
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

ADAPTER = "adapter"
LEASE_S = 3600
ENGINES = 2
REQUEST_BYTES = 2048
WARM_UP_AT_ONCE = 16
PROFILE_S = 4.0
PROFILE_AHEAD_S = 1.0
TURNS = 3
OPEN_FILES = 65536
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="the gate is shut for so long")
    parser.add_argument("--processes", type=int, default=1, help="more than one share a PostgreSQL of the run's own")
    parser.add_argument("--postgres", action="store_true", help="for one process, too")
    parser.add_argument("--profile", action="store_true", help="sample the first server while the gate opens")
    parser.add_argument("--quick", action="store_true", help="3 seconds")
    parser.add_argument("--folder", type=Path, help="where the database is put: the disk that is measured")


async def main(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        arguments.seconds = min(arguments.seconds, 3.0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    with _stand(arguments) as (servers, engines):
        figures = await _measured(servers, engines, arguments)
    report("gated" if len(servers) == 1 else f"gated-{len(servers)}", figures)
    return 0 if figures["wrong"] == {} else 1


@contextlib.contextmanager
def _stand(arguments: argparse.Namespace) -> Iterator[tuple[list[ServerProcess], list[SimulatorProcess]]]:
    with folder_for_bench(arguments.folder) as folder, contextlib.ExitStack() as stack:
        on_postgres = arguments.postgres or arguments.processes > 1
        url = stack.enter_context(primary(arguments.folder)).new_database() if on_postgres else None
        keep = str(arguments.sessions * TURNS)
        engines = [
            stack.enter_context(SimulatorProcess("--reasoning", "0", "--keep-requests", keep)) for _ in range(ENGINES)
        ]
        upstreams = [engine.base_url for engine in engines]
        servers = [ServerProcess(folder, upstreams=upstreams, database_url=url) for _ in range(arguments.processes)]
        servers[0].migrate()
        for server in servers:
            stack.callback(server.start().stop)
        yield servers, engines


async def _measured(
    servers: list[ServerProcess], engines: list[SimulatorProcess], arguments: argparse.Namespace
) -> dict[str, Any]:
    urls = itertools.cycle(server.base_url for server in servers)
    agents = [_Agent(url, f"gated-{number}") for number, url in zip(range(arguments.sessions), urls, strict=False)]
    async with contextlib.AsyncExitStack() as stack:
        await _order(servers, "resume")
        await _warm_up(agents)
        gated = await _gated(servers, agents, stack, arguments)
        # As long as the gate was shut: what has idled so long is as cold in one burst as in the other.
        await asyncio.sleep(arguments.seconds)
        await _connect(agents, stack)
        burst_at = time.monotonic()
        burst_ended = max(await asyncio.gather(*(agent.turn() for agent in agents)))
    seen = [one for engine in engines for one in await _seen(engine)]
    seen.sort(key=lambda one: one.arrived)
    released = [one for one in seen if gated.opened <= one.arrived < burst_at]
    burst = [one for one in seen if one.arrived >= burst_at]
    wrong = await _wrong(servers, agents, seen)
    wrong["turns that ended at a shut gate"] = gated.early
    wrong["requests seen behind a shut gate"] = sum(gated.shut < one.arrived < gated.opened for one in seen)
    after_ms = [(one.arrived - gated.opened) * 1000 for one in released]
    return {
        "sessions": len(agents),
        "processes": len(servers),
        "gate shut for s": gated.opened - gated.shut,
        "resume answered after ms": (gated.resumed - gated.opened) * 1000,
        "first dispatched after ms": percentile(after_ms, 0),
        "half dispatched after ms": percentile(after_ms, 50),
        "last dispatched after ms": percentile(after_ms, 100),
        "last answered after ms": (gated.ended - gated.opened) * 1000,
        "places between request and dispatch, mean": _displaced(agents, released),
        "open gate: last dispatched after ms": percentile([(one.arrived - burst_at) * 1000 for one in burst], 100),
        "open gate: last answered after ms": (burst_ended - burst_at) * 1000,
        "open gate: places between request and dispatch, mean": _displaced(agents, burst),
        **{f"memory {when} MiB": size / MIB for when, size in gated.memory.items()},
        "KiB a held turn": (gated.memory["while held"] - gated.memory["before"]) / len(agents) / 1024,
        "wrong": {what: count for what, count in wrong.items() if count},
        "profile": gated.profile,
    }


class _Gated(NamedTuple):
    """Moments on the host's monotonic clock; `early` turns ended before the gate opened; bytes of all servers."""

    shut: float
    opened: float
    resumed: float
    ended: float
    early: int
    memory: dict[str, int]
    profile: list[str]


async def _gated(
    servers: list[ServerProcess], agents: list[_Agent], stack: contextlib.AsyncExitStack, arguments: argparse.Namespace
) -> _Gated:
    """A turn of each session, before a gate that opens after a while."""
    pids = [server.pid for server in servers]
    memory = {"before": _memory(pids)}
    await _order(servers, "pause", lease_s=LEASE_S)
    await _connect(agents, stack)
    shut = time.monotonic()
    turns = [asyncio.create_task(agent.turn()) for agent in agents]
    await asyncio.sleep(arguments.seconds)
    memory["while held"] = _memory(pids)
    profile = asyncio.create_task(_profiled(servers[0], arguments.profile))
    await asyncio.sleep(PROFILE_AHEAD_S if arguments.profile else 0)
    early = sum(turn.done() for turn in turns)
    opened = time.monotonic()
    await _order(servers, "resume")
    resumed = time.monotonic()
    ended = max(await asyncio.gather(*turns))
    memory["afterwards"] = _memory(pids)
    return _Gated(shut, opened, resumed, ended, early, memory, await profile)


class _Agent:
    """One session. It says its turns on the connection that `connect` made last, as servers close those that idle."""

    def __init__(self, base_url: str, name: str) -> None:
        self.name = name
        self.refused: Counter[str] = Counter()
        self._base_url = base_url
        self._conversation = Conversation(opening_messages(REQUEST_BYTES), SIM)

    async def connect(self) -> Connection:
        self._connection = await Connection.connect(self._base_url)
        return self._connection

    async def first_turn(self) -> None:
        """Raises Broken."""
        async with await self.connect() as connection:
            await connection.json("POST", "/sessions", {"session_id": self.name, "adapter": ADAPTER})
            await self.turn()

    async def turn(self) -> float:
        """When it was answered. Raises Broken."""
        path = f"/sessions/{self.name}/v1/chat/completions"
        response = await self._connection.request("POST", path, self._conversation.body())
        answered = time.monotonic()
        if response.status == 200:
            self._conversation.answered(reply_message(response.body))
        else:
            self.refused[f"{response.status} {error_code(response.body)}"] += 1
        return answered


async def _warm_up(agents: Sequence[_Agent]) -> None:
    """A session and its first turn for each, some at a time."""
    waiting = iter(agents)

    async def work() -> None:
        for agent in waiting:
            await agent.first_turn()

    await asyncio.gather(*(work() for _ in range(WARM_UP_AT_ONCE)))


async def _connect(agents: Sequence[_Agent], stack: contextlib.AsyncExitStack) -> None:
    for agent in agents:
        await stack.enter_async_context(await agent.connect())


async def _order(servers: Sequence[ServerProcess], what: str, **wishes: Any) -> None:
    """Pause or resume the adapter at the first server. Raises Broken."""
    async with await Connection.connect(servers[0].base_url) as connection:
        await connection.json("POST", f"/adapters/{ADAPTER}/{what}", wishes)


async def _profiled(server: ServerProcess, wanted: bool) -> list[str]:
    return await top_frames(server.pid, PROFILE_S, server.log_path.parent) if wanted else []


def _memory(pids: Sequence[int]) -> int:
    return sum(map(family_pss, pids))


class _Request(msgspec.Struct):
    """As the simulator tells of it."""

    path: str
    headers: dict[str, str]
    arrived: float

    @property
    def session(self) -> str:
        return self.headers["x-smg-routing-key"]


class _Stats(msgspec.Struct):
    requests: list[_Request]


async def _seen(engine: SimulatorProcess) -> list[_Request]:
    """All chats that it got."""
    async with await Connection.connect(engine.base_url) as connection:
        response = await connection.request("GET", "/sim/stats?last=1000000")
    requests = msgspec.json.decode(response.body, type=_Stats).requests
    return [one for one in requests if one.path == "/v1/chat/completions"]


def _displaced(agents: Sequence[_Agent], seen: Sequence[_Request]) -> float:
    """How far the order in which turns reached the engines is from that in which they were asked for."""
    asked = {agent.name: place for place, agent in enumerate(agents)}
    return sum(abs(asked[one.session] - place) for place, one in enumerate(seen)) / max(len(seen), 1)


class _Event(msgspec.Struct):
    type: str


_decode_events = msgspec.json.Decoder(_Event).decode_lines


class _Log(NamedTuple):
    opened: int
    committed: int


async def _wrong(
    servers: Sequence[ServerProcess], agents: Sequence[_Agent], seen: Sequence[_Request]
) -> dict[str, int]:
    """What should not be, and how often: lost or doubled turns by the log, by the engines, by the clients."""
    found: Counter[str] = sum((agent.refused for agent in agents), Counter())
    times = Counter(one.session for one in seen)
    async with aiohttp.ClientSession(servers[0].base_url, raise_for_status=True) as http:
        for agent in agents:
            async with http.get(f"/sessions/{agent.name}/events") as response:
                types = Counter(event.type for event in _decode_events(await response.read()))
            log = _Log(types["TurnOpened"], types["TurnCommitted"])
            found["logs without three turns"] += log != _Log(TURNS, TURNS)
            found["sessions not seen three times"] += times[agent.name] != TURNS
    return dict(found)
