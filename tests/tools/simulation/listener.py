"""A client of live streams: what it hears before the commit, and that nothing is final before that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from sqlalchemy import Connection

from app.domain.events import SessionConfig, TurnCommitted
from app.errors import AppError, SessionExists
from app.sessions.lifecycle import NewSession
from app.store.content import load_messages
from app.store.sessions import load_events
from tests.tools.simulation.asgi import Answer, Requests
from tests.tools.simulation.engine import digest
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.spelling import Message
from tests.tools.simulation.vllm import sampled, text_of
from tests.tools.simulation.world import World

SESSION_ID = "heard"
PATH = f"/sessions/{SESSION_ID}/v1/chat/completions"
TURNS, AGAIN_S = (2, 3, 4), 0.5
FINAL = b"data: [DONE]", b'"finish_reason":"stop"', b'"finish_reason":"abort"'


def listeners(world: World, seed: int) -> list[Listener]:
    """One where engines stream with ids, and no session is closed for being idle."""
    is_live = world.settings.upstream_dialect == "vllm" and world.settings.idle_close_s is None
    return [Listener(world, random.Random(f"live {seed}"))] if is_live else []


class Listener:
    """Asks for each turn with a key until it has heard one to its end."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._requests = Requests(world.history.now)
        self._final: list[str] = []

    async def live(self) -> None:
        messages: list[Message] = []
        for number in range(1, self._rng.choice(TURNS) + 1):
            messages = [*messages, {"role": "user", "content": f"{SESSION_ID} {number}"}]
            while (said := await self._ask(messages, f"{SESSION_ID} {number}")) is None:
                await asyncio.sleep(AGAIN_S)
            messages = [*messages, {"role": "assistant", "content": said}]

    async def _ask(self, messages: list[Message], key: str) -> str | None:
        """What one attempt heard; None where that was not final."""
        process, whole, answer = self._world.pick(), text_of(sampled(digest(messages))), Answer()
        if process is None:
            return None

        def heard(so_far: Answer) -> None:
            nonlocal answer
            answer = so_far
            said, is_final = "".join(_deltas(answer.body)), any(sign in answer.body for sign in FINAL)
            self._world.must(whole.startswith(said), f"{key} is heard as {said}, and generated as {whole}")
            stored = self._stored()
            self._world.must(not is_final or said in stored, f"{key} is heard to its end as {said}, and is not stored")

        try:
            async with asyncio.timeout(self._world.weather.patience_s):
                await self._create(process)
                body = {"model": "simulated", "messages": messages, "stream": True}
                await self._requests.turn(process, PATH, {"idempotency-key": key}, body, heard)
        except (AppError, Disconnected, TimeoutError) as error:
            self._world.note(f"{key}: {type(error).__name__} {error}, having heard {len(answer.body)} bytes")
            return None
        is_final, has_failed = FINAL[0] in answer.body, b'"error"' in answer.body
        self._world.note(f"{key} is answered {answer.status} by {process.name}{' to its end' if is_final else ''}")
        self._world.must(is_final != has_failed, f"a stream ended with neither an end nor an error: {answer.body!r}")
        if not is_final:
            return None
        self._final.append("".join(_deltas(answer.body)))
        return self._final[-1]

    async def _create(self, process: Process) -> None:
        config = SessionConfig(rollback_window=1, history="linear", stream_mode="live", on_abort="return")
        with suppress(SessionExists):
            await process.call(
                lambda: process.service.sessions.create(NewSession(SESSION_ID, config, None)), lambda _: None
            )

    def judge(self) -> None:
        """What was heard to its end is there for ever, once."""
        stored = self._stored()
        self._world.must(stored == self._final, f"{SESSION_ID} has {stored}, and was heard as {self._final}")

    def _stored(self) -> list[str]:
        return self._world.store.read(_replies)


def _replies(connection: Connection) -> list[str]:
    log = load_events(connection, SESSION_ID)
    turns = [recorded.event.turn for recorded in log if isinstance(recorded.event, TurnCommitted)]
    found = load_messages(connection, SESSION_ID, turns)
    return [str(msgspec.json.decode(found[turn].message)["content"]) for turn in turns]


def _deltas(stream: bytes) -> Iterator[str]:
    """The pieces of text in the events that have come whole."""
    for event in stream.split(b"\n\n")[:-1]:
        if event.startswith(b"data: {"):
            for choice in msgspec.json.decode(event[6:]).get("choices", ()):
                yield choice["delta"].get("content") or ""
