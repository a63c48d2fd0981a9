"""Session control in a schedule: which names clients use and how, and what must hold of them once nothing fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import select

from app.domain.control import SessionControl
from app.domain.events import SessionConfig
from app.features.session_control.affinities import Use
from app.features.session_control.schema import affinities
from app.settings import ALL
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.process import Process
from tests.tools.simulation.store import Store
from tests.tools.simulation.world import World

NAMES = (None, "n1", "n1", "n2")
"""What a session's turns name, for all of its clients; sessions may share one."""

LOOK_S, NEAR_S = 0.5, 0.01

CONTROL_SESSION = "control-drill"
DRILL_NAME = "drill-name"
CUT_OFF = "cut-off"
DRILL_S = 300.0
"""Longer than the drill: nothing expires meanwhile."""


How = Literal["close", "delete", "kill"]
HOWS: tuple[How, ...] = get_args(How)


class Wishes:
    """Drawn apart from all else in a schedule; a turn that is asked for again asks for the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = random.Random(f"session control {seed}")
        self.engine_sessions: tuple[str, ...] = rng.choice(((), ALL, ALL, ALL, ("http://engine-1",)))
        self._uses = rng.choice((0.0, 0.5, 0.9, 0.9))

    def name(self, session_id: str) -> str | None:
        return random.Random(f"{self._seed} {session_id}").choice(NAMES) if self._uses else None

    def of(self, session_id: str, logical: str) -> dict[str, Any] | None:
        """`nvext.session_control` of a turn; None where it has none."""
        name, rng = self.name(session_id), random.Random(f"{self._seed} {logical}")
        if name is None or rng.random() > self._uses:
            return None
        wish: dict[str, Any] = {"session_id": name, "timeout": rng.choice((None, 1, 5, 60))}
        return {**wish, "action": rng.choice(("open", "open", "close", "bind", None))}


class Row(msgspec.Struct, frozen=True):
    """A name as the store has it."""

    engine: str
    state: str
    worker_session: bool


def rows(store: Store) -> dict[str, Row]:
    columns = (affinities.c.control_id, *(affinities.c[name] for name in Row.__struct_fields__))
    found = store.read(lambda connection: connection.execute(select(*columns)).all())
    return {row[0]: Row(row[1], row[2], bool(row[3])) for row in found}


async def _until(good: Callable[[], bool], look_s: float = LOOK_S) -> None:
    while not good():
        await asyncio.sleep(look_s)


async def settled(store: Store) -> None:
    """Nobody is at work on a name: what dead processes left is ended, though no client asks for it any more."""
    await _until(lambda: all(row.state == "bound" for row in rows(store).values()))


async def cut_off(world: World, serving: Sequence[Process]) -> None:
    """A turn of each process was cut off while it asked for a name: the process does not know that it has it."""
    for process in serving:
        control = SessionControl(f"{CUT_OFF} {process.name}", "open")
        engine, lease_s = "http://engine-1", world.settings.lease_s
        asked = Use(control, CONTROL_SESSION, process.incarnation, lease_s, engine, frozenset({engine}))
        await process.service.writer.submit(asked)
    await _until(lambda: not any(name.startswith(CUT_OFF) for name in rows(world.store)))


class ControlDrill:
    """A session opens a name and uses it, and then it ends: by a turn that closes it, or because the session is closed.

    Or the process dies (`kill` it) in the middle of the turn that closes it.
    """

    def __init__(self, world: World, client: Client, how: How, kill: Callable[[Process], Awaitable[None]]) -> None:
        self._world = world
        self._client = client
        self._how = how
        self._kill = kill

    async def run(self) -> None:
        """Never ends where the name is never ended. Raises SessionClosed."""
        await self._client.join(SessionConfig(rollback_window=1))
        await self._turn("open")
        row = rows(self._world.store).get(DRILL_NAME)
        if row is None:
            self._world.history.problem("a name that was opened is bound to nothing")
            return
        self._world.must(row.state == "bound", f"a name that was opened is {row.state}")
        self._world.must(row.worker_session == self._is_held(row), f"the store says {row}, and its engine otherwise")
        await self._turn(None)
        self._world.must(self._at() == row.engine, f"a turn that names {row.engine} went to {self._at()}")
        before, begun = self._told(row), self._world.engines.begun[self._client.session_id]
        if self._how == "delete":
            await self._client.close()
        elif self._how == "close":
            await self._turn("close")
            self._world.must(self._at() == row.engine, f"a turn that closes {row.engine} went to {self._at()}")
        else:
            await self._die_closing()
        await _until(lambda: DRILL_NAME not in rows(self._world.store) and not self._is_held(row))
        told = self._told(row) - before
        is_judged = self._how != "kill" and self._world.engines.begun[self._client.session_id] <= begun + 1
        self._world.must(not is_judged or told <= 1, f"{row.engine} was told {told} times that {DRILL_NAME} has ended")

    async def _die_closing(self) -> None:
        before = self._world.engines.begun[self._client.session_id]
        turn = asyncio.create_task(self._turn("close"))
        await _until(lambda: self._world.engines.begun[self._client.session_id] > before, NEAR_S)
        if self._client.asked is not None:
            await self._kill(self._client.asked)
        await turn

    async def _turn(self, action: str | None) -> None:
        """Whatever is left of the storm may fail one. Raises SessionClosed."""
        self._client.control = {"session_id": DRILL_NAME, "action": action, "timeout": DRILL_S}
        while True:
            try:
                return await self._client.turn()
            except GaveUp:
                await asyncio.sleep(LOOK_S)

    def _at(self) -> str:
        return f"http://{self._world.engines.last[self._client.session_id]}"

    def _told(self, row: Row) -> int:
        return self._world.engines.closed[row.engine.removeprefix("http://"), DRILL_NAME]

    def _is_held(self, row: Row) -> bool:
        return self._world.engines.holds(row.engine.removeprefix("http://"), DRILL_NAME)
