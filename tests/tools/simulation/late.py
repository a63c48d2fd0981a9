"""The drill of late attempts: each lies unread at its process until its retry was answered, behind a proxy."""

from __future__ import annotations

import asyncio

from app.domain.events import SessionConfig
from tests.tools.simulation.client import TRIES, Client, message_of
from tests.tools.simulation.spelling import results

LATE_S = 3.0
ROUNDS = 2


class LateClient(Client):
    """Has a linear session, and marks its retries."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1))
        self._world.weather.is_proxied = True
        for _ in range(ROUNDS):
            await self._late_turn()
            await self.turn()

    async def _late_turn(self) -> None:
        self._asked += 1
        logical = f"{self.name}.{self._asked}"
        messages = [*self.messages, *results(self.messages), {"role": "user", "content": logical}]
        late = asyncio.create_task(self._take(messages, logical, None, self._turn(None, None), unread_s=LATE_S))
        await asyncio.wait({late}, timeout=1.0)
        late.cancel()
        retries = (self._turn(None, None, retry_count=count) for count in range(1, TRIES + 1))
        reply = await self.insist(lambda: self._take(messages, logical, None, next(retries)), TRIES)
        self.messages = [*messages, message_of(reply)]
        await asyncio.sleep(LATE_S)
