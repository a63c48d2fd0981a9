"""Fills a server with live sessions through HTTP, and goes on with some of them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ops.bench.client import Broken, Connection
from ops.bench.sessions import Conversation, error_code, opening_messages, reply_message

BYTES_PER_TOKEN = 4.9
"""Approximate bytes of text for each token of the simulator's vocabulary."""

TEMPLATE_TOKENS = 10
"""Tokens of a turn's prompt that are not its question's words."""

EXPERTS = {"layers": 4, "top_k": 2, "experts": 64}
"""Shape of a token's routing payload: 8 ids, stored as 8 bytes before compression."""

KEPT = 16384
"""Sessions whose conversation is remembered, so that they can go on: more than are continued in one measurement, so
that none is found in a cache because it was continued a moment ago."""

QUESTIONS = 64
RETRIES = 5


class TurnShape(NamedTuple):
    """Tokens of a turn: those that are new in its prompt, and those of its output."""

    new_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.new_tokens + self.output_tokens


class Turns:
    """Seconds of each turn that was answered, and of all of them together."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.seconds = 0.0


class Filling:
    """The sessions of one server. Their ids are in no order, as those of real sessions.

    `count` sessions were filled in, with so many `tokens` together. `errors` are replies that were repeated, by code.
    """

    def __init__(self, base_url: str, shape: TurnShape, turns: int, clients: int, seed: int = 1) -> None:
        self.count = 0
        self.tokens = 0
        self.errors: dict[str, int] = {}
        self._base_url = base_url
        self._turns = turns
        self._clients = clients
        self._rng = random.Random(seed)
        sim = {"completion_tokens": shape.output_tokens, "tool_calls": False, "reasoning": False, "experts": EXPERTS}
        self._sim = msgspec.json.encode(sim)
        size = int((shape.new_tokens - TEMPLATE_TOKENS) * BYTES_PER_TOKEN)
        self._questions = [opening_messages(size, seed=number)[0] for number in range(QUESTIONS)]
        self._kept: dict[str, Conversation] = {}

    async def fill_up_to(self, count: int, until: float | None = None) -> Turns:
        """Run new sessions until there are `count`, or until `time.monotonic()` is `until`."""
        found = Turns()
        numbers = iter(range(self.count, count))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._fill(numbers, found, until))
        found.seconds = time.perf_counter() - began
        return found

    async def _fill(self, numbers: Iterator[int], found: Turns, until: float | None) -> None:
        async with await Connection.connect(self._base_url) as connection:
            for number in numbers:
                if until is not None and time.monotonic() > until:
                    return
                name = session_name(number)
                await connection.json("POST", "/sessions", {"session_id": name})
                conversation = Conversation([self._question(number)], self._sim)
                for _ in range(self._turns):
                    reply = await self._turn(connection, name, conversation, found)
                self.count += 1
                self.tokens += _total_tokens(reply)
                self._keep(name, conversation)

    def _keep(self, name: str, conversation: Conversation) -> None:
        """Reservoir sampling: each session is as likely to be kept."""
        if len(self._kept) < KEPT:
            self._kept[name] = conversation
        elif self._rng.randrange(self.count) < KEPT:
            del self._kept[next(iter(self._kept))]
            self._kept[name] = conversation

    async def run(self, seconds: float, clients: int) -> Turns:
        """Run further turns of remembered sessions for `seconds`."""
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, stop.set)
        return await self.run_until(stop, clients)

    async def run_until(self, stop: asyncio.Event, clients: int) -> Turns:
        """The same until `stop` is set. At most one client uses a session at a time."""
        found = Turns()
        names = sorted(self._kept)
        self._rng.shuffle(names)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._run(names[number::clients], found, stop))
        found.seconds = time.perf_counter() - began
        return found

    async def _run(self, names: Sequence[str], found: Turns, stop: asyncio.Event) -> None:
        async with await Connection.connect(self._base_url) as connection:
            while names:
                for name in names:
                    if stop.is_set():
                        return
                    await self._turn(connection, name, self._kept[name], found)

    def forget(self, names: Collection[str]) -> None:
        """These sessions are closed."""
        for name in names:
            self._kept.pop(name, None)

    async def first_turn(self) -> None:
        """A further turn of one session. Raises Broken, OSError."""
        name = self._rng.choice(sorted(self._kept))
        found = Turns()
        async with await Connection.connect(self._base_url) as connection:
            await self._turn(connection, name, self._kept[name], found)

    async def _turn(self, connection: Connection, name: str, conversation: Conversation, found: Turns) -> bytes:
        body = conversation.body()
        for attempt in range(RETRIES):
            began = time.perf_counter()
            response = await connection.request("POST", f"/sessions/{name}/v1/chat/completions", body)
            if response.status == 200:
                found.latencies.append(time.perf_counter() - began)
                conversation.answered(reply_message(response.body), self._question(conversation.turns + 1))
                return response.body
            code = f"{response.status} {error_code(response.body)}"
            self.errors[code] = self.errors.get(code, 0) + 1
            await asyncio.sleep(0.1 * 2**attempt)
        raise Broken(f"session {name}: {response.status} {response.body[:200]!r}")

    def _question(self, number: int) -> bytes:
        return self._questions[number % QUESTIONS]


def _total_tokens(reply: bytes) -> int:
    found = re.search(rb'"total_tokens": ?(\d+)', reply)
    return int(found[1]) if found else 0


def session_name(number: int) -> str:
    """An id as random as a server's own, so that neighbours in an index are not neighbours in time."""
    return f"live-{hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()}"
