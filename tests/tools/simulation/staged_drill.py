"""The drill of staged tokens: a turn whose processes and engines die is the one that nothing disturbs."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from app.domain.events import SessionConfig, TurnCommitted
from app.errors import AppError, SessionClosed, SessionNotFound
from tests.tools.simulation.client import Client, message_of
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.engine import Sample, digest
from tests.tools.simulation.kills import Kill
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.spelling import Message
from tests.tools.simulation.vllm import sampled, text_of

STAGED_SESSION = "staged"
DEATHS = (1, 2, 3, 5)

LONG = 15
"""Tokens of the reply at least."""

COME = (1, 4, 7)
"""How many tokens have come before a death: of the first chunk nothing may be written yet."""

GENERATION_S = 4.0
AGAIN_S, NEAR_S = 0.3, 0.05

WRITTEN_S = 0.1
"""More than it takes to write a row where nothing fails."""


class StagedClient(Client):
    """Asks for a turn again until it has it, while what serves it dies."""

    def __init__(self, kill: Kill, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kill = kill
        self._draws = random.Random(f"staged {seed}")
        self._named = ""
        self._whole: list[int] = []
        self._deaths: list[float] = []

    async def drill(self) -> None:
        """Never ends where the turn is never answered. Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1, on_abort="continue"))
        weather, before = self._world.weather, self._commits()
        engine_s, weather.engine_s = weather.engine_s, GENERATION_S
        messages: list[Message] = []
        while len(self._whole) < LONG:
            messages = [*self.messages, {"role": "user", "content": f"{self.name} {self._draws.random()}"}]
            self._named = digest(messages)
            self._whole = sampled(self._named)
        asked = asyncio.create_task(self._insist_on(messages))
        dying = asyncio.create_task(self._die())
        content = await asked
        dying.cancel()
        weather.engine_s = engine_s
        must, whole = self._world.must, text_of(self._whole)
        must(content == whole, f"a turn that outlived deaths says {content}, and undisturbed {whole}")
        must(self._commits() == before + 1, f"a turn that outlived deaths is there {self._commits() - before} times")
        if self._world.settings.stage_tokens_s:
            for died_at in self._deaths:
                must(not self._lost(died_at), f"{self._lost(died_at)} were generated again after {died_at:.3f}")

    async def _insist_on(self, messages: list[Message]) -> str:
        key, tries = self._draws.choice((None, "staged-key")), itertools.count()
        while True:
            tried = next(tries)
            turn = self._turn(key, None, retry_count=0 if key else tried)
            try:
                reply = await self._take(messages, messages[-1]["content"], key, turn)
            except (SessionClosed, SessionNotFound):
                raise
            except (AppError, Disconnected) as error:
                self._note(f"{self.name}: {type(error).__name__} {error}")
            else:
                if reply.turn is not None:
                    return str(message_of(reply)["content"])
            await asyncio.sleep(AGAIN_S)

    async def _die(self) -> None:
        """Once the generation goes on, again and again."""
        for _ in range(self._draws.choice(DEATHS)):
            least = self._samples() + self._draws.choice(COME)
            while self._samples() < least or self.asked is None:
                await asyncio.sleep(NEAR_S)
            await asyncio.sleep(self._draws.random() * self._draws.choice((0.1, GENERATION_S / 4)))
            process = self.asked
            if process is None:
                continue
            if self._draws.random() < 0.3:
                self._note("the engines die")
                self._world.engines.die()
            else:
                self._deaths.append(self._history.now())
                await self._kill(process)
                await self._end_another()

    async def _end_another(self) -> None:
        """Another session is closed, which has nothing to do with what is staged here."""
        another = Client(self._world, "beside", f"beside-{len(self._deaths)}", Habits())
        await another.join(SessionConfig(rollback_window=1))
        await another.close()

    def _lost(self, died_at: float) -> list[int]:
        """The places of tokens that a death cost although they were older than one interval, by the chunks that came
        after them: each of these makes a row due."""
        samples = {place: self._sampled(place) for place in range(len(self._whole))}
        ended = max((one.generation for of in samples.values() for one in of if one.at < died_at), default=0)
        cut = {place: one.at for place, of in samples.items() for one in of if one.generation == ended}
        chunks = [at for at in cut.values() if at < died_at - WRITTEN_S]
        staged = max(chunks, default=0.0) - max(self._world.settings.stage_tokens_s, WRITTEN_S)
        return [place for place, at in cut.items() if at < staged and samples[place][-1].at > died_at]

    def _sampled(self, place: int) -> list[Sample]:
        return self._world.engines.sampled[self._named, place]

    def _samples(self) -> int:
        return sum(len(self._sampled(place)) for place in range(len(self._whole)))

    def _commits(self) -> int:
        log = self._world.store.log(self.session_id)
        return sum(isinstance(recorded.event, TurnCommitted) for recorded in log)
