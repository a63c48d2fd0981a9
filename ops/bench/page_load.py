"""What the page is measured with: a store full of sessions, and some that take a turn every few seconds."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator

from ops.bench.client import Broken, Connection
from ops.bench.load import Conversation, error_code, reply_message, short_turns

GROUP = 8
TURNS = 2
"""Of each session that is filled in."""

CLOSED_OF = 5
"""One in so many filled sessions stays open, and as many have no reward."""

REQUEST_BYTES = 2048
FILL_CLIENTS = 32
FIRST_PREFIX, LIVE_PREFIX = "filled", "live"


async def fill(base_url: str, sessions: int) -> float:
    """Sessions of two turns in groups of eight, through HTTP; most rewarded and closed. Seconds. Raises Broken."""
    began = time.perf_counter()
    numbers = iter(range(sessions))
    async with asyncio.TaskGroup() as group:
        for _ in range(FILL_CLIENTS):
            group.create_task(_filler(base_url, numbers))
    return time.perf_counter() - began


async def _filler(base_url: str, numbers: Iterator[int]) -> None:
    script = short_turns(REQUEST_BYTES, TURNS)
    async with await Connection.connect(base_url) as connection:
        for number in numbers:
            name = f"{FIRST_PREFIX}-{number:06}"
            labels = {"session_id": name, "group_id": f"task-{number // GROUP:05}", "attempt": number % GROUP}
            await connection.json("POST", "/sessions", labels)
            conversation = script.begin()
            for _ in range(TURNS):
                await _turn(connection, name, conversation)
            if number % CLOSED_OF:
                reward = (number * 7919 % 11) / 10
                await connection.json("PUT", f"/sessions/{name}/reward", {"reward": reward})
                await connection.request("DELETE", f"/sessions/{name}")


async def _turn(connection: Connection, name: str, conversation: Conversation) -> float:
    """When its reply had come, in epoch seconds. Raises Broken."""
    response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", conversation.body())
    answered = time.time()
    if response.status != 200:
        raise Broken(f"a turn was answered {response.status} {error_code(response.body)}")
    conversation.answered(reply_message(response.body))
    return answered


class Drivers:
    """`sessions` live sessions, each a client of its own that takes a turn every `period_s`, until stopped."""

    def __init__(self, base_url: str, sessions: int, period_s: float) -> None:
        self.names = [f"{LIVE_PREFIX}-{number:04}" for number in range(sessions)]
        self.turns: Counter[str] = Counter()
        self.answered: dict[tuple[str, int], float] = {}
        """When the client of a session had the reply of its n-th turn, in epoch seconds: after the commit."""
        self._base_url = base_url
        self._period_s = period_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def total(self) -> int:
        return self.turns.total()

    async def start(self) -> None:
        """Returns when each has taken its first turn. Raises Broken."""
        ready = asyncio.Barrier(len(self.names) + 1)
        for place, name in enumerate(self.names):
            offset_s = self._period_s * place / len(self.names)
            self._tasks.append(asyncio.create_task(self._drive(name, offset_s, ready)))
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await self.stop()
        await waiting

    async def stop(self) -> None:
        """Each ends after its turn. Raises what a driver raised."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _drive(self, name: str, offset_s: float, ready: asyncio.Barrier) -> None:
        conversation = short_turns(REQUEST_BYTES, TURNS).begin()
        async with await Connection.connect(self._base_url) as connection:
            await connection.json("POST", "/sessions", {"session_id": name, "group_id": "live"})
            self._count(name, await _turn(connection, name, conversation))
        await ready.wait()
        due = time.monotonic() + offset_s
        async with await Connection.connect(self._base_url) as connection:
            for step in itertools.count():
                if await self._stopped_within(due + step * self._period_s - time.monotonic()):
                    return
                self._count(name, await _turn(connection, name, conversation))

    def _count(self, name: str, answered: float) -> None:
        self.turns[name] += 1
        self.answered[name, self.turns[name]] = answered

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await self._stopping.wait()
        except TimeoutError:
            return self._stopping.is_set()
        return True
