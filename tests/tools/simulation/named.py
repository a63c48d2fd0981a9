"""Trajectories whose sessions' names come again in each epoch, at processes that die, freeze and hear of it late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection

from app.composition import store_points
from app.domain.events import DEFAULT_RUN, TurnCommitted
from app.errors import AppError
from app.store.content import load_messages
from app.store.sessions import generations, load_events
from tests.tools.simulation.asgi import Answer, Requests
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.spelling import Message
from tests.tools.simulation.world import World

T = TypeVar("T")

SHARE = 0.6
"""Of all schedules in which no session is closed for being idle: that would end a name for good."""

RUNS = ("exp-1", None)
"""Each has its own sessions of the name, and its own turns of the keys."""

NAME = "task-1"
PATH = "/v1/chat/completions"
TURNS = 2
AGAIN_S = 0.5


def trajectories(world: World, seed: int) -> list[Trajectory]:
    """Drawn apart from all else in a schedule."""
    rng = random.Random(f"names {seed}")
    if rng.random() > SHARE or world.settings.idle_close_s is not None:
        return []
    requests = Requests(world.history.now)
    return [Trajectory(world, rng, requests, run) for run in RUNS[: rng.choice((1, 2))]]


class Trajectory:
    """Two turns an epoch, each with a key of its own, and an end. In the next epoch a request of the last may come
    again, and the first one twice at once: one of them begins the session, or the other."""

    def __init__(self, world: World, rng: random.Random, requests: Requests, run: str | None) -> None:
        self._world = world
        self._rng = rng
        self._requests = requests
        self._run = run
        self._name = f"{NAME} of {run}"
        self._told: list[list[str]] = []

    async def live(self) -> None:
        for epoch in range(1, self._rng.choice((2, 3, 4)) + 1):
            replies: list[str] = []
            messages: list[Message] = []
            for turn in range(1, TURNS + 1):
                await asyncio.sleep(self._rng.expovariate(2.0))
                messages = [*messages, self._said(epoch, turn)]
                at_once = self._rng.choice((1, 1, 2))
                replies += await self._same([self._turn(messages, epoch, turn) for _ in range(at_once)])
                messages = [*messages, {"role": "assistant", "content": replies[-1]}]
                if epoch > 1 and self._rng.random() < 0.5:
                    again = await self._turn([self._said(epoch - 1, 1)], epoch - 1, 1)
                    self._world.must(again == self._told[-1][0], f"a late retry of {self._name} got another reply")
            # A finish that comes late would end the next epoch: nobody gives one up.
            await self._until(self._finished, patience_s=None)
            self._told.append(replies)

    async def _same(self, attempts: Sequence[Awaitable[str]]) -> list[str]:
        """The one reply of all attempts."""
        found = list(dict.fromkeys(await asyncio.gather(*attempts)))
        self._world.must(len(found) == 1, f"attempts with one key of {self._name} got different replies")
        return found[:1]

    def _said(self, epoch: int, turn: int) -> Message:
        return {"role": "user", "content": f"{self._name} {epoch} {turn}"}

    async def _turn(self, messages: Sequence[Message], epoch: int, turn: int) -> str:
        """What it says: the payloads of an epoch that is over may be gone."""
        headers = {"x-session-id": NAME, "idempotency-key": f"{epoch} {turn}"}
        headers |= {} if self._run is None else {"x-turnlog-run": self._run}
        body: dict[str, Any] = {"model": "simulated", "messages": messages}
        refusals = (404, 422)

        async def asked(process: Process) -> str | None:
            answer: Answer = await self._requests.turn(process, PATH, headers, body)
            self._world.note(f"{self._said(epoch, turn)['content']} is answered {answer.status} by {process.name}")
            self._world.must(answer.status not in refusals, f"{headers} is refused: {answer.body[:200]!r}")
            return _content(answer.body) if answer.status == 200 else None

        return await self._until(asked, self._world.weather.patience_s)

    async def _finished(self, process: Process) -> bool:
        async def finish() -> bool:
            await process.service.names.finish(self._run, NAME)
            return True

        self._world.note(f"{self._name} is to be finished, by way of {process.name}")
        return await process.call(finish, lambda _: None)

    async def _until(self, asked: Callable[[Process], Awaitable[T | None]], patience_s: float | None) -> T:
        """Ask one process after another until one answers."""
        while True:
            process = self._world.pick()
            if process is not None:
                try:
                    async with asyncio.timeout(patience_s):
                        if (found := await asked(process)) is not None:
                            return found
                except (AppError, Disconnected, TimeoutError) as error:
                    self._world.note(f"{self._name}: {type(error).__name__} {error}")
            await asyncio.sleep(AGAIN_S)

    def judge(self) -> None:
        """Each epoch has a session of its own, with its turns and no others. An attempt that its client has given up
        may have begun the next one, and found its reply in the last."""
        found = self._world.store.read(self._stored)
        if found[-1:] == [[]]:
            found.pop()
        told = self._told
        self._world.must(found == told, f"the generations of {self._name} have {found}, and were told {told}")

    def _stored(self, connection: Connection) -> list[list[str]]:
        """Of each generation the replies, by what was asked."""
        found = []
        for one in reversed(generations(connection, store_points(), self._run or DEFAULT_RUN, NAME)):
            log = load_events(connection, one.session_id)
            turns = [recorded.event.turn for recorded in log if isinstance(recorded.event, TurnCommitted)]
            stored = load_messages(connection, one.session_id, turns).values()
            found.append([msgspec.json.decode(turn.message)["content"] for turn in stored])
            for turn in stored:
                asked = msgspec.json.decode(turn.messages[-1])["content"]
                is_own = asked.startswith(f"{self._name} {one.number} ")
                self._world.must(is_own, f"{asked} is in generation {one.number}")
        return found


def _content(reply: bytes) -> str:
    return str(msgspec.json.decode(reply)["choices"][0]["message"]["content"])
