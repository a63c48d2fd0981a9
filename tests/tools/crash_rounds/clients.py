"""The clients: session after session, turn after turn, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import msgspec

from ops.bench.load import EXPERTS, WIRES, Conversation, Wire, opening_of
from ops.verify import Acknowledged
from tests.tools.session_client import SessionClient, acknowledged, streamed_message

TURNS_PER_SESSION = 12


class Mode(NamedTuple):
    """What the turns are: the engine's `sim`, the seconds of a generation, more fields of a request; the arguments of
    the engine and the environment of the servers; the clients' protocols in turn."""

    sim: Mapping[str, Any]
    latency_s: tuple[float, float] = (0.0, 0.15)
    more: bytes = b""
    engine: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    wires: Sequence[str] = ("chat",)


STREAMING = ("--dialect", "vllm")
"""An engine whose chats stream ids."""

MODES: Mapping[str, Mode] = {
    "plain": Mode({"completion_tokens": 11}),
    "payloads": Mode({"completion_tokens": 120, "experts": EXPERTS}, environment={"TURNLOG_REPLAY": "routed_experts"}),
    "tokens": Mode({"completion_tokens": 11}, wires=("vllm", "sglang")),
    "mid-stream": Mode(
        {"completion_tokens": 60, "chunk_tokens": 4},
        (0.1, 0.8),
        b',"stream":true,"stream_mode":"live"',
        STREAMING,
        {"TURNLOG_UPSTREAM_DIALECT": "vllm"},
    ),
    "staging": Mode(
        {"completion_tokens": 200, "chunk_tokens": 4},
        (0.3, 1.5),
        b',"temperature":0,"max_tokens":208',
        STREAMING,
        {"TURNLOG_UPSTREAM_DIALECT": "vllm", "TURNLOG_STAGE_TOKENS_S": "0.1"},
    ),
}

PATIENCE = 20
"""Refusals of one turn after which its session counts as one that cannot go on."""


class Followed(msgspec.Struct):
    """A session as its client knows it."""

    session_id: str
    conversation: Conversation
    wire: Wire
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

    `begun` counts the streams that a kill cut behind their first bytes."""

    def __init__(self, base_urls: Sequence[str], mode: Mode) -> None:
        self.base_urls = base_urls
        self.mode = mode
        self.begun = 0
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
        self._wire = WIRES[site.mode.wires[number % len(site.mode.wires)]]
        self._opening = opening_of(self._wire, 1024, seed=number)
        self._home = ""
        self.resting = asyncio.Event()

    async def run(self) -> None:
        index = 0
        while not self._site.stopping:
            index += 1
            mode = self._site.mode
            sim = {
                "tool_calls": False,
                "reasoning": False,
                "latency_s": self._random.uniform(*mode.latency_s),
                **mode.sim,
            }
            conversation = Conversation(self._opening, msgspec.json.encode(sim), mode.more, self._wire)
            followed = Followed(f"crash-{self._number}-{index}", conversation, self._wire)
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

    async def holds(self, followed: Followed) -> bool:
        """Is the session of a client of token ids one row, and are its tokens those that the client knows?"""
        rows = (await self._session(followed).get(f"/export?session_id={followed.session_id}")).splitlines()
        asked = followed.wire.question(0).count(b",") + 1  # The last question waits for its turn.
        known = json.loads(b"[" + followed.conversation.history + b"]")[:-asked]
        return [json.loads(row)["tokens"] for row in rows] == [known]

    async def turn(self, followed: Followed) -> bool:
        """One turn, whatever it takes; False where the session cannot go on."""
        site = self._site
        key = f"{followed.session_id}-{followed.conversation.turns}"
        first_retry, interrupted = False, False
        body, wire = b"".join(followed.conversation.body()), followed.wire
        async for answer in self._session(followed).turn(body, key, PATIENCE, wire):
            if answer is None or answer.is_cut:
                site.begun += answer is not None
                first_retry = interrupted = True
            elif answer.status == 200:
                site.acknowledged.append(acknowledged(followed.session_id, answer, key, wire))
                read = streamed_message if answer.is_stream else wire.added
                followed.conversation.answered(read(answer.body))
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
