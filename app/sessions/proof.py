"""Proves at the start and in the background that the store takes a write, and reads it in the order of commits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.errors import AppError, StartupError, StoreFull, StoreUnavailable
from app.process import cancelled
from app.store.database import Database
from app.store.dialect import WriteConflict
from app.store.repair import StoreUnordered, prove

log = logging.getLogger("turnlog.proof")

PROVE_S, RETRY_S = 10.0, 1.0
"""Interval of proofs, and of those after one that failed, in seconds."""


class Proof:
    """`at_start` proves once; from `start` to `stop` a task does it again and again."""

    def __init__(self, database: Database, incarnation: Callable[[], int]) -> None:
        self._database = database
        self._incarnation = incarnation
        self._fault: AppError | None = None
        self._proving: asyncio.Task[None] | None = None

    @property
    def unwritable(self) -> str | None:
        """Why the store takes no writes; None if it took the last one."""
        return None if self._fault is None else str(self._fault)

    @property
    def is_ordered(self) -> bool:
        """Are events read in the order of commits, as far as it is known?"""
        return not isinstance(self._fault, StoreUnordered)

    async def at_start(self) -> None:
        """Raises StartupError for a database that must not be served. One that takes no writes now may be read."""
        await self._prove()
        if not self.is_ordered:
            raise StartupError(str(self._fault))

    def start(self) -> None:
        self._proving = asyncio.create_task(self._always(), name="turnlog-proof")

    async def stop(self) -> None:
        await cancelled(self._proving)

    async def _always(self) -> None:
        while True:
            await asyncio.sleep(PROVE_S if self._fault is None else RETRY_S)
            before = self.unwritable
            try:
                await self._prove()
            except Exception:
                log.exception("unexpected error in a test write")
            if self.unwritable not in (None, before):
                log.warning("a test write failed: %s", self._fault)
            elif before is not None and self._fault is None:
                log.warning("test writes succeed again")

    async def _prove(self) -> None:
        try:
            await prove(self._database, self._incarnation())
        except WriteConflict as conflict:
            self._fault = StoreUnavailable(str(conflict))
        except (StoreUnavailable, StoreFull) as fault:
            self._fault = fault
        else:
            self._fault = None
