"""Clients that play sessions of the real load, and what the server's rows say of them afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from ops.bench.client import Broken, Connection
from ops.bench.load import Open, Session
from ops.bench.real.conversation import Conversation, Wire
from ops.bench.real.engine import WEIGHT_VERSION
from ops.bench.real.material import Material

SAMPLE = Path(__file__).with_name("claude_code_64.json")
RETRY_S = 0.2
TRIES = 150
"""Before a client gives up: a killed server is back after two seconds."""


class Sampled(msgspec.Struct):
    """One session of the sample. `bases`: the tokens before the conversation, of each agent; here there is one."""

    bases: tuple[int]
    turns: list[tuple[int, int, tuple[tuple[str, int]], int, float, int]]
    """The agent, how many messages are kept of its last request and reply, the new ones with their tokens, sampled
    tokens, seconds of thinking, and whether the reply calls a tool."""


class Sample(msgspec.Struct):
    source: str
    sessions: list[Sampled]


def sample() -> Sample:
    return msgspec.json.decode(SAMPLE.read_bytes(), type=Sample)


class Failed(Exception):
    """A turn was not answered with 200."""


class Talk:
    """A client with a session. With `retries` turns have idempotency keys, and are repeated until they are answered."""

    def __init__(self, base_url: str, session: Session, conversation: Conversation, retries: bool = False) -> None:
        self.conversation = conversation
        self.session = session
        self.differing = 0
        """Replies that are not what the engine said."""
        self.sent = 0
        """Bytes of the newest request."""
        self._base_url = base_url
        self._retries = retries
        self._connection: Connection | None = None

    @classmethod
    async def begin(
        cls, base_url: str, opens: Open, name: str, conversation: Conversation, retries: bool = False
    ) -> Self:
        """In a new session. Raises Broken, OSError."""
        async with await Connection.connect(base_url) as connection:
            return cls(base_url, await opens(connection, name), conversation, retries)

    async def turn(self, new: int, sampled: int, *, kept: int | None = None, calls: bool = False) -> None:
        """Raises Failed, Broken, OSError."""
        own = self.conversation
        body = own.ask(new, sampled, kept=kept, calls=calls)
        self.sent = sum(map(len, body))
        path = self.session.root + own.wire.route
        headers = f"idempotency-key: {self.session.id}-{len(own.turns)}\r\n" if self._retries else ""
        for last in (*([False] * (TRIES * self._retries)), True):
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = await Connection.connect(self._base_url)
                response = await self._connection.request("POST", path, body, headers)
                if response.status == 200:
                    self.differing += not own.answered(response.body)
                    return
                if last or response.status not in (409, 429, 503):
                    raise Failed(f"{path} answered {response.status}: {response.body[:300]!r}")
            except (Broken, OSError):
                if last:
                    raise
                self.close()
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Compared(NamedTuple):
    """Rows, turns that clients were told of, and of them: rows that differ from what was sampled; turns that are in
    no row's loss, and in that of several."""

    rows: int = 0
    turns: int = 0
    differing: int = 0
    lost: int = 0
    doubled: int = 0

    def plus(self, other: Compared) -> Compared:
        return Compared._make(ours + theirs for ours, theirs in zip(self, other, strict=True))


async def play(
    base_urls: Sequence[str],
    opens: Open,
    sessions: Sequence[Sampled],
    material: Material,
    wire: Wire,
    *,
    first: int,
    clients: int,
    retries: bool = False,
    after_turn: Callable[[], Awaitable[None]] | None = None,
) -> list[Talk]:
    """Play sessions, `clients` at a time, numbered from `first`, without thinking; the processes that are given share
    them. Raises Failed, Broken, OSError."""
    talks = []
    for number, one in enumerate(sessions, first):
        conversation = Conversation(number, one.bases[0], material, wire)
        base_url = base_urls[number % len(base_urls)]
        talks.append(await Talk.begin(base_url, opens, f"real-{number}", conversation, retries))
    waiting = list(zip(talks, sessions, strict=True))

    async def client() -> None:
        while waiting:
            talk, one = waiting.pop()
            for _, kept, [(_, new)], sampled, _, calls in one.turns:
                await talk.turn(new, sampled, kept=kept, calls=bool(calls))
                if after_turn is not None:
                    await after_turn()
            talk.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return talks


async def compared(base_url: str, talks: Sequence[Talk]) -> Compared:
    """Compare every exported row with what the engine sampled, id by id. Raises Broken, OSError."""
    total = Compared()
    async with await Connection.connect(base_url) as connection:
        for talk in talks:
            response = await connection.request("GET", f"/export?session_id={talk.session.id}")
            rows = [json.loads(line) for line in response.body.splitlines()]
            total = total.plus(compare(rows, talk.conversation))
    return total


def compare(rows: Sequence[dict[str, Any]], conversation: Conversation) -> Compared:
    """The rows of one session."""
    material, turns = conversation.material, conversation.turns
    made = {material.tokens([turn.items[-1].run]).tobytes(): number for number, turn in enumerate(turns)}
    in_loss = [0] * len(turns)
    differing = 0
    for row in rows:
        ids = np.array(row["tokens"], np.int32)
        last = row["turns"][-1]
        number = made.get(ids[last["output_start"] : last["end"]].tobytes())
        if number is None:
            differing += 1
            continue
        tokens, logprobs, places = conversation.row(number)
        mask = np.array(row["loss_mask"], bool)
        wanted = np.zeros(len(tokens), bool)
        for turn, place in places.items():
            if len(mask) == len(tokens) and mask[place].all():
                wanted[place] = True
                in_loss[turn] += 1
        differing += not (
            np.array_equal(ids, tokens)
            and np.array_equal(mask, wanted)
            and np.array_equal(np.array(row["logprobs"])[mask], logprobs[wanted])
            and {str(version) for version in np.array(row["weight_versions"], object)[mask]} <= {WEIGHT_VERSION}
        )
    return Compared(len(rows), len(turns), differing, in_loss.count(0), sum(count > 1 for count in in_loss))
