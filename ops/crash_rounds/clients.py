"""The clients: session after session, turn after turn, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from ops.bench.client import Broken, Connection, Response
from ops.bench.load import Conversation, error_code, opening_messages, reply_message

TURNS_PER_SESSION = 12
LONGEST_LATENCY_S = 0.15

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
    """What happened in one round; the last five are violations.

    A client whose turn was broken off by the kill is waited for: `first_s` and `slowest_s` are the times from the
    kill to the first and the last of these turns' 200s.
    """

    number: int
    killed_after_s: float = 0.0
    up_after_s: float = 0.0
    first_s: float = 0.0
    slowest_s: float = 0.0
    interrupted: int = 0
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

    def recovered(self, seconds: float) -> None:
        """A broken-off turn was answered 200 so long after the kill."""
        self.interrupted += 1
        self.first_s = min(self.first_s or seconds, seconds)
        self.slowest_s = max(self.slowest_s, seconds)


class Site:
    """What the clients share: which servers are up, may new turns `go`, the round, every session so far."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self.base_urls = base_urls
        self.go = asyncio.Event()
        self.stopping = False
        self.round = Round(1)
        self.killed_at = 0.0
        self.followed: list[Followed] = []
        self.refusals: Counter[str] = Counter()
        self._up = set(base_urls)
        self._any_up = asyncio.Event()
        self._any_up.set()

    def is_up(self, base_url: str) -> bool:
        return base_url in self._up

    def down(self, base_url: str) -> None:
        self._up.discard(base_url)
        if not self._up:
            self._any_up.clear()

    def back(self, base_url: str) -> None:
        self._up.add(base_url)
        self._any_up.set()

    async def one_up(self, choice: random.Random) -> str:
        """Any server that is up; waits for one."""
        await self._any_up.wait()
        return choice.choice(sorted(self._up))


class Client:
    """One agent: session after session, turn after turn, and never a new turn before the last is answered."""

    def __init__(self, site: Site, number: int, seed: int) -> None:
        self._site = site
        self._number = number
        self._random = random.Random(f"{seed} client {number}")
        self._opening = opening_messages(1024, seed=number)
        self._home = ""
        self._connection: Connection | None = None
        self.resting = asyncio.Event()

    async def run(self) -> None:
        index = 0
        while not self._site.stopping:
            index += 1
            latency = self._random.uniform(0, LONGEST_LATENCY_S)
            sim = b'{"completion_tokens":11,"tool_calls":false,"reasoning":false,"latency_s":%.4f}' % latency
            followed = Followed(f"crash-{self._number}-{index}", Conversation(self._opening, sim))
            self._home = ""
            await self._create(followed.session_id)
            self._site.followed.append(followed)
            while followed.conversation.turns < TURNS_PER_SESSION and not self._site.stopping:
                await self._rest()
                if not await self.turn(followed):
                    break
        self.close()

    async def _rest(self) -> None:
        """Between the rounds, after which it goes on at any server."""
        if not self._site.go.is_set():
            self._home = ""
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
        first_retry, interrupted, refused = False, False, 0
        while refused < PATIENCE:
            response = await self._exchange(path, body, f"idempotency-key: {key}\r\n")
            if response is None:
                site.round.retried += 1
                first_retry = interrupted = True
                continue
            if response.status == 200:
                self._acknowledged(followed, key, response)
                if interrupted:
                    site.round.recovered(time.perf_counter() - site.killed_at)
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
        """One request, to the same server as long as that is up; None where the connection broke."""
        if not self._site.is_up(self._home):
            self._home = await self._site.one_up(self._random)
            self.close()
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await Connection.connect(self._home)
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
