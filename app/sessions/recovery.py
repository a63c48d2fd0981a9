"""Registers this process in the store, sends its heartbeats, and abandons the open turns of dead processes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from app.errors import AppError, StartupError, StoreDamaged, StoreFull, StoreUnavailable
from app.process import cancelled
from app.store import database as store_database
from app.store import incarnations
from app.store.dialect import Tx, WriteConflict
from app.store.log_turns import AbandonDead, next_dead
from app.store.opening import keep_revision
from app.store.ports import Database, Writer
from app.store.writer import CONFLICT_TRIES, CROWDED_OUT

T = TypeVar("T")

log = logging.getLogger("turnlog.recovery")

BEATS_PER_LEASE = 4
"""Heartbeats in the time after which a silent process loses its claims."""

SWEEP = 200
"""Open turns abandoned in one transaction."""


SWEEP_AGAIN_S = 10.0
"""Pause after a sweep that could not be finished, where no other sweep follows."""


async def register(database: Database, note: Callable[[Tx], object] | None = None) -> int:
    """Register this process as a new incarnation, and end those that are certainly dead. `note` writes with it what
    must be there before its first turn."""

    def write(tx: Tx) -> int:
        keep_revision(tx)
        if note is not None:
            note(tx)
        return incarnations.register(tx, alone=database.is_sqlite)

    return await written(database, write, durable=True)


async def written(database: Database, function: Callable[[Tx], T], *, durable: bool = False) -> T:
    """Write outside the writer's queue; retry on a conflict with another process.

    Raises StoreUnavailable, StoreFull.
    """
    for _ in range(CONFLICT_TRIES):
        try:
            return await database.write(function, durable=durable)
        except WriteConflict:
            continue
    raise StoreUnavailable(CROWDED_OUT)


def _heartbeat(tx: Tx, incarnation: int) -> None:
    keep_revision(tx)
    incarnations.heartbeat(tx, incarnation)


class Recovery:
    """Sends a heartbeat every `beat_s` seconds; claims of a process that was silent for `lease_s` seconds are void.

    A process that was silent itself, because the database was away or it was frozen, does not declare others dead for
    one lease: their heartbeats may have been lost for the same reason.
    """

    def __init__(
        self,
        database: Database,
        writer: Writer,
        incarnation: Callable[[], int],
        lease_s: float,
        beat_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._writer = writer
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._beat_s = beat_s
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._beat_at = asyncio.get_running_loop().time()
        self._judges_from = -math.inf
        self._ending = asyncio.Lock()
        self._ended: set[int] = set()

    def start(self) -> None:
        """Start both tasks. Claims need not wait for the sweep: each detects a dead holder itself."""
        self._tasks = [asyncio.create_task(self._sweep_always()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        await cancelled(*self._tasks)
        try:
            number = self._incarnation()
            await written(self._database, lambda tx: incarnations.stop(tx, number))
        except AppError as error:
            log.warning("the store could not record that this process ends; its claims end with its lease: %s", error)

    def lease_to_judge_by(self) -> float:
        """The silence in seconds after which others' claims are void; infinite while this process cannot tell."""
        now = asyncio.get_running_loop().time()
        return math.inf if self._was_silent(now) or now < self._judges_from else self._lease_s

    def _was_silent(self, now: float) -> bool:
        """Was this process silent for so long that others may seem dead to it?"""
        return now > self._beat_at + self._lease_s * (1 - 1 / BEATS_PER_LEASE)

    async def lease_left(self, incarnation: int) -> float | None:
        """Seconds until a silent process loses its claims; None if they are void.

        The claims of a process of this host that no longer exists become void now.
        """
        standing = await self._database.read(lambda c: incarnations.standing(c, incarnation, self._lease_s))
        if not standing.gone:
            return standing.left
        async with self._ending:
            if not standing.ended and incarnation not in self._ended:
                await written(self._database, lambda tx: incarnations.end(tx, incarnation))
                self._ended.add(incarnation)
        return None

    async def _sweep_always(self) -> None:
        """Sweep at the start and, if there may be other processes, once per lease, so that unused sessions are freed
        too."""
        may_be_others = math.isfinite(self._lease_s)
        is_done = await self._sweep()
        while may_be_others or not is_done:
            await asyncio.sleep(self._lease_s if may_be_others else SWEEP_AGAIN_S)
            if may_be_others:
                try:
                    await written(self._database, incarnations.end_gone)
                except AppError as error:
                    log.warning("dead processes could not be looked up: %s", error)
            is_done = await self._sweep()

    async def _sweep(self) -> bool:
        """Abandon every open turn of a dead process; False where that has to be tried again."""
        after: str | None = ""
        abandoned, most = 0, SWEEP
        while after is not None:
            operation = AbandonDead(after, most, self._clock(), self.lease_to_judge_by())
            try:
                after, count = await self._writer.submit(operation)
            except StoreDamaged as error:
                if most > 1:
                    most = 1
                    continue
                after, count = await self._passed_over(after or "", error), 0
            except AppError as error:
                log.warning("abandoning the turns of dead processes was interrupted: %s; retrying", error)
                return False
            abandoned += count
        if abandoned:
            log.info("abandoned the open turns of %d sessions whose process had died", abandoned)
        return True

    async def _passed_over(self, after: str, why: StoreDamaged) -> str | None:
        """The next session with an open turn whose pages are damaged; None if not even its id can be read."""
        try:
            session_id = await self._database.read(partial(next_dead, after=after, lease_s=self.lease_to_judge_by()))
        except AppError as error:
            log.warning("abandoning dead turns stopped: %s", error)
            return None
        if session_id is not None:
            self._database.unreadable.warn(session_id, why)
        return session_id

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                number = self._incarnation()
                await written(self._database, partial(_heartbeat, incarnation=number))
                now = asyncio.get_running_loop().time()
                if self._was_silent(now):
                    self._judges_from = now + self._lease_s
                self._beat_at = now
            except AppError as error:
                log.warning("a heartbeat was missed: %s", error)


RETRY_S = 1.0
"""Interval of the attempts, in seconds."""


class Registration:
    """Registers this process. `attempt` tries once; from `start` to `stop` a task retries.

    The server starts and serves reads even if the disk is full or the database accepts no writes. Until it is
    registered it takes no turns, because claims name an incarnation; other writes fail with the store's error. So
    nothing else may be written at the start: `note` is, with the registration.
    """

    def __init__(
        self, database: store_database.Database, note: Callable[[Tx], object] | None = None, retry_s: float = RETRY_S
    ) -> None:
        self._database = database
        self._note = note
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
            self._number = await register(self._database, self._note)
        except (StoreFull, StoreUnavailable) as error:
            self._obstacle = error
        except StartupError as error:
            self._obstacle = StoreUnavailable(str(error))
        return self._number is not None

    def start(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as this process is registered."""
        if self._number is not None:
            then()
            return
        log.warning(
            "read-only: %s; reads and exports are served, writes are refused until the store accepts them",
            self._obstacle,
        )
        self._trying = asyncio.create_task(self._retry(then), name="turnlog-registration")

    async def stop(self) -> None:
        await cancelled(self._trying)

    async def _retry(self, then: Callable[[], None]) -> None:
        began = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self._retry_s)
            try:
                if await self.attempt():
                    break
            except Exception:
                log.exception("unexpected error while registering this process")
        took_s = asyncio.get_running_loop().time() - began
        log.warning("writable again after %.0f s: this process takes turns as incarnation %d", took_s, self._number)
        then()
