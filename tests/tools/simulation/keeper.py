"""Who looks after sessions beside their clients: says things of them, forks, archives, returns and erases them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from sqlalchemy import Connection, select

from app.domain.columns import Column
from app.domain.events import AnnotationWritten, RewardAssigned
from app.domain.selection import Selection
from app.domain.session import Session, fold
from app.errors import AppError, SessionClosed, SessionNotFound
from app.features.annotations.annotations import Annotations
from app.features.archive.archive import Archive
from app.features.archive.schema import archived
from app.features.forks.forks import ForkOrder, Forks
from app.store.schema import sessions
from app.store.sessions import load_head
from tests.tools.simulation import copies, kept
from tests.tools.simulation.budgets import LimitedClient, LimitedTreeClient
from tests.tools.simulation.client import GaveUp
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.files import FOLDER
from tests.tools.simulation.kept import Kept
from tests.tools.simulation.process import Process, ordered
from tests.tools.simulation.said import Said, Told, Word
from tests.tools.simulation.world import World
from workers import codec

T = TypeVar("T")

KEPT = 0.4
"""How many schedules have a keeper in the storm."""

LOOK_S = 0.5

ANY_AGE_S = -36000.0
"""Clocks are off by hours."""

NAMES = ("note", "tags", "grade", "grade")

WORK = {"say": 6, "fork": 3, "archive": 3, "return": 2, "end": 1, "erase": 1}
"""How often a keeper does what."""


class Keeper:
    """Has an rng of its own. `forks` are the sessions that it has made, with their histories."""

    def __init__(self, world: World, seed: int) -> None:
        self.said = Said()
        self.kept = Kept(world)
        self.forks: dict[str, Session] = {}
        self._world = world
        self._rng = random.Random(f"keeper {seed}")
        self._numbers = 0

    async def work(self) -> None:
        """While the weather is bad."""
        lives = []
        while self._world.weather.is_bad:
            await asyncio.sleep(self._rng.expovariate(1.5))
            (what,) = self._rng.choices(list(WORK), list(WORK.values()))
            self.kept.look()
            match what:
                case "archive":
                    await self.archive()
                case "return":
                    await self.bring_back(self._rng.sample(files := self.files(), min(1, len(files))))
                case _ if (session := self._any()) is None:
                    continue
                case "say":
                    await self.say(session)
                case "fork" if (fork_id := await self.fork(session)) is not None and self._rng.random() < 0.5:
                    lives.append(asyncio.create_task(self.go_on(fork_id)))
                case "end":
                    await self.end(session.session_id)
                case "erase":
                    await self.erase(session.session_id)
        await asyncio.gather(*lives)

    async def rest(self) -> None:
        """Everything that left is brought back, erasures come to their end, and each fork goes on or has ended."""
        while self._away():
            await self.bring_back(self.files())
            await asyncio.sleep(LOOK_S)
        for fork_id in self.forks:
            await self.go_on(fork_id, insists=True)

    def judge(self) -> None:
        """What must hold at the end."""
        store, history = self._world.store, self._world.history
        self.kept.judge()
        found = store.read(lambda c: [*self.said.problems(c), *kept.traces(c, self._world.files, history)])
        for problem in found:
            history.problem(problem)

    async def say(self, session: Session) -> Told | None:
        """One word of a session or a turn, if it is acknowledged."""
        rng, session_id = self._rng, session.session_id
        turn = rng.choice((None, *(turn.number for turn in session.turns)))
        mark = self._mark(session_id)
        writer = rng.choice((None, mark))
        match rng.choice(("value", "value", "column", "remove", "reward", "reward")):
            case "reward":
                given: Any = RewardAssigned(rng.random(), {mark: 1.0} if rng.random() < 0.7 else {}, turn)
            case "column" if turn is not None:
                values = np.arange(session.turn(turn).output_tokens, dtype=np.float32)
                given = Column.of("output", values)
            case "remove":
                given = None
            case _:
                given = mark
        name = rng.choice(NAMES) if turn is None else "grade"
        return await self._insist(lambda: self._say(session_id, turn, name, given, writer), 3)

    async def _say(self, session_id: str, turn: int | None, name: str, given: Any, writer: str | None) -> Told | None:
        asked_at = self._world.history.now()
        word = _word(turn, name, given, writer)
        self.said.sent.setdefault(session_id, []).append(word)
        self._world.note(f"keeper says of {session_id}: {word}")

        def sent(seq: int | None) -> None:
            if seq is not None:
                self.said.told.append(Told(session_id, word, seq, asked_at, self._world.history.now()))

        async def say(process: Process) -> int | None:
            annotations: Annotations = process.service.features["annotations"]
            if isinstance(word, RewardAssigned):
                return await process.service.sessions.assign_reward(session_id, word.reward, word.components, turn)
            if given is None:
                await annotations.remove(session_id, turn, name, writer)
                return None
            value = [given] if name == "tags" and isinstance(given, str) else given
            return await annotations.write(session_id, turn, name, value, writer)

        await self.order(f"says of {session_id}", say, sent)
        told = self.said.told[-1:]
        return told[0] if told and told[0].word is word else None

    async def fork(self, session: Session, turn: int | None = None) -> str | None:
        """After this of its turns, or any; the fork's id if it is there."""
        rng, source_id = self._rng, session.session_id
        before = self._read(lambda connection: copies.stored(connection, source_id))
        if before is None or before.session.status == "erased" or not len(before.session.turns):
            return None
        self._numbers += 1
        fork_id = f"f{self._numbers}"
        self._world.spelling.fork(fork_id, source_id)
        turn = turn or rng.choice([turn.number for turn in before.session.turns])
        metadata = rng.choice((None, {"from": self._mark(fork_id)}))
        order = ForkOrder(source_id, turn, None, metadata, rng.random() < 0.5)

        def sent(_: str) -> None:
            after = self._read(lambda connection: copies.stored(connection, source_id))
            fork = self._read(lambda connection: copies.stored(connection, fork_id))
            if fork is None:
                self._world.history.problem(f"{fork_id} was made, and it is not there")
                return
            for difference in copies.differences(before, after, fork, turn):
                self._world.history.problem(f"{fork_id}, a fork of {source_id} after {turn}: {difference}")
            self.kept.look()
            self.forks[fork_id] = fork.session

        async def make(process: Process) -> str:
            forks: Forks = process.service.features["forks"]
            try:
                await forks.fork(order, [fork_id])
            except SessionNotFound:
                there = self._read(lambda connection: load_head(connection, source_id))
                is_erased = there is not None and there.status == "erased"
                self._world.must(not is_erased, f"{source_id} was not found for a fork, and is erased")
                raise
            return fork_id

        return await self._insist(lambda: self.order(f"forks {source_id} after {turn} as {fork_id}", make, sent), 3)

    async def go_on(self, fork_id: str, *, insists: bool = False) -> None:
        """A client takes a turn in a fork, unless it has ended."""
        client = self.client(fork_id)
        while True:
            try:
                await client._resync()
                await client.turn()
                return
            except (SessionClosed, SessionNotFound):
                return
            except GaveUp:
                if not insists or self._is_at_its_limit(fork_id):
                    return
                await asyncio.sleep(LOOK_S)

    def _is_at_its_limit(self, session_id: str) -> bool:
        """A fork has its source's limits."""
        session = fold(session_id, self._world.store.log(session_id))
        return session is not None and bool(session.reached)

    def client(self, session_id: str) -> LimitedClient:
        """Of a session that is there already. A fork has its source's limits, which may be used up."""
        self._numbers += 1
        kind = LimitedTreeClient if session_id in self.forks and self.forks[session_id].is_tree else LimitedClient
        return kind(self._world, f"k{self._numbers}", session_id, Habits())

    async def end(self, session_id: str) -> None:
        """Rewarded and closed, so that it may leave."""
        client = self.client(session_id)
        try:
            await client.insist(client._reward, 2)
            await client.close()
        except (AppError, GaveUp) as error:
            self._world.note(f"{session_id} was not ended: {error}")

    async def erase(self, session_id: str) -> None:
        client = self.client(session_id)
        try:
            await client.insist(client._erase, 2)
        except (AppError, GaveUp) as error:
            self._world.note(f"{session_id} was not erased: {error}")

    async def archive(self) -> None:
        """What may leave, leaves for a file."""
        await self.order("archives", lambda process: _archive(process).step(ANY_AGE_S, FOLDER, 10, None, Selection()))
        self.kept.look()

    async def bring_back(self, files: Iterable[str]) -> None:
        async def bring(process: Process, file: str) -> None:
            with process.service.inflight.reserve(peer="keeper") as memory:
                await _archive(process).bring_back(file, memory)

        for file in files:
            await self.order(f"returns {file}", partial(bring, file=file))
        self.kept.look()

    def files(self) -> list[str]:
        """Those that the index names."""
        query = select(archived.c.file).distinct().order_by(archived.c.file)
        return list(self._read(lambda connection: connection.execute(query).scalars()))

    def _away(self) -> bool:
        """Is a session in a file alone, or in one that it must leave?"""
        states = ("writing", "leaving", "archived", "erasing")
        query = select(archived.c.session_id).where(archived.c.state.in_(states)).limit(1)
        return self._read(lambda connection: connection.execute(query).first()) is not None

    def _any(self) -> Session | None:
        """Some session that is there, but no fork that has not been acknowledged."""
        query = select(sessions.c.session_id).order_by(sessions.c.session_id)
        ids = list(self._read(lambda connection: connection.execute(query).scalars()))
        ids = [one for one in ids if not one.startswith("f") or one in self.forks]
        if not ids:
            return None
        session_id = self._rng.choice(ids)
        return fold(session_id, self._world.store.log(session_id))

    def _mark(self, session_id: str) -> str:
        self._numbers += 1
        return f"of-{session_id}-{self._numbers}"

    def _read(self, function: Callable[[Connection], T]) -> T:
        return self._world.store.read(function)

    async def _insist(self, what: Callable[[], Coroutine[Any, Any, T | None]], tries: int) -> T | None:
        for _ in range(tries):
            if (done := await what()) is not None:
                return done
            await asyncio.sleep(self._rng.random())
        return None

    async def order(
        self,
        what: str,
        work: Callable[[Process], Coroutine[Any, Any, T]],
        sent: Callable[[T], None] = lambda _: None,
    ) -> T | None:
        """None where it is not known to be done."""
        return await ordered(self._world, f"keeper {what}", work, sent)


def _word(turn: int | None, name: str, given: Any, writer: str | None) -> Word:
    """As the log has it."""
    match given:
        case RewardAssigned():
            return given
        case Column():
            return AnnotationWritten(name, turn, column=given.ref(codec.pack(given)), size=given.size, writer=writer)
        case None:
            return AnnotationWritten(name, turn, writer=writer)
    value = [given] if name == "tags" else given
    return AnnotationWritten(name, turn, value, size=len(msgspec.json.encode(value)), writer=writer)


def _archive(process: Process) -> Archive:
    archive: Archive = process.service.features["archive"]
    return archive
