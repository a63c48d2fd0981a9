"""What survives: turns of OpenAI SDK agents at `kill -9`, replies of an engine that are not as they should be, and
whether a recorded turn is what the engine sampled."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from ops.bench.client import Broken, Connection
from ops.bench.load import Session
from ops.bench.peers.protocol import Peer, Record
from ops.bench.peers.witness import Sampled, WitnessEngine, tag
from ops.server import OwnProcess

AGENTS = 32
TURNS_PER_SESSION = 6
TURNS_BEFORE_KILL = 4
"""Of each agent, on the average."""

SETTLE_S = 1.0
"""Before a record that is missing is looked for again: some servers write after the reply."""
RECORDS_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 30.0

ODD = (
    *("nan_logprob", "inf_logprob", "null_logprob", "bool_logprob", "positive_logprob", "minus_9999_logprob"),
    *("bool_id", "negative_id", "huge_id", "float_id"),
    *("missing_meta_info", "missing_logprobs", "short_logprobs", "no_usage", "no_choices", "two_choices"),
    *("message_null", "other_response_ids", "two_prompts", "usage_prompt_tokens", "meta_prompt_tokens"),
    *("duplicate_choices", "duplicate_prompt_ids", "duplicate_meta_key", "completion_tokens_bool"),
    *("missing_prompt_ids", "other_prompt", "bad_utf8", "truncated_json", "not_object", "error_200"),
)
"""Faults of the simulator whose replies arrive as 200."""


class Turn(NamedTuple):
    """A turn that a client was told: its tag, and the text of the reply."""

    tag: str
    text: str


class Played(NamedTuple):
    session: Session
    turns: list[Turn]


class Audit(NamedTuple):
    """Turns that clients were told, and of them: that no record has; with more than one record; whose record is not
    what the engine sampled."""

    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    inexact: int = 0

    def __add__(self, other: object) -> Audit:
        assert isinstance(other, Audit)
        return Audit._make(ours + theirs for ours, theirs in zip(self, other, strict=True))


class Survival:
    """One server that runs before `engine`."""

    def __init__(self, peer: Peer, process: OwnProcess, engine: WitnessEngine) -> None:
        self._peer = peer
        self._process = process
        self._engine = engine
        self._numbers = itertools.count(1)
        self._down_s: list[float] = []

    async def figures(self, *, kills: int, agents: int = AGENTS) -> dict[str, Any]:
        """All figures; those of records are None where the server records nothing. Raises HTTPError, OSError, Broken,
        ServerDidNotStart."""
        calm, calm_deaths = await self._run(agents)
        records = await self._audit(calm)
        odd = None if records is None else await self.odd()
        audit = None if records is None else Audit()
        deaths: Counter[str] = Counter()
        for _ in range(kills):
            played, died = await self._run(agents, kill=True)
            deaths += died
            after = await self._audit(played)
            audit = None if audit is None or after is None else audit + after
        return {
            "exact turns": None if records is None else records.acknowledged - records.lost - records.inexact,
            "of turns without a kill": records and records.acknowledged,
            "acknowledged before and after kills": audit and audit.acknowledged,
            "lost": audit and audit.lost,
            "doubled": audit and audit.doubled,
            "inexact after kills": audit and audit.inexact,
            "agents": kills * agents,
            "agents died": deaths.total(),
            "deaths": deaths,
            "deaths without a kill": calm_deaths,
            "s until it answers": statistics.median(self._down_s) if self._down_s else None,
            "odd replies": odd and len(odd),
            "wrong rows": odd and sum(outcome == "wrong" for outcome in odd.values()),
            "odd": odd,
        }

    async def _run(self, agents: int, *, kill: bool = False) -> tuple[list[Played], Counter[str]]:
        """Let each agent play a session, with `kill` sessions until the server was killed and is back. Returns the
        sessions, and the errors that agents died of."""
        played: list[Played] = []
        over = asyncio.Event()
        running = [asyncio.create_task(self._agent(number, played, over)) for number in range(agents)]
        try:
            if kill:
                await self._kill(agents * TURNS_BEFORE_KILL, played, running)
        finally:
            over.set()
            ends = await asyncio.gather(*running, return_exceptions=True)
        return played, Counter(f"{type(end).__name__}: {str(end)[:80]}" for end in ends if end is not None)

    async def _kill(self, turns: int, played: list[Played], running: Sequence[asyncio.Task[None]]) -> None:
        """Kill the server after so many turns of all agents, and start it again. Raises ServerDidNotStart."""
        while sum(len(sitting.turns) for sitting in played) < turns:
            await asyncio.sleep(0.01)
            if all(agent.done() for agent in running):
                break
        began = time.monotonic()
        await asyncio.to_thread(self._peer.crash, self._process)
        self._down_s.append(time.monotonic() - began)

    async def _agent(self, number: int, played: list[Played], over: asyncio.Event) -> None:
        """Play sessions as a program does that has never heard of this server; it dies of the first error. Every other
        agent streams, where the server can."""
        stream = self._peer.streams and number % 2 == 1
        async with AsyncOpenAI(base_url=self._process.base_url, api_key="none") as agent:
            while True:
                name = next(self._numbers)
                sitting = Played(await self._opened(name), [])
                played.append(sitting)
                client = agent.with_options(
                    base_url=f"{self._process.base_url}{sitting.session.root}/v1",
                    default_headers=_headers(sitting.session),
                )
                messages: list[ChatCompletionMessageParam] = []
                for turn in range(TURNS_PER_SESSION):
                    own = tag(name, number, turn)
                    messages.append({"role": "user", "content": f"What follows {own}?"})
                    text = await _asked(client, messages, stream=stream)
                    sitting.turns.append(Turn(own, text))
                    messages.append({"role": "assistant", "content": text})
                if over.is_set():
                    return

    async def _opened(self, number: int) -> Session:
        """Open a session; whoever starts agents does that again while the server is down. Raises Broken, OSError."""
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                async with await Connection.connect(self._process.base_url) as connection:
                    return await self._peer.open(connection, f"survival-{number}")
            except (Broken, OSError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _audit(self, played: Iterable[Played]) -> Audit | None:
        """Compare what clients were told with the records; None if the server has none."""
        total, unsettled = Audit(), []
        async with self._reader() as client:
            for sitting in played:
                records = await self._peer.records(client, sitting.session)
                if records is None:
                    return None
                if len(records) < len(sitting.turns):
                    unsettled.append(sitting)
                else:
                    total += audit(sitting.turns, records, self._engine.sampled)
            if unsettled:
                await asyncio.sleep(SETTLE_S)
            for sitting in unsettled:
                records = await self._peer.records(client, sitting.session)
                total += audit(sitting.turns, records or (), self._engine.sampled)
        return total

    async def odd(self, faults: Sequence[str] = ODD) -> dict[str, str]:
        """What became of each odd reply: refused (an error for the client), unreadable (an error for the reader of the
        records), no row, as sampled, less than sampled, wrong."""
        outcomes = {}
        async with self._reader() as client:
            for fault in faults:
                name = next(self._numbers)
                session = await self._opened(name)
                self._engine.fail_next(fault)
                body = {
                    "model": "simulator",
                    "messages": [{"role": "user", "content": f"What follows {tag(name, 0, 0)}?"}],
                }
                url = f"{session.root}/v1/chat/completions"
                reply = await client.post(url, json=body, headers=_headers(session))
                await asyncio.sleep(0.1)
                try:
                    records = await self._peer.records(client, session) or ()
                except (httpx.HTTPStatusError, ValueError):
                    outcomes[fault] = "unreadable"
                    continue
                outcomes[fault] = outcome(reply.status_code, records, self._engine.sampled[tag(name, 0, 0)])
        return outcomes

    def _reader(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._process.base_url, timeout=RECORDS_TIMEOUT_S)


def audit(turns: Sequence[Turn], records: Sequence[Record], sampled: dict[str, list[Sampled]]) -> Audit:
    """Of one session: what its client was told against its records."""
    counts = Counter(acknowledged=len(turns))
    for turn in turns:
        generations = sampled[turn.tag]
        told = [generation for generation in generations if generation.text == turn.text]
        of_turn = [record for record in records if any(list(record.ids) == one.ids for one in generations)]
        kept = [record for record in of_turn if any(list(record.ids) == one.ids for one in told)]
        counts["lost"] += not kept
        counts["doubled"] += len(of_turn) > 1
        counts["inexact"] += bool(kept) and not any(one.is_record(record) for one in told for record in kept)
    return Audit(**counts)


def outcome(status: int, records: Sequence[Record], sampled: Sequence[Sampled]) -> str:
    """What became of an odd reply that the client got with this status."""
    if status >= 300:
        return "refused"
    if not any(record.ids for record in records):
        return "no row"
    if all(any(one.is_record(record) for one in sampled) for record in records):
        return "as sampled"
    if all(any(not one.contradicts(record) for one in sampled) for record in records):
        return "less than sampled"
    return "wrong"


async def _asked(client: AsyncOpenAI, messages: list[ChatCompletionMessageParam], *, stream: bool) -> str:
    """The text of the reply. Raises what the client does, ValueError for a stream that ends too early."""
    if not stream:
        reply = await client.chat.completions.create(model="simulator", messages=messages)
        return reply.choices[0].message.content or ""
    texts, finish = [], None
    async for chunk in await client.chat.completions.create(model="simulator", messages=messages, stream=True):
        for choice in chunk.choices:
            texts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    if finish is None:
        raise ValueError("the stream has no finish reason")
    return "".join(texts)


def _headers(session: Session) -> dict[str, str]:
    lines = [line.partition(":") for line in session.headers.split("\r\n") if line]
    return {name.strip(): value.strip() for name, _, value in lines}
