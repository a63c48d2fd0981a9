"""Closes idle sessions, frees the replay payloads of closed sessions, and erases old closed sessions.

Every step is small and checks its condition inside its own transaction. So several processes may run it at the same
time, and a session that becomes active meanwhile is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from app.domain.fleet import fold
from app.domain.groups import GroupKey
from app.errors import AppError, SessionUnreadable, StoreDamaged
from app.process import cancelled
from app.sessions.erasure import Erasure
from app.sessions.lifecycle import Sessions
from app.settings import Settings
from app.store.fleet import state
from app.store.log import Appended
from app.store.log_sessions import Close
from app.store.ports import Database, Writer
from app.store.rollouts import in_groups
from app.store.schema import sessions
from app.store.sessions import Acknowledgements, closed_sessions, database_bytes, idle_sessions, listed

log = logging.getLogger("turnlog.janitor")

T = TypeVar("T", str, tuple[float, str])

STEP = 50
"""Sessions read in one query."""

REST_S = 0.02
"""Pause between two steps, so that requests are hardly delayed."""

LATE_S = 3600.0
"""Allowance for a clock that is behind: `closed_at` may be this much too old."""

SHORTEST_S, LONGEST_S = 0.5, 30.0
"""Bounds of the pause between two rounds; within them, a quarter of the shortest configured time."""

SIZE_EVERY_S = 2.0

GATED_S = 60.0
"""No session counts as idle for this long after a gate has opened: a turn that waited at the gate left no event in its
session and needs some time to pass."""


class Janitor:
    """Runs as one task from `start` to `stop`; `clock` gives seconds since the epoch.

    It pauses `rest_s` seconds after each session. `done` counts, since the start, the sessions that were closed for
    being idle, lost their replay payloads, or were erased; `ended_round_at` is when the last complete round ended.
    `rounds` is what features do in each round; with `acknowledgements` the retention waits for these (groups).
    """

    def __init__(
        self,
        database: Database,
        writer: Writer,
        sessions: Sessions,
        erasure: Erasure,
        settings: Settings,
        clock: Callable[[], float],
        *,
        rest_s: float = REST_S,
    ) -> None:
        self.done = Counter(closed=0, freed=0, erased=0)
        self.rounds: list[Callable[[], Awaitable[object]]] = []
        self.acknowledgements: Acknowledgements | None = None
        self.ended_round_at: float | None = None
        self._rest_s = rest_s
        self._database = database
        self._writer = writer
        self._sessions = sessions
        self._erasure = erasure
        self._settings = settings
        self._clock = clock
        self._freed_upto = (0.0, "")
        self._acknowledged_upto = (0.0, "", "")
        self._erased_in_log_file = False
        self._has_finished_rewarding = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-janitor")

    async def stop(self) -> None:
        await cancelled(self._task)

    def look_again(self) -> None:
        """Sessions that were passed over because a checkpoint had them may be due."""
        self._freed_upto = (0.0, "")
        self._acknowledged_upto = (0.0, "", "")

    async def _run(self) -> None:
        told: tuple[type[AppError], str] | None = None
        while True:
            try:
                await self.round()
                told = None
            except AppError as error:
                # A full disk or damage lasts for many rounds: log it once.
                failure = (type(error), str(error) if isinstance(error, StoreDamaged) else "")
                if failure != told:
                    log.warning("the janitor's round was interrupted: %s", error)
                told = failure
            except Exception:
                log.exception("unexpected error in the janitor's round")
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        settings = self._settings
        kept = (settings.idle_close_s, settings.closed_replay_ttl_s, settings.closed_ttl_s)
        shortest = min((seconds / 4 for seconds in kept if seconds is not None), default=LONGEST_S)
        if settings.max_db_bytes is not None:
            shortest = min(shortest, SIZE_EVERY_S)
        return min(max(shortest, SHORTEST_S), LONGEST_S)

    async def round(self) -> None:
        """One round. Raises AppError if the store refuses the writes."""
        if self._settings.max_db_bytes is not None:
            size = await self._database.read(database_bytes)
            self._sessions.is_full = size > self._settings.max_db_bytes
        await self._close_idle()
        for follow in self.rounds:
            await follow()
        await self._free_replay()
        await self._erase_old()
        await self._database.give_back()
        # Last, because it cannot skip a damaged page, which must not prevent the steps above.
        # It finishes what a killed process left unfinished; rewards only once: that reads every session with a root.
        if not self._has_finished_rewarding:
            await self._sessions.finish_rewarding()
            self._has_finished_rewarding = True
        if count := await self._sessions.finish_closing():
            log.info("closed %d sessions whose root had been closed", count)
        self.ended_round_at = self._clock()

    async def _close_idle(self) -> None:
        if self._settings.idle_close_s is None:
            return
        since = self._clock() - self._settings.idle_close_s
        fleet = fold((await self._database.read(state)).events)
        shut = fleet.shut_after(self._clock() - GATED_S)
        if None in shut:
            return
        of_others = sessions.c.run.not_in(shut)
        after = ""
        while idle := await self._listed(partial(idle_sessions, since=since, after=after, limit=STEP, where=of_others)):
            for session_id in idle:
                with suppress(SessionUnreadable, StoreDamaged):
                    closed = await self._sessions.apply(
                        Close(
                            session_id,
                            self._clock(),
                            "idle",
                            self._sessions.engine_session(session_id),
                            idle_since=since,
                        )
                    )
                    if isinstance(closed, Appended):
                        self.done["closed"] += 1
                        await self._sessions.close_members(session_id)
                await asyncio.sleep(self._rest_s)
            after = idle[-1]

    async def _free_replay(self) -> None:
        """Sessions closed before `_freed_upto` are done; a new process goes through all of them once."""
        if self._settings.closed_replay_ttl_s is None:
            return
        cutoff = self._clock() - self._settings.closed_replay_ttl_s
        after = min(self._freed_upto, (cutoff - LATE_S, ""))
        async for place in self._closed(cutoff, after, holding=True):
            with suppress(SessionUnreadable, StoreDamaged):
                await self._erasure.free_replay(place[1], unless_pinned=True)
                self.done["freed"] += 1
            self._freed_upto = place

        if self.acknowledgements is not None:
            await self._free_acknowledged(self.acknowledgements, cutoff)

    async def _free_acknowledged(self, given: Acknowledgements, cutoff: float) -> None:
        """Sessions skipped because their group was not acknowledged; `_free_replay` has passed them by now."""
        after = min(self._acknowledged_upto, (self._acknowledged_upto[0] - LATE_S, "", ""))
        while groups := await self._database.read(lambda connection: given.groups(connection, after, STEP)):  # noqa: B023
            for place in groups:
                of_group = partial(
                    closed_sessions,
                    points=self._database.points,
                    cutoff=cutoff,
                    after=(0.0, ""),
                    limit=None,
                    holding=True,
                    where=in_groups([GroupKey(*place[1:])]),
                )
                for _, session_id in await self._listed(of_group):
                    with suppress(SessionUnreadable, StoreDamaged):
                        await self._erasure.free_replay(session_id, unless_pinned=True)
                        self.done["freed"] += 1
                    await asyncio.sleep(self._rest_s)
                self._acknowledged_upto = max(place, self._acknowledged_upto)
            after = groups[-1]

    async def _erase_old(self) -> None:
        if self._settings.closed_ttl_s is None:
            return
        async for _, session_id in self._closed(self._clock() - self._settings.closed_ttl_s, (0.0, ""), holding=False):
            self._erased_in_log_file = True
            with suppress(SessionUnreadable, StoreDamaged):
                await self._erasure.drop_content(session_id, unless_pinned=True)
                self.done["erased"] += 1
        if self._erased_in_log_file:
            await self._database.empty_log_file()
            self._erased_in_log_file = False

    async def _closed(
        self, cutoff: float, after: tuple[float, str], *, holding: bool
    ) -> AsyncIterator[tuple[float, str]]:
        """Sessions closed before `cutoff`, with the time, oldest first; `holding`: only those with replay payloads or
        refused replies.

        Sessions whose group is not acknowledged are left out if the retention waits for that.
        """
        acknowledged = None if self.acknowledgements is None else self.acknowledgements.is_given
        points = self._database.points
        read = partial(closed_sessions, points=points, cutoff=cutoff, limit=STEP, holding=holding, where=acknowledged)
        while session_ids := await self._listed(partial(read, after=after)):
            for place in session_ids:
                yield place
                await asyncio.sleep(self._rest_s)
            after = session_ids[-1]

    async def _listed(self, read: Callable[..., list[T]]) -> list[T]:
        """What `read` lists; around damaged pages all of it at once, of the sessions that can be read."""
        return await self._database.read(lambda c: listed(c, lambda again, among: read(again, among=among)))
