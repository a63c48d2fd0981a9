"""What must hold of gates once nothing fails any more: a pause is kept by all processes, and ends for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.domain.events import SessionConfig
from app.domain.fleet import Fleet, apply
from app.errors import SessionClosed
from app.store import fleet as store
from tests.tools.simulation.client import Client
from tests.tools.simulation.process import Process
from tests.tools.simulation.store import Store
from tests.tools.simulation.trainer import Trainer, pause, resume
from tests.tools.simulation.world import World

LEASE_S = 60.0
"""Longer than the drill."""

SEEN_S = 0.2
"""Within which every process has seen a pause, or looks again before it lets a turn pass."""

GATED_S = 2.0
"""How long a turn is watched that should be waiting."""

SESSION_ID = "drill"


class Drill:
    """A turn that is asked for while its gate is shut, of an adapter (`name`) or of all (None)."""

    def __init__(self, world: World, client: Client, name: str | None, trainer: Trainer) -> None:
        self._world = world
        self._client = client
        self._name = name
        self._trainer = trainer

    async def run(self, within_s: float) -> None:
        """Nothing is asked of an engine and no claim is held while the gate is shut; afterwards the turn is taken, and
        what an engine ends by itself is not continued.

        Raises SessionClosed where the janitor found the session idle.
        """
        await self._client.join(SessionConfig(rollback_window=1, adapter=self._name, on_abort="continue"))
        await self._trainer.insist("pause, for the drill", lambda p: pause(p, self._name, LEASE_S))
        await asyncio.sleep(SEEN_S)
        turn = asyncio.create_task(self._client.turn())
        await asyncio.sleep(GATED_S)
        self._world.must(
            not self._world.engines.begun[SESSION_ID], "a generation began although its gate was shut for all"
        )
        self._world.must(
            not self._world.store.has_claim(SESSION_ID),
            "a turn holds a claim although its gate was shut before it came",
        )
        closed = turn.exception() if turn.done() else None
        self._world.must(not turn.done() or isinstance(closed, SessionClosed), "a turn did not wait for its gate")
        await self._trainer.insist("resume, for the drill", lambda p: resume(p, self._name))
        _, late = await asyncio.wait({turn}, timeout=within_s)
        self._world.must(not late, f"a turn did not go on within {within_s:g} s after its gate was opened")
        if isinstance(closed, SessionClosed):
            raise closed
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        before, engines = self._world.engines.begun[SESSION_ID], self._world.engines
        engines.ordered[SESSION_ID] = "aborted"
        if await self._client.once(*self._client._new(self._client.messages)) is not None:
            self._world.must(
                engines.begun[SESSION_ID] == before + 1, "a turn was continued, and no gate was shut since it was sent"
            )
        self._world.must(not self._world.engines.paused, f"{self._world.engines.paused} were never told to go on")


def behind(stored: Store, processes: Sequence[Process]) -> list[str]:
    """The processes that know something else of the fleet than its log says."""
    said = Fleet()
    for placed in stored.read(store.state).events:
        said = apply(said, placed)
    return [process.name for process in processes if process.service.fleet.fleet != said]
