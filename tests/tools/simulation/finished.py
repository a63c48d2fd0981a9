"""The drill of a finish: the turn in flight is waited for, and no process begins another, whatever it has cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from app.domain.events import SessionConfig
from app.domain.session import Session
from app.errors import AlreadyFinished, AppError, SessionClosed, SessionNotFound
from app.turn.in_flight import TurnReply
from tests.tools.simulation.client import Client, message_of
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.spelling import results

T = TypeVar("T")

FINISHED = 0.3
"""How many schedules have this drill."""

WAIT_S = 60.0
AGAIN_S = 0.5


class FinishingClient(Client):
    """Takes its turns at one process, which is told nothing of the finish by another one."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1, history=self.history))
        await self._insist("before")
        turn = asyncio.create_task(self._insist("meanwhile"))
        await asyncio.sleep(2 * self._rng.random() * self._world.weather.engine_s)
        finish = asyncio.create_task(self._until(self._finish))
        await asyncio.sleep(self._rng.random() * self._world.weather.engine_s)
        await self._until(self._reward)  # It wakes the finish, which has still to wait.
        session = await finish
        self._world.must(not session.open_turns, f"{self.name} was finished, and a turn is in flight")
        try:
            await turn
        except AlreadyFinished:
            self._note("the finish came first")
        try:
            await self._insist("afterwards")
        except AlreadyFinished:
            return
        self._history.problem(f"{self.name} was finished, and took another turn")

    async def _insist(self, said: str) -> None:
        """A turn, asked for until it is answered. Raises AlreadyFinished, SessionClosed, SessionNotFound."""
        messages = [*self.messages, *results(self.messages), {"role": "user", "content": said}]

        async def take() -> TurnReply:
            return await self._take(messages, said, said, self._turn(said, None))

        reply = await self._until(take)
        while reply.turn is None:  # the engine's own error
            reply = await self._until(take)
        self.messages = [*messages, message_of(reply)]

    async def _finish(self) -> Session:
        process = self._world.pick()
        if process is None:
            raise Disconnected("nobody listens")
        finish = process.service.sessions.finish
        self._note(f"{self.name} is finished by way of {process.name}")
        return await process.call(
            lambda: finish(self.session_id, producer_finished=True, wait_s=WAIT_S), lambda _: None
        )

    async def _until(self, work: Callable[[], Coroutine[None, None, T]]) -> T:
        """Whatever is left of the storm may fail it."""
        while True:
            try:
                return await work()
            except (AlreadyFinished, SessionClosed, SessionNotFound):
                raise
            except (AppError, Disconnected) as error:
                self._note(f"{self.name}: {type(error).__name__} {error}")
            await asyncio.sleep(AGAIN_S)
