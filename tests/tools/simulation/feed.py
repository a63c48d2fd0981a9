"""The training feed in a schedule: groups of rollouts that are made while consumers at several processes take them.

Two runs have groups of the same ids and consumers of the same names, and nothing of one comes to the other's. Some
rollouts fail, some are left and played again, some are evaluations."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from sqlalchemy import select

from app.domain.events import DEFAULT_RUN, Failure, RewardAssigned, SessionClosed, SessionConfig
from app.domain.groups import EPSILON
from app.domain.session import fold
from app.errors import SessionClosed as Closed
from app.errors import SessionExists
from app.features.groups.feed import FeedQuery, Groups
from app.features.groups.operations import Acknowledged
from app.features.groups.schema import groups
from app.store.sessions import load_head
from tests.tools.simulation import agreeing, rows
from tests.tools.simulation.calls import Close, Reward
from tests.tools.simulation.client import TRIES, Client, GaveUp
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.process import Process, ordered, wall
from tests.tools.simulation.world import World

SHARE = 0.12
"""Of the schedules."""

RUNS = (DEFAULT_RUN, "exp-1")

CONSUMERS = ("k1", "k1", "k2")
"""One name may be several clients, which then ask for new groups only."""

LEASES_S = (1.0, 4.0, 20.0)

LATE = 9
"""The attempt that begins late."""

AGAIN_S = 0.5

ROUNDING = 1e-9
"""Of an advantage."""

ROUNDING_S = 0.001
"""The database's clock, as a number of days, is exact to less than this."""


class Producer(Client):
    """Makes one rollout, whose reward it knows from the beginning, or a child's part of one."""

    config: SessionConfig
    turns = 1
    fails = False
    _has_reward = False
    is_left = False
    """Another one plays its attempt, and it gets no reward."""
    begins_after: Producer | None = None

    async def roll_out(self) -> None:
        """Raises GaveUp."""
        if self.begins_after is not None:
            await self.begins_after.roll_out()
        with contextlib.suppress(SessionExists, Closed):
            await self.insist(lambda: self._create(self.config), TRIES)
            for _ in range(self.turns):
                await self.turn()
        if self.fails:
            if not self._has_reward:
                await self.insist(self._reward, TRIES)  # a second one would end the failure
                self._has_reward = True
            with contextlib.suppress(Closed):
                await self.insist(self._fail, TRIES)
        elif self.config.parent is None and not self.is_left:
            await self.insist(self._reward, TRIES)
            await self.close()

    async def _fail(self) -> None:
        process = self._process()
        failed = Failure("sandbox")
        close = lambda: process.service.sessions.close(self.session_id, failed=failed)  # noqa: E731
        await self._fact(process, Close(), "closed", close)

    @property
    def reward(self) -> float:
        return random.Random(self.session_id).random()

    async def _reward(self) -> None:
        process = self._process()

        async def assign() -> None:
            await process.service.sessions.assign_reward(self.session_id, self.reward, {}, None)

        await self._fact(process, Reward(), "rewarded", assign, self.reward)


class Given(msgspec.Struct, frozen=True):
    """A group that has left a process, with its lease number `number`, of `consumer` from `at` until `until` by the
    database's clock."""

    group_id: str
    number: int
    consumer: str
    new_only: bool
    at: float
    until: float
    attempts: dict[str, float | None]
    failed: frozenset[str]
    count: int
    rows: list[dict[str, Any]]

    @property
    def advantages(self) -> dict[str, float | None]:
        """Of each rollout, by the rewards of those that did not fail."""
        counted = self.attempts.keys() - self.failed
        rewards = {one: reward for one, reward in self.attempts.items() if one in counted and reward is not None}
        if len(rewards) < 2 or min(rewards.values()) == max(rewards.values()):
            own = dict.fromkeys(rewards, 0.0)
        else:
            mean, scale = statistics.mean(rewards.values()), statistics.stdev(rewards.values()) + EPSILON
            own = {one: (reward - mean) / scale for one, reward in rewards.items()}
        return {one: own.get(one) for one in self.attempts}


class Feed:
    """A run's groups, and what their consumers were given and have acknowledged."""

    def __init__(
        self, world: World, seed: int, names: Sequence[str] = ("f1", "f2", "f3"), run: str = DEFAULT_RUN
    ) -> None:
        self._world = world
        self._run = run
        self._rng = rng = random.Random(f"feed {seed} {run}")
        self._producers: list[Producer] = []
        self._sizes: dict[str, int] = {}
        for group in names[: rng.choice((2, 3))]:
            self._sizes[group] = rng.choice((1, 2))
            for attempt in range(self._sizes[group]):
                self._add(group, attempt)
            if rng.random() < 0.3:
                self._add(group, 0, parent=self._producers[-1])
            if rng.random() < 0.3:
                self._add(group, 0, evaluation=True)
        self._given: dict[str, list[Given]] = defaultdict(list)
        self._asked_acks: Counter[tuple[str, str]] = Counter()
        self._acked: dict[str, float] = {}

    def _add(self, group: str, attempt: int, parent: Producer | None = None, *, evaluation: bool | None = None) -> None:
        made = self._producer(f"{group}.{attempt}{'.child' if parent else ''}{'.evaluation' if evaluation else ''}")
        made.config = SessionConfig(
            rollback_window=1,
            run=self._run,
            group_id=group,
            attempt=attempt,
            parent=None if parent is None else parent.session_id,
            group_size=None if attempt == LATE else self._sizes[group],
            evaluation=evaluation,
        )
        made.turns = 0 if evaluation else self._rng.choice((0, 1, 1))  # its replies are not the engine's bytes
        if parent is None and not evaluation and attempt != LATE:
            made.fails = self._rng.random() < 0.2
            if self._rng.random() < 0.3:
                left = made.begins_after = self._producer(f"{group}.{attempt}.left")
                left.config, left.is_left = made.config, True
        self._producers.append(made)

    def _producer(self, name: str) -> Producer:
        name = name if self._run == DEFAULT_RUN else f"{name}.of-{self._run}"
        return Producer(self._world, name, name, Habits())

    def lives(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on during the storm."""
        return [
            *(self._produce(one, self._rng.expovariate(0.3)) for one in self._producers),
            *(self._begin_late(group) for group in self._groups() if self._rng.random() < 0.3),
            *(self._consume(name, new_only=number < 2) for number, name in enumerate(CONSUMERS)),
        ]

    async def _produce(self, producer: Producer, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        with contextlib.suppress(GaveUp):
            await producer.roll_out()

    async def _begin_late(self, group: str) -> None:
        """One more rollout, whatever has become of its group."""
        await asyncio.sleep(self._rng.expovariate(0.1))
        self._add(group, LATE)
        await self._produce(self._producers[-1], 0.0)

    async def _consume(self, name: str, *, new_only: bool) -> None:
        rng = self._rng
        for _ in range(rng.randint(2, 8)):
            await asyncio.sleep(rng.expovariate(0.3))
            given = await self._ask(name, rng.choice((1, 3)), rng.choice(LEASES_S), new_only=new_only)
            if given and rng.random() < 0.6:  # else it dies, and knows nothing of them
                await asyncio.sleep(rng.expovariate(0.5))
                await self._acknowledge(name, [one.group_id for one in given])

    async def finish(self) -> None:
        """Nothing fails any more: every group gets complete, and comes until it is acknowledged. Never ends
        where one does not."""
        for producer in self._producers:
            await self._until(producer.roll_out)
            left = producer.begins_after
            if left is not None and self._created_at(left) > self._created_at(producer):
                left.is_left = False  # By the clocks of their processes it is the later one, which the group waits for.
                await self._until(left.roll_out)
        while set(self._groups()) - self._consumers().keys():
            given = await self._ask("last", 10, LEASES_S[-1], new_only=False)
            await self._explain("last", [one.group_id for one in given])
            await self._acknowledge("last", [one.group_id for one in given])
            await asyncio.sleep(AGAIN_S)

    def _created_at(self, producer: Producer) -> tuple[float, str]:
        head = self._world.store.read(lambda connection: load_head(connection, producer.session_id))
        assert head is not None
        return head.created_at, producer.session_id

    def _groups(self) -> list[str]:
        return sorted({str(one.config.group_id) for one in self._producers})

    async def _until(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            with contextlib.suppress(GaveUp):
                return await work()

    async def _ask(self, consumer: str, size: int, lease_s: float, *, new_only: bool) -> Sequence[Given]:
        """What has come; nothing where it is not known. What leaves a process counts, whether it comes or not."""
        query = FeedQuery(consumer=consumer, run=self._run, size=size, lease_s=lease_s, new_only=new_only)
        asked = self._world.loop.time()

        async def hand_out(process: Process) -> list[Given]:
            pieces = [piece async for piece in await _of(process).feed.hand_out(query)]
            lines = [msgspec.json.decode(line) for line in b"".join(pieces).splitlines()]
            for line in lines:
                self._world.must(line["run"] == self._run, f"{self._run} was given {line['group_id']} of {line['run']}")
            return [_given(line, consumer, lease_s, new_only=new_only) for line in lines]

        def sent(given: Sequence[Given]) -> None:
            for one in given:
                self._judge(one, asked)
                self._given[one.group_id].append(one)

        return await self._ordered(f"{consumer} asks for groups", hand_out, sent) or ()

    async def _explain(self, consumer: str, group_ids: Sequence[str]) -> None:
        """Who asks for new groups alone is told why it is not given these, which it has itself."""
        query = FeedQuery(consumer=consumer, run=self._run, new_only=True, explain=True)

        async def hand_out(process: Process) -> dict[str, Any]:
            pieces = [piece async for piece in await _of(process).feed.hand_out(query)]
            lines = [msgspec.json.decode(line) for line in b"".join(pieces).splitlines()]
            return {line["group_id"]: line["excluded"] for line in lines}

        reasons = await self._ordered("why not", hand_out)
        for group_id in group_ids if reasons is not None else ():
            reason = reasons.get(group_id)
            self._world.must(reason == f"leased to {consumer}", f"{group_id} is not given, because: {reason}")

    async def _acknowledge(self, consumer: str, group_ids: Sequence[str]) -> None:
        self._asked_acks.update((consumer, group_id) for group_id in group_ids)

        def sent(told: Acknowledged) -> None:
            for group_id in told.already:
                is_again = self._world.weather.is_bad or self._asked_acks[consumer, group_id] > 1
                self._world.must(is_again, f"{group_id} was acknowledged already when it was asked for first")
            for group_id in told.acknowledged:
                self._world.must(group_id not in self._acked, f"{group_id} was acknowledged for the second time")
                self._acked[group_id] = wall(self._world.loop.time())

        what = f"{consumer} acknowledges {group_ids}"
        await self._ordered(what, lambda process: _of(process).feed.acknowledge(consumer, self._run, group_ids), sent)

    async def _ordered(
        self,
        what: str,
        work: Callable[[Process], Coroutine[Any, Any, Any]],
        sent: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        return await ordered(self._world, what, work, sent, self._world.weather.patience_s)

    def _judge(self, given: Given, asked: float) -> None:
        """May the consumer have this group?"""
        must, name = self._world.must, given.group_id
        must(self._acked.get(name, given.at) >= given.at, f"{name} was acknowledged, and given again")
        of_group = [one for one in self._producers if one.config.group_id == name and one.config.parent is None]
        evaluations = {one.session_id for one in of_group if one.config.evaluation}
        must(not evaluations & given.attempts.keys(), f"{name} was given with {evaluations}")
        must(given.count == len(given.attempts.keys() - given.failed), f"the rewards of {given.count} count in {name}")
        advantages = given.advantages
        for row in given.rows:
            told, own = row["advantage"], advantages.get(row["rollout_id"])
            same = told == own or (told is not None and own is not None and abs(told - own) < ROUNDING)
            must(same, f"a row of {row['session_id']} has the advantage {told}, not {own}")
        known = {one.session_id for one in of_group} - evaluations
        created = {
            fact.session_id
            for fact in self._world.history.facts
            if fact.what == "created" and fact.session_id in known and fact.sent_at < asked
        }
        must(created <= given.attempts.keys(), f"{name} was given without {sorted(created - given.attempts.keys())}")
        must(len(given.attempts) >= self._sizes.get(name, 0), f"{name} was given before all attempts had arrived")
        for other in self._given[name]:
            first, second = sorted((other, given), key=lambda one: one.number)
            must(first.number < second.number, f"{name} was given twice with lease {given.number}")
            if first.number + 1 < second.number:
                continue  # A lease between them, which a consumer had anew, may have been shorter.
            is_own = first.consumer == second.consumer and not second.new_only
            is_over = second.at >= first.until - ROUNDING_S
            is_larger = first.attempts.keys() < second.attempts.keys()  # A rollout that begins ends the lease.
            is_renewed = any(  # That lease may be shorter than what was left of the first.
                first.at < other.at < second.at and other.consumer == first.consumer for other in self._given[name]
            )
            is_free = is_own or is_over or is_larger or is_renewed
            must(is_free, f"{name} was given to {second.consumer}, and {first.consumer} had it")

    def judge(self) -> None:
        """What the store says of all that was given."""
        for name, (consumer, _) in self._consumers().items():
            asked = (consumer, name) in self._asked_acks or name not in self._groups()
            self._world.must(asked, f"{name} is acknowledged by {consumer}, which did not ask for it")
        for given in (one for every in self._given.values() for one in every):
            for session_id, reward in given.attempts.items():
                log = self._world.store.log(session_id)
                closes = [one.event for one in log if isinstance(one.event, SessionClosed)]
                if session_id in given.failed:
                    has_failed = any(close.failed is not None for close in closes)
                    self._world.must(has_failed, f"{session_id} was given as failed, and is not")
                    continue
                rewards = [recorded.event.reward for recorded in log if isinstance(recorded.event, RewardAssigned)]
                closed = bool(closes)
                # Others give a second reward to the sessions of groups that are not the feed's own.
                whole = closed and reward in (rewards[-1:] if given.group_id in self._groups() else rewards)
                self._world.must(whole, f"{given.group_id} was given with {session_id}, which was not finished")
            there = {(row["session_id"], span["turn"]) for row in given.rows for span in row["turns"]}
            of_rollouts = [
                one.session_id for one in self._producers if {one.session_id, one.config.parent} & given.attempts.keys()
            ]
            told = {
                (one, turn.turn)
                for one in of_rollouts
                for turn in self._world.history.turns_of(one)
                if turn.turn in self._live_turns(one)
            }
            self._world.must(told <= there, f"{given.group_id} was given without {sorted(told - there)}")
            for problem in rows.problems(given.rows, self._world.history):
                self._world.history.problem(problem)

    def _live_turns(self, session_id: str) -> list[int]:
        """Without those that its client, which did not know of them, has rolled back."""
        session = fold(session_id, self._world.store.log(session_id))
        return [] if session is None or session.leaf is None else session.line(session.leaf.number)

    def _consumers(self) -> dict[str, tuple[str, float]]:
        """Who has acknowledged which group, and when."""
        query = select(groups.c.group_id, groups.c.consumer, groups.c.acked_at).where(
            groups.c.run == self._run, groups.c.acked_at.is_not(None)
        )
        found = self._world.store.read(lambda connection: connection.execute(query).all())
        return {row[0]: (str(row[1]), float(row[2])) for row in found}


class GroupingClient(Client):
    """The drill of groups, in which nothing fails: some are handed out, one of which lacks attempts."""

    async def drill(self) -> None:
        seed = self._rng.randrange(1 << 32)
        feeds = [Feed(self._world, seed, ("q1", "q2"), run) for run in RUNS]
        for feed in feeds:
            feed._add("q1", LATE)
        await asyncio.gather(*(feed.finish() for feed in feeds))
        for feed in feeds:
            feed.judge()
        await agreeing.groups_listed(self._world, self._process())


def draw(world: World, seed: int) -> list[Feed]:
    """One a run, in some schedules."""
    return [Feed(world, seed, run=run) for run in RUNS] if random.Random(f"has feed {seed}").random() < SHARE else []


def _given(line: dict[str, Any], consumer: str, lease_s: float, *, new_only: bool) -> Given:
    attempts = {one["session_id"]: one["reward"] for one in line["attempts"]}
    until = line["lease_until"]
    number = line["handed_out"]
    failed = frozenset(one["session_id"] for one in line["attempts"] if one["failed"] is not None)
    count = 0 if line["statistics"] is None else line["statistics"]["count"]
    lease = (number, consumer, new_only, until - lease_s, until)
    return Given(line["group_id"], *lease, attempts, failed, count, line["rows"])


def _of(process: Process) -> Groups:
    made: Groups = process.service.features["groups"]
    return made
