"""Registers this process in the store, and retries while the store cannot be written.

The server starts and serves reads even if the disk is full or the database accepts no writes. Until it is registered
it takes no turns, because claims name an incarnation; other writes fail with the store's error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.errors import StartupError, StoreFull, StoreUnavailable
from app.sessions.recovery import register
from app.store.engine import Database
from app.tasks import cancelled

log = logging.getLogger("turnlog.recovery")

RETRY_S = 1.0
"""Interval of the attempts, in seconds."""


class Registration:
    """`attempt` tries once; from `start` to `stop` a task retries."""

    def __init__(self, database: Database, retry_s: float = RETRY_S) -> None:
        self._database = database
        self._retry_s = retry_s
        self._number: int | None = None
        self._obstacle: StoreFull | StoreUnavailable = StoreUnavailable("this process is not registered yet")
        self._trying: asyncio.Task[None] | None = None

    @property
    def read_only(self) -> str | None:
        """Why this process takes no turns; None if it takes them."""
        return None if self._number is not None else str(self._obstacle)

    def incarnation(self) -> int:
        """This process's incarnation. Raises StoreFull, StoreUnavailable while it is not registered."""
        if self._number is None:
            raise type(self._obstacle)(f"the store is read-only: {self._obstacle}")
        return self._number

    async def attempt(self) -> bool:
        """Try to register; returns True if this process is registered."""
        try:
            if self._database.is_read_only:
                await self._database.reopen()
            self._number = await register(self._database)
        except (StoreFull, StoreUnavailable) as error:
            self._obstacle = error
        except StartupError as error:
            self._obstacle = StoreUnavailable(str(error))
        return self._number is not None

    def start(self, *then: Callable[[], None]) -> None:
        """Call each of `then` as soon as this process is registered."""
        if self._number is not None:
            _call(then)
            return
        log.warning(
            "read-only: %s; reads and exports are served, what writes is refused until the store takes it",
            self._obstacle,
        )
        self._trying = asyncio.create_task(self._retry(then), name="turnlog-registration")

    async def stop(self) -> None:
        await cancelled(self._trying)

    async def _retry(self, then: tuple[Callable[[], None], ...]) -> None:
        began = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self._retry_s)
            try:
                if await self.attempt():
                    break
            except Exception:
                log.exception("an unexpected fault in registering this process")
        took_s = asyncio.get_running_loop().time() - began
        log.warning("read-only no more after %.0f s: this process takes turns, as incarnation %d", took_s, self._number)
        _call(then)


def _call(then: tuple[Callable[[], None], ...]) -> None:
    for begin in then:
        begin()
