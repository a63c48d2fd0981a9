"""The drill of aborted generations: a gate shuts in the middle of each, and the session's policy says what becomes of
the turn."""

from __future__ import annotations

import asyncio

from app.domain.events import OnAbort, SessionConfig, TurnCommitted
from app.errors import AppError, GenerationAborted, SessionClosed, SessionNotFound
from app.turn.in_flight import TurnReply
from tests.tools.simulation.client import Client
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.trainer import Trainer, pause, resume

POLICIES: tuple[OnAbort | None, ...] = ("continue", "return", "fail", None)

LEASE_S, LONG_S, BEGUN_S = 60.0, 30.0, 1.0
AGAIN_S, LOOK_S = 0.5, 0.02


class AbortedClient(Client):
    """Has a session of each policy."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        trainer, name = Trainer(self._world), self.session_id
        for policy in POLICIES:
            self.session_id, self.messages = f"{name}.{policy}", []
            await self.join(SessionConfig(rollback_window=1, history=self.history, on_abort=policy))
            await self._abort(trainer, policy or self._world.settings.abort_policy)

    async def _abort(self, trainer: Trainer, policy: OnAbort) -> None:
        """Nothing is judged where the generation came to its end before."""
        weather, engines = self._world.weather, self._world.engines
        engine_s, weather.engine_s = weather.engine_s, LONG_S
        aborted = engines.aborted
        turn = asyncio.create_task(self._one_turn())
        while not engines.begun[self.session_id] and not turn.done():
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(BEGUN_S)
        await trainer.insist("pause, for an abort", lambda process: pause(process, None, LEASE_S))
        weather.engine_s = engine_s
        await trainer.insist("resume, for an abort", lambda process: resume(process, None))
        told = await turn
        if engines.aborted == aborted:
            return
        log = self._world.store.log(self.session_id)
        reasons = [one.event.finish_reason for one in log if isinstance(one.event, TurnCommitted)]
        match policy:
            case "fail":
                good = isinstance(told, GenerationAborted) and not reasons
            case "return":
                good = reasons == ["abort"]
            case "continue":
                good = reasons == ["stop"]
        self._world.must(good, f"{self.session_id}: a turn was aborted, has ended as {reasons}, and was told {told!r}")

    async def _one_turn(self) -> TurnReply | AppError:
        """The reply, or why there is none."""
        self._asked += 1
        logical = f"{self.name}.{self._asked}"
        while True:
            try:
                return await self._take([{"role": "user", "content": logical}], logical, None, self._turn(None, None))
            except GenerationAborted as error:
                return error
            except (SessionClosed, SessionNotFound):
                raise
            except (AppError, Disconnected) as error:
                self._note(f"{self.name}: {type(error).__name__} {error}")
                await asyncio.sleep(AGAIN_S)
