"""The drill of uploads: two sessions are erased while their payloads are on the way to object storage, and of neither
is an object left once that is said."""

from __future__ import annotations

import asyncio

from app.domain.events import SessionConfig
from app.errors import AppError, SessionClosed, SessionNotFound
from app.features.objects.names import folder_of
from app.features.objects.objects import Objects
from tests.tools.simulation.bucket import URL
from tests.tools.simulation.calls import Erase
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.spelling import Message

NEEDS = {"replay": ("routed_experts",), "payloads": URL, "max_replay_bytes": 1 << 30}
"""Settings without which there is nothing to upload."""

PUTS_S = (1.0, 4.0)
"""How long the uploads of the sessions take."""

LONG: list[Message] = [{"role": "user", "content": f"said {place}"} for place in range(24)]
"""So much that the payload of a turn goes to object storage."""

LOOK_S, AGAIN_S = 0.02, 0.5


class EmptiedClient(Client):
    """Stays at one process."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        others = [self._of(name) for name in ("a", "b")]
        weather, uploading = self._world.weather, []
        for one, put_s in zip(others, PUTS_S, strict=True):
            await one.join(SessionConfig(rollback_window=1, history=one.history))
            weather.put_s = put_s
            uploading.append(await one.upload())
            weather.put_s = 0.0
        begun = [turn for turn in uploading if turn is not None]
        try:
            if len(begun) == len(others):
                await asyncio.gather(*(one.empty() for one in others))
        finally:
            await asyncio.gather(*begun)
        if len(begun) < len(others):
            return
        await asyncio.sleep(max(PUTS_S))
        for one in others:
            one.judge("later")

    def _of(self, name: str) -> EmptiedClient:
        client = EmptiedClient(self._world, f"{self.name}{name}", f"{self.session_id}.{name}", self._habits)
        client.go_to(self._process())
        return client

    async def upload(self) -> asyncio.Task[None] | None:
        """A turn whose payload is on its way; None where it has come to its end."""
        turn = asyncio.create_task(self._turn_or_not())
        while not turn.done():
            if self._is_uploading():
                return turn
            await asyncio.sleep(LOOK_S)
        return None

    async def _turn_or_not(self) -> None:
        try:
            await self.turn_after(LONG, tries=1)
        except (AppError, Disconnected, GaveUp) as error:
            self._note(f"{self.name}: {error!r}")

    def _is_uploading(self) -> bool:
        objects: Objects = self._process().service.features["objects"]
        return any(session_id == self.session_id for session_id, _ in objects._uploads)

    async def empty(self) -> None:
        """Erase the session, until all of it is said to be gone."""
        is_gone = False
        while not is_gone:
            process = self._process()

            async def erase() -> None:
                nonlocal is_gone
                is_gone = await process.service.erasure.erase(self.session_id)  # noqa: B023

            try:
                await self._fact(process, Erase(), "erased", erase)
            except (SessionClosed, SessionNotFound):
                raise
            except (AppError, Disconnected) as error:
                self._note(f"{self.name}: {error!r}")
            await asyncio.sleep(AGAIN_S)
        self.judge("then")

    def judge(self, when: str) -> None:
        left = [name for name in self._world.store.objects if name.startswith(folder_of(self.session_id))]
        self._world.must(not left, f"{self.session_id} was said to be gone, and {left} are there {when}")
