"""The drill of forks: one that nothing stands in the way of is made, and others while turns are taken, and while their
source is erased."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np

from app.domain.columns import Column
from app.domain.events import SessionConfig
from tests.tools.simulation.client import TRIES, Client
from tests.tools.simulation.keeper import Keeper

NEEDS = {"replay": ("routed_experts",)}
"""Settings without which a fork has little to copy."""

TURNS, ROUNDS, AT_ONCE = 4, 2, 2

SLOW_S, BRIEF_S = 0.05, 0.02
"""A transaction, and a generation: of what is read, much has changed when it is used."""


class ForkingClient(Client):
    def __init__(self, keeper: Keeper, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keeper = keeper

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1, history=self.history))
        for _ in range(TURNS):
            await self.turn()
        await self._say()
        fork_id = await self._fork(0.0)
        self._world.must(fork_id is not None, f"{self.session_id} was not forked")
        weather = self._world.weather
        weather.transaction_s, weather.engine_s = SLOW_S, BRIEF_S
        for _ in range(ROUNDS):
            await self._while_forked(self.turn())
        await self._while_forked(self.insist(self._erase, TRIES))
        weather.calm()

    async def _say(self) -> None:
        """A column of the newest turn."""
        leaf = self._world.store.state(self.session_id).leaf
        assert leaf is not None
        column = Column.of("output", np.arange(leaf.output_tokens, dtype=np.float32))
        said = await self._keeper._insist(
            lambda: self._keeper._say(self.session_id, leaf.number, "grade", column, None), TRIES
        )
        self._world.must(said is not None, f"nothing could be said of {self.session_id}")

    async def _while_forked(self, work: Awaitable[None]) -> None:
        delays = (self._rng.uniform(0, 4 * SLOW_S) for _ in range(AT_ONCE))
        await asyncio.gather(work, *(self._fork(delay_s) for delay_s in delays))

    async def _fork(self, delay_s: float) -> str | None:
        """After the newest turn that is there then."""
        await asyncio.sleep(delay_s)
        session = self._world.store.state(self.session_id)
        return None if session.leaf is None else await self._keeper.fork(session, session.leaf.number)
