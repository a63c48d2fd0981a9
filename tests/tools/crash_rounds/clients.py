"""The clients: session after session, turn after turn, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import msgspec

from ops.bench.load import EXPERTS, Conversation, opening_messages, reply_message
from ops.verify import Acknowledged
from tests.tools.session_client import SessionClient, acknowledged

TURNS_PER_SESSION = 12
LONGEST_LATENCY_S = 0.15

PATIENCE = 20
"""Refusals of one turn after which its session counts as one that cannot go on."""


class Followed(msgspec.Struct):
    """A session as its client knows it."""

    session_id: str
    conversation: Conversation
    stuck: bool = False


class Round(msgspec.Struct):
    """What happened in one round; the last five are violations: turns lost, keys committed twice, first retries
    answered `session_busy`, sessions that cannot go on, problems that verify finds.

    A client whose turn was broken off by the kill is waited for: `slowest_s` is the time from the kill to the last of
    these turns' 200s.
    """

    number: int
    slowest_s: float = 0.0
    interrupted: int = 0
    acknowledged: int = 0
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
        self.slowest_s = max(self.slowest_s, seconds)


class Site:
    """What the clients share: which servers are up, may new turns `go`, the round, every session so far.

    `has_payloads`: each turn has some tens of KiB of replay payloads."""

    def __init__(self, base_urls: Sequence[str], *, has_payloads: bool = False) -> None:
        self.base_urls = base_urls
        self.has_payloads = has_payloads
        self.go = asyncio.Event()
        self.stopping = False
        self.round = Round(1)
        self.killed_at = 0.0
        self.followed: list[Followed] = []
        self.acknowledged: list[Acknowledged] = []
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

    def __init__(self, site: Site, http: aiohttp.ClientSession, number: int, seed: int) -> None:
        self._site = site
        self._http = http
        self._number = number
        self._random = random.Random(f"{seed} client {number}")
        self._opening = opening_messages(1024, seed=number)
        self._home = ""
        self.resting = asyncio.Event()

    async def run(self) -> None:
        index = 0
        while not self._site.stopping:
            index += 1
            latency = self._random.uniform(0, LONGEST_LATENCY_S)
            sim: dict[str, object] = {
                "completion_tokens": 11,
                "tool_calls": False,
                "reasoning": False,
                "latency_s": latency,
            }
            if self._site.has_payloads:
                sim |= {"completion_tokens": 120, "experts": EXPERTS}
            conversation = Conversation(self._opening, msgspec.json.encode(sim))
            followed = Followed(f"crash-{self._number}-{index}", conversation)
            self._home = ""
            async for answer in self._session(followed).create():
                if answer is not None and answer.code:
                    self._site.refusals[f"create: {answer.status} {answer.code}"] += 1
            self._site.followed.append(followed)
            while followed.conversation.turns < TURNS_PER_SESSION and not self._site.stopping:
                await self._rest()
                if not await self.turn(followed):
                    break

    async def _rest(self) -> None:
        """Between the rounds, after which it goes on at any server."""
        if not self._site.go.is_set():
            self._home = ""
        self.resting.set()
        await self._site.go.wait()
        self.resting.clear()

    def _session(self, followed: Followed) -> SessionClient:
        return SessionClient(self._http, followed.session_id, self._server)

    async def _server(self) -> str:
        """The same as long as that is up."""
        if not self._site.is_up(self._home):
            self._home = await self._site.one_up(self._random)
        return self._home

    async def turn(self, followed: Followed) -> bool:
        """One turn, whatever it takes; False where the session cannot go on."""
        site = self._site
        key = f"{followed.session_id}-{followed.conversation.turns}"
        first_retry, interrupted = False, False
        async for answer in self._session(followed).turn(b"".join(followed.conversation.body()), key, PATIENCE):
            if answer is None:
                first_retry = interrupted = True
            elif answer.status == 200:
                site.acknowledged.append(acknowledged(followed.session_id, answer, key))
                followed.conversation.answered(reply_message(answer.body))
                site.round.acknowledged += 1
                if interrupted:
                    site.round.recovered(time.perf_counter() - site.killed_at)
                return True
            else:
                site.refusals[f"{answer.status} {answer.code}"] += 1
                if first_retry and answer.code == "session_busy":
                    site.round.busy += 1
                first_retry = False
        followed.stuck = True
        site.round.stuck += 1
        return False
