"""The drill of limits: each ends what it should, nothing before it and at once; a session's GET says what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from app.domain.events import LimitName, Limits, SessionConfig
from app.errors import AppError, OverBudget, SessionBusy, SessionClosed, SessionNotFound
from app.features.budgets.budgets import ABORT_S
from tests.tools.simulation.agreeing import asked
from tests.tools.simulation.client import TreeClient, message_of
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.spelling import Message, results

SLOW_S, NEVER_S = 5.0, 1e6
"""What a generation takes during which others are asked for, and one that its limit ends."""

SECONDS = 3.0
AGAIN_S, LOOK_S = 0.5, 0.02


class SpendingClient(TreeClient):
    """Has one session after the other, each of which comes to its limits. Stays at one process: clocks differ."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self._begin("tokens", Limits(tokens=1), "error")
        await self._meanwhile_busy()
        await self._refused("tokens")
        await self._says("tokens", {"turns": 0, "tokens": 1}, {"tokens": 0})
        await self._begin("turns", Limits(turns=2, context=4), "length")
        for _ in range(2):
            await self._try([])
        await self._refused("context")
        self.messages = []
        await asyncio.gather(*(self._refused("turns") for _ in range(3)))
        await self._says("turns", {"turns": 2}, {"turns": 0})
        await self._begin("seconds", Limits(seconds=SECONDS), "length")
        await self._ends_in_time()

    async def _begin(self, name: str, limits: Limits, on_limit: Any) -> None:
        self.session_id, self.messages = f"spending.{name}", []
        await self.join(SessionConfig(rollback_window=1, history="tree", limits=limits, on_limit=on_limit))

    async def _try(self, before: list[Message]) -> AppError | None:
        """One more turn, after which the client goes on; the error if a limit stands in its way."""
        self._asked += 1
        logical = f"{self.name}.{self._asked}"
        messages = [*before, *results(before), {"role": "user", "content": logical}]
        while True:
            try:
                reply = await self._take(messages, logical, None, self._turn(None, None))
            except (OverBudget, SessionBusy) as error:
                return error
            except (SessionClosed, SessionNotFound):
                raise
            except (AppError, Disconnected) as error:
                self._note(f"{self.name}: {type(error).__name__} {error}")
                await asyncio.sleep(AGAIN_S)
            else:
                self.messages = [*messages, message_of(reply)]
                return None

    async def _refused(self, limit: LimitName) -> None:
        error = await self._try(self.messages)
        same = isinstance(error, OverBudget) and error.limit == limit
        self._must(same, f"nothing is left of its {limit}, and a turn was told {error!r}")

    async def _meanwhile_busy(self) -> None:
        """What a turn in flight has reserved is not used up: another is told to come again, and at once."""
        weather = self._world.weather
        engine_s, weather.engine_s = weather.engine_s, SLOW_S
        first = asyncio.create_task(self._try([]))
        while not self._world.store.has_claim(self.session_id) and not first.done():
            await asyncio.sleep(LOOK_S)
        weather.engine_s = engine_s
        error = await self._try([])
        is_told = isinstance(error, SessionBusy) and error.retry
        self._must(is_told or first.done(), f"all is reserved, and another turn was told {error!r}")
        ended = await first
        self._must(isinstance(ended, OverBudget) and ended.sampled == 1, f"its only token was sampled: {ended!r}")

    async def _ends_in_time(self) -> None:
        """An engine that is told to end a generation gives its tokens back at once."""
        weather, began = self._world.weather, self._history.now()
        engine_s, weather.engine_s = weather.engine_s, NEVER_S
        await self._try([])
        weather.engine_s = engine_s
        took = self._history.now() - began
        self._must(took < SECONDS + ABORT_S / 2, f"a turn ended {took:.1f} s after it began, and had {SECONDS:g} s")
        await self._refused("seconds")

    async def _says(self, limit: LimitName, used: Mapping[str, int], left: Mapping[str, int]) -> None:
        """So its GET tells of its limits."""
        process = self._process()

        async def fields() -> dict[str, Any]:
            session = (await process.service.sessions.require(self.session_id)).session
            found: dict[str, Any] = {}
            for one in process.service.session_fields:
                found |= await one(session)
            return found

        said = await asked(self._world, process, fields)
        if said is None:
            return
        [budget] = said.get("budgets") or [{"used": {}, "left": None}]
        same = said.get("limit") == limit and budget["left"] == left and used.items() <= budget["used"].items()
        self._must(same, f"it says {said}")

    def _must(self, good: bool, what: str) -> None:
        self._world.must(good, f"{self.session_id}: {what}")
