"""What must hold of checkpoints: a store that is taken back is what it was, whoever dies while that is done."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, select

from app.composition import store_points
from app.domain import fleet
from app.domain.events import SessionConfig
from app.domain.patterns import ALL_RUNS
from app.domain.session import Session
from app.errors import AppError
from app.features.checkpoints import operations as store
from app.features.checkpoints.checkpoints import Checkpoints
from app.features.checkpoints.schema import checkpoint_sessions
from app.store import fleet as fleet_store
from app.store import pins
from tests.tools.simulation import orders
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.kills import Kill, while_killed
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.trainer import Trainer
from tests.tools.simulation.world import World

T = TypeVar("T")

NAME = "drill"

ANOTHER = "after-the-cut"

AGAIN_S = 0.5

LONG_S = 2.0
"""How long a generation takes that a restore meets."""

SLOW_S = 0.3
"""How long a transaction takes while the cut is made, so that what it meets is not done yet."""


class CheckpointDrill:
    """A cut, turns and rewards after it, a restore, and one of what was before; processes die in all of them."""

    def __init__(
        self,
        world: World,
        seed: int,
        clients: Sequence[Client],
        trainer: Trainer,
        kill: Kill,
    ) -> None:
        self._world = world
        self._rng = random.Random(f"checkpoints {seed}")
        self._clients = clients
        self._trainer = trainer
        self._kill = kill

    async def run(self) -> None:
        """Never ends where a restore is never finished."""
        drain_s = self._rng.choice((None, None, 30.0))
        if isinstance(self._world.store, PostgresStore):  # In memory the cut is one moment.
            self._world.weather.transaction_s = SLOW_S
            using = asyncio.create_task(self._use())
            await self._while_killed(self._make(drain_s))
            await using
            self._world.weather.calm()
        else:
            await self._while_killed(self._make(drain_s))
        at_cut = self._states(NAME)
        await self._use()
        with contextlib.suppress(AppError, GaveUp, Disconnected):
            await self._make_another()
        orders.judge(self._world.store, self._world.history)
        await self._while_killed(self._restore(NAME))
        self._compare(NAME, at_cut)
        self._must_be_undone()
        [before] = [one.name for one in self._made() if one.restores == NAME][-1:]
        replaced = self._states(before)
        await self._use()
        self._world.weather.engine_s = LONG_S
        using = asyncio.create_task(self._use())
        await self._while_killed(self._restore(before))
        self._world.weather.calm()
        await using
        if self._rng.random() < 0.5:
            await self._while_killed(self._restore(before))
            self._compare(before, replaced)

    async def _make_another(self) -> None:
        """A session that was not there at the cut, with a turn that is rewarded."""
        another = Client(self._world, ANOTHER, ANOTHER, Habits())
        await another.join(SessionConfig(rollback_window=1))
        await another.turn()
        process = self._world.pick()
        if process is not None:
            reward = process.service.sessions.assign_reward
            await process.call(lambda: reward(ANOTHER, 1.0, {}, 1), lambda _: None)

    def _must_be_undone(self) -> None:
        if self._world.store.log(ANOTHER):
            now = self._world.store.state(ANOTHER)
            is_bare = not now.turns.count and not now.turn_rewards and now.reward is None
            self._world.must(now.status != "undone" or is_bare, f"{ANOTHER} was undone, and has turns or rewards")

    async def _while_killed(self, work: Awaitable[None]) -> None:
        await while_killed(self._world, self._rng, self._kill, work)

    async def _make(self, drain_s: float | None) -> None:
        while not any(one.name == NAME for one in self._made()):
            await self._trainer.order(NAME, lambda process: _of(process).make(ALL_RUNS, NAME, drain_s=drain_s))
            await asyncio.sleep(AGAIN_S)
        await self._freed()

    async def _restore(self, name: str) -> None:
        before = len(self._made())
        while len(self._made()) == before:
            await self._trainer.order(f"restore {name}", lambda process: _of(process).restore(ALL_RUNS, name))
            await asyncio.sleep(AGAIN_S)
        await self._freed()
        self._world.history.restored()

    async def _freed(self) -> None:
        """Turns are not held for longer than it takes to find out that a process is dead."""
        while self._read(_is_held):
            await asyncio.sleep(AGAIN_S)

    def _made(self) -> list[store.Checkpoint]:
        return [one for one in self._read(store.every) if one.state == "made"]

    async def _use(self) -> None:
        """Clients go on from what they know, and some reward or end their sessions."""
        await asyncio.gather(*(self._go_on(client) for client in self._clients))

    async def _go_on(self, client: Client) -> None:
        what = self._rng.choice(("turn", "turn", "reward", "close"))
        try:
            await client.turn(tries=2)
            if what == "reward":
                await client.insist(client._reward, 2)
            elif what == "close":
                await client.close()
        except (AppError, GaveUp, Disconnected) as error:
            self._world.note(f"{client.name}: {type(error).__name__} {error}")

    def _states(self, name: str) -> dict[str, Session]:
        """The sessions as they were at a checkpoint, by their logs."""
        return {
            session_id: self._world.store.state(session_id, seq)
            for session_id, seq in self._read(lambda c: _rows(c, name))
        }

    def _compare(self, name: str, expected: dict[str, Session]) -> None:
        for session_id, then in expected.items():
            now = self._world.store.state(session_id)
            if now.status == "erased":
                continue
            # What a root's reward or close had not reached at the cut, it reaches after the restore.
            is_finished = now.has_roots_reward and not then.has_roots_reward
            # Since the restore it, or its root, may have been idle for too long.
            is_idle = self._world.settings.idle_close_s is not None and (then.status, now.status) == ("open", "closed")
            compared = ["turns", "turn_rewards"]
            compared += [*([] if is_idle else ["status"]), *([] if is_finished else ["reward"])]
            for what in compared:
                same = getattr(now, what) == getattr(then, what)
                self._world.must(same, f"{session_id}: {what} is not what it was at checkpoint {name}")
            lost = then.payloads.keys() - now.payloads.keys()
            self._world.must(not lost, f"{session_id}: the payloads of turns {sorted(lost)} were not kept for {name}")
            read = partial(pins.read_pinned_upto, points=store_points(), session_id=session_id)
            pinned = self._read(read)
            self._world.must(pinned >= then.version, f"{session_id} is not pinned by checkpoint {name}")

    def _read(self, function: Callable[[Connection], T]) -> T:
        return self._world.store.read(function)


def _is_held(connection: Connection) -> bool:
    return fleet.fold(fleet_store.state(connection).events).held != {}


def _rows(connection: Connection, name: str) -> list[tuple[str, int]]:
    found = store.named(connection, ALL_RUNS, name)
    assert found is not None
    columns = checkpoint_sessions.c.session_id, checkpoint_sessions.c.seq
    query = select(*columns).where(checkpoint_sessions.c.checkpoint_id == found.id)
    return [(row[0], row[1]) for row in connection.execute(query)]


def _of(process: Process) -> Checkpoints:
    checkpoints: Checkpoints = process.service.features["checkpoints"]
    return checkpoints
