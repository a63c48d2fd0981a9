"""What must hold of archives: what left comes back as it was, or is erased for good, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Mapping
from typing import Literal, get_args

import msgspec
from sqlalchemy import Connection, func, select

from app.domain.events import SessionConfig, SessionErased
from app.domain.session import Session
from app.errors import AppError, PositionGone, SessionArchived, SessionClosed, SessionNotFound
from app.features.archive.rows import CONTENT
from app.features.archive.schema import archived
from app.features.resume.schema import staged_tokens
from app.sessions.all_events import EventQuery
from app.sessions.log_end import LogPosition, decode_position
from app.store.feed import Position
from app.store.schema import sessions, snapshots
from tests.tools.simulation.client import Client, GaveUp, TreeClient
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.keeper import LOOK_S, Keeper
from tests.tools.simulation.kills import Kill, while_killed
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

DEPARTURES = 0.15
"""How many schedules end with a drill of departures."""

ROOT, CHILD = "leaves", "leaves.child"

How = Literal["return", "erase away", "erase leaving", "erase returning"]
HOWS: tuple[How, ...] = (*get_args(How), "return")

SAID = ("reward", "turn_rewards", "annotations")

SAY_S = 0.02
"""About what it takes to write a file, and to let its sessions go."""


class Follower:
    """Reads the log of all sessions from where it was, through one process or another."""

    def __init__(self, world: World, keeper: Keeper) -> None:
        self.seen: list[tuple[str, int, str]] = []
        self._world = world
        self._keeper = keeper
        self._after: str | None = "end"

    async def read(self) -> bool:
        """What is new. Was the end reached?"""
        return await self._keeper.order("follows", self._read) is not None

    async def _read(self, process: Process) -> bool:
        try:
            async for piece in await process.service.all_events.start(EventQuery(after=self._after)):
                for line in piece.splitlines():
                    self._take(msgspec.json.decode(line))
        except PositionGone as error:
            self._world.history.problem(f"a follower of the log lost its place: {error}")
        return True

    def _take(self, line: dict[str, object]) -> None:
        before, self._after = self._after, str(line["position"])
        if before != "end":
            self._world.must(_place(before) <= _place(self._after), "the log was given in another order")
        if "seq" in line:
            self.seen.append((str(line["session_id"]), int(str(line["seq"])), str(line["type"])))


def _place(position: str | None) -> Position:
    decoded: LogPosition = decode_position(str(position), "the log")
    return decoded.place


class DepartureDrill:
    """A rollout is said things of, forked and closed; it leaves, and then it returns or is erased, by `how`."""

    def __init__(self, world: World, seed: int, keeper: Keeper, kill: Kill) -> None:
        self._world = world
        self._rng = random.Random(f"departures {seed}")
        self._keeper = keeper
        self._kill = kill
        self._follower = Follower(world, keeper)
        self._state = world.store.state

    async def run(self) -> None:
        """Never ends where something is never done."""
        how = self._rng.choice(HOWS)
        self._world.note(f"the drill of departures: {how}")
        await self._follow()
        await self._begin()
        await self._follow()
        before = {session_id: self._state(session_id) for session_id in (ROOT, CHILD)}
        keeper = self._keeper
        said = len(keeper.said.sent[ROOT])
        if how == "erase leaving":
            await self._while_killed(self._both(self._keeper.archive(), self._erase()))
        else:
            await self._while_killed(self._both(self._leave(), self._say_more()))
            await self._follow()
            await self._look_away()
        if how == "erase away":
            await self._while_killed(self._erase())
        elif how == "erase returning":
            await self._while_killed(self._both(self._return(), self._erase()))
        elif how == "return":
            await self._while_killed(self._both(self._return(), self._return()))
            for session_id, then in before.items():
                now = self._state(session_id)
                # What was said of it while it left is there if that was acknowledged, as `said` knows.
                is_same = len(keeper.said.sent[ROOT]) == said
                for what in ("status", "turns", *(SAID if is_same else ())):
                    same = getattr(now, what) == getattr(then, what)
                    self._world.must(same, f"{session_id}: {what} is not what it was when it left")
        await self._keeper.rest()
        await self._follow()
        self._judge(before, is_erased=how != "return")

    async def _begin(self) -> None:
        rng, world, keeper = self._rng, self._world, self._keeper
        kind = rng.choice((Client, TreeClient))
        root, child = (kind(world, session_id, session_id, Habits()) for session_id in (ROOT, CHILD))
        config = SessionConfig(rollback_window=1, history=kind.history)
        await self._done(root, config)
        await self._done(child, msgspec.structs.replace(config, parent=ROOT))
        for session_id in (ROOT, ROOT, CHILD):
            await keeper.say(self._state(session_id))
        await keeper.fork(self._state(ROOT))
        while self._head(ROOT) != "closed" or self._head(CHILD) != "closed" or not self._state(CHILD).has_roots_reward:
            await keeper.end(ROOT)
        await keeper.say(self._state(ROOT))

    async def _done(self, client: Client, config: SessionConfig) -> None:
        """Two turns, unless a janitor finds the session idle."""
        while True:
            try:
                await client.join(config)
                await client.turn()
                await client.turn()
                return
            except (SessionClosed, SessionNotFound):
                return
            except GaveUp:
                await asyncio.sleep(LOOK_S)

    async def _leave(self) -> None:
        while not self._lines("leaving", "archived"):
            await self._keeper.archive()
            await asyncio.sleep(LOOK_S)

    async def _say_more(self) -> None:
        """While it leaves."""
        for _ in range(self._rng.choice((0, 0, 2, 6))):
            await asyncio.sleep(self._rng.uniform(0, 4 * SAY_S))
            if self._head(ROOT) is not None:
                await self._keeper.say(self._state(ROOT))

    async def _return(self) -> None:
        while self._lines("leaving", "archived"):
            await self._keeper.bring_back(self._keeper.files())
            await asyncio.sleep(LOOK_S)

    async def _erase(self) -> None:
        while self._world.history.ended(ROOT) != "erased":
            await self._keeper.erase(ROOT)
            await asyncio.sleep(LOOK_S)

    async def _look_away(self) -> None:
        """Nothing of it is left in the database, its id is taken, and who asks for it is told where it is."""
        while self._lines("leaving"):
            await asyncio.sleep(LOOK_S)
        left = self._world.store.read(_left)
        self._world.must(not left, f"{ROOT} has left, and {left} still have rows of it")
        error = None
        while error is None:
            error = await self._keeper.order(
                "looks", lambda process: process.service.explained(SessionNotFound.of(ROOT))
            )
        self._world.must(isinstance(error, SessionArchived), f"{ROOT} is in a file, and its error is {error!r}")
        again = Client(self._world, "again", ROOT, Habits())
        try:
            await again._ask(lambda: again._create(SessionConfig(rollback_window=1)))
        except (AppError, Disconnected, TimeoutError):
            return
        self._world.history.problem(f"{ROOT} was created again, though it is in a file")

    async def _follow(self) -> None:
        while not await self._follower.read():
            await asyncio.sleep(LOOK_S)

    def _judge(self, before: Mapping[str, Session], *, is_erased: bool) -> None:
        """`before` they left followers had seen them so."""
        must, seen = self._world.must, self._follower.seen
        for session_id in (ROOT, CHILD):
            now = self._state(session_id)
            must((now.status == "erased") == is_erased, f"{session_id} is {now.status} after it left")
            told = [one for one in seen if one[0] == session_id]
            if is_erased:
                is_told = any(kind == SessionErased.__name__ for _, _, kind in told)
                must(is_told, f"followers were not told that {session_id} was erased")
            else:
                again = {one[1] for one in told if told.count(one) > 1}
                known = before[session_id].version - 1
                must(len(again) >= known, f"followers were told of {sorted(again)} when {session_id} returned")

    async def _while_killed(self, work: Awaitable[None]) -> None:
        await while_killed(self._world, self._rng, self._kill, work)

    async def _both(self, one: Awaitable[None], other: Awaitable[None]) -> None:
        await asyncio.gather(one, other)

    def _head(self, session_id: str) -> str | None:
        query = select(sessions.c.status).where(sessions.c.session_id == session_id)
        return self._world.store.read(lambda connection: connection.execute(query).scalar())

    def _lines(self, *states: str) -> bool:
        query = select(archived.c.file).where(archived.c.session_id == ROOT, archived.c.state.in_(states))
        return self._world.store.read(lambda connection: connection.execute(query).first()) is not None


def _left(connection: Connection) -> list[str]:
    tables = (*CONTENT, sessions, snapshots, staged_tokens)
    counts = (
        (table.name, select(func.count()).select_from(table).where(table.c.session_id == ROOT)) for table in tables
    )
    return [name for name, query in counts if connection.execute(query).scalar_one()]
