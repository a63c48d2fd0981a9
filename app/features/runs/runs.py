"""Gives runs their limits, counts what they use, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from app.crash_points import reach
from app.domain import cursors
from app.errors import AppError, NotFound, RunClosed, RunOverBudget, SessionUnreadable
from app.features.runs import figures, reads
from app.features.runs.counters import RunCounters
from app.features.runs.figures import Counts, Tally
from app.features.runs.operations import LEASE, EndRun, GiveRun, MeasureRun, RunErased
from app.features.runs.reads import RunRow
from app.process import cancelled
from app.store.incarnations import ReleaseLease, TakeLease
from turnlog.replies import ListedRun, RunPage

if TYPE_CHECKING:
    from app.services import Services

log = logging.getLogger("turnlog.runs")

EVERY_S = 5.0
"""How often the tokens of runs with a limit are counted, and what was begun to be ended is looked for."""

AGAIN_S = 60.0
"""How soon the end of a run is tried again: object storage or archives still had some of it, or a session of it cannot
be read."""

LEASE_S = 30.0

MAX_NAMED = 50
"""Runs with metrics of their own."""

STEP = 50
"""Sessions that are closed or erased together."""


class Runs:
    """Its task runs from `start` to `stop`, in every process; the one with the lease counts and ends."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._database = services.database
        self._writer = services.writer
        self._tally = Tally(services.database)
        self.counters = RunCounters(services.metrics)
        self._fence: int | None = None
        self._again_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-runs")

    async def stop(self) -> None:
        await cancelled(self._task)
        if self._fence is not None:
            with contextlib.suppress(AppError):
                await self._writer.submit(ReleaseLease(LEASE, self._fence))

    # what clients ask for

    async def page(self, cursor: str | None, limit: int) -> RunPage:
        """Runs in the order of their names. Raises InvalidRequest for an invalid cursor."""
        after = "" if cursor is None else cursors.decode(cursor, cursors.Text, "this list")

        names = await self._database.read(partial(reads.names, after=after, limit=limit + 1))
        listed = await self._listed(names[:limit])
        return RunPage(runs=listed, next_cursor=cursors.encode(names[limit - 1]) if len(names) > limit else None)

    async def get(self, run: str) -> dict[str, Any]:
        """The run's figures. Raises NotFound."""
        return (await self.get_with_sessions(run))[0]

    async def get_with_sessions(self, run: str) -> tuple[dict[str, Any], Mapping[str, Counts]]:
        """The run's figures, and what was counted of each of its sessions. Raises NotFound."""
        listed = await self._listed([run])
        if not listed:
            raise NotFound.of_run(run)
        counts = await self._tally.by_session(run)
        summed = await asyncio.to_thread(figures.summed, counts.values())
        return figures.with_turns(listed[0], summed), counts

    async def _listed(self, names: list[str]) -> list[ListedRun]:
        read = await self._database.read(partial(reads.figures, names=names))
        return await asyncio.to_thread(figures.listed, names, *read)

    async def give(self, given: GiveRun) -> None:
        """Give the run its limits, metadata and note, in place of those before. Raises RunClosed, StoreUnavailable."""
        status = await self._writer.submit(given)
        if status is not None:
            raise RunClosed.of(given.run, status)
        if given.tokens is not None:
            await self._measure(given.run, None)
        await self._hold()

    async def close(self, run: str) -> None:
        """Close the run, and its open sessions. Idempotent. Raises NotFound."""
        if await self._writer.submit(EndRun(run, erase=False)) in (None, "erased"):
            raise NotFound.of_run(run)
        reach("after_run_ended")
        await self._close_sessions(run)

    async def erase(self, run: str) -> bool:
        """Erase all sessions of the run as their own erasures do, and free its name. False: some of it has still to be
        removed from object storage or archives, or the run is being taken back to a checkpoint. Idempotent. Raises
        NotFound, SessionUnreadable."""
        is_elsewhere = bool(await self._roots_elsewhere(run))
        status = await self._writer.submit(EndRun(run, erase=True, is_elsewhere=is_elsewhere))
        if status is None:
            raise NotFound.of_run(run)
        reach("after_run_ended")
        return status == "erased" or await self._erase_sessions(run)

    async def _close_sessions(self, run: str) -> bool:
        while session_ids := await self._database.read(partial(reads.open_sessions, run=run, limit=STEP)):
            for session_id in session_ids:
                await self._services.sessions.close_if_open(session_id)
        return True

    async def _erase_sessions(self, run: str) -> bool:
        while True:
            is_gone, unreadable, after = True, None, (0.0, "")
            await self._close_sessions(run)
            while roots := await self._database.read(partial(reads.roots, run=run, after=after, limit=STEP)):
                try:
                    is_gone &= await self._services.erasure.erase_all([session_id for _, session_id in roots])
                except SessionUnreadable:
                    unreadable = await self._erase_each([session_id for _, session_id in roots])
                after = roots[-1]
            is_gone &= await self._services.erasure.erase_all(await self._roots_elsewhere(run))
            if unreadable is not None:
                raise unreadable
            if not is_gone:
                return False
            is_free = await self._writer.submit(RunErased(run))
            if is_free:
                log.info("run %s erased", run)
            if is_free is not False:
                return bool(is_free)

    async def _roots_elsewhere(self, run: str) -> list[str]:
        return [root for ask in self._services.erasure.roots_elsewhere for root in await ask(run)]

    async def _erase_each(self, session_ids: list[str]) -> SessionUnreadable | None:
        """Erase those that can be erased; the error of another one."""
        failed = None
        for session_id in session_ids:
            try:
                await self._services.erasure.erase(session_id)
            except SessionUnreadable as error:
                failed = error
        return failed

    # in the background

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except AppError as error:
                log.warning("limits and ends of runs are delayed: %s; retrying", error)
            except Exception:
                log.exception("unexpected error in the upkeep of runs")
            await asyncio.sleep(EVERY_S)

    async def _round(self) -> None:
        work = await self._database.read(reads.work)
        if any(work):
            incarnation, lease_s = (
                self._services.registration.incarnation(),
                self._services.recovery.lease_to_judge_by(),
            )
            self._fence = await self._writer.submit(TakeLease(LEASE, incarnation, LEASE_S, lease_s))
        if any(work) and self._fence is not None:
            for row in work.limited:
                await self._measure(row.run, self._fence, row)
        await self._hold()
        if any(work) and self._fence is not None:
            for run in work.closing:
                await self._each(run, self._close_sessions)
            for run in work.erasing:
                await self._each(run, self._erase_sessions)

    async def _each(self, run: str, end: Callable[[str], Awaitable[bool]]) -> None:
        """End what is left of a run. What cannot be ended now is tried again later, and holds up no other run."""
        now = asyncio.get_running_loop().time()
        if now < self._again_at.get(run, now):
            return
        is_ended = False
        try:
            is_ended = await end(run)
        except AppError as error:
            log.warning("run %s cannot be closed or erased yet: %s", run, error)
        if is_ended:
            self._again_at.pop(run, None)
        else:
            self._again_at[run] = now + AGAIN_S

    async def _measure(self, run: str, fence: int | None, row: RunRow | None = None) -> None:
        used = (await self._tally.of(run)).generated
        if row is None or row.used_tokens != used:
            await self._writer.submit(MeasureRun(run, used, fence))

    async def _hold(self) -> None:
        """From now on this process holds the turns of those runs that have used up their tokens, and counts those of
        the first runs that were given something each on its own."""
        self.counters.name(await self._database.read(partial(reads.given, limit=MAX_NAMED)))
        limited = await self._database.read(reads.limited)
        held = {
            row.run: str(RunOverBudget.of(row.run, "tokens", row.used_tokens, row.max_tokens))
            for row in limited
            if row.max_tokens is not None and row.used_tokens >= row.max_tokens
        }
        self._services.points.held_runs.clear()
        self._services.points.held_runs.update(held)
