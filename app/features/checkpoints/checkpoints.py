"""Makes, lists and deletes checkpoints, and holds the turns while one is made or restored.

    make            one transaction
    make, drained   turns without a claim are held, those in flight end, then as above
    restore         the turns are held; `app.features.checkpoints.restores` does the rest

All of this is a run's, or the whole store's (ALL_RUNS): that begins while no run's goes on, and lets none begin. Two
runs may be taken back at a time.

The order to hold turns is an event in the fleet's log, so every process obeys it, and it outlives the process that gave
it. A process that finds that one dead frees the turns that drained, and finishes the restore.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from app.crash_points import reach
from app.domain.fleet import Fleet, FleetEvent, TurnsFreed, TurnsHeld
from app.domain.patterns import ALL_RUNS
from app.domain.selection import has_all
from app.errors import AppError, CheckpointBusy, CheckpointExists, NotFound
from app.features.checkpoints import operations as store
from app.features.checkpoints.operations import (
    Checkpoint,
    Delete,
    DropRows,
    InCheckpoint,
    Make,
    Missing,
    NameTaken,
    Restoring,
)
from app.features.checkpoints.restores import Restores
from app.features.gates.gates import Gates
from app.fleet.state import FleetState
from app.process import cancelled
from app.store import feed
from app.store import fleet as fleet_store
from app.store.ports import Connection, Database, Writer
from turnlog.replies import RestoredStore

log = logging.getLogger("turnlog.checkpoints")

WATCH_S = 1.0
"""How often a process looks for turns that a dead process holds."""

LOOK_S = 0.02
"""How often the turns in flight are counted while they drain."""

ROWS_AT_ONCE = 2000
"""Rows of a deleted checkpoint that one transaction deletes: some milliseconds."""

BEFORE = "before-"
"""Begins the name of a checkpoint that a restore makes, and no other."""


class Checkpoints:
    """The watch runs from `start` to `stop`. `incarnation()` is this process's number in the store; `lease_left` tells
    how long another one's lease still lasts; None, or not above zero, if it is dead. `on_delete` is called after a
    checkpoint was deleted."""

    def __init__(
        self,
        *,
        database: Database,
        writer: Writer,
        fleet: FleetState,
        gates: Gates,
        restores: Restores,
        incarnation: Callable[[], int],
        lease_left: Callable[[int], Awaitable[float | None]],
        on_delete: Callable[[], None],
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._gates = gates
        self._restores = restores
        self._incarnation = incarnation
        self._lease_left = lease_left
        self._on_delete = on_delete
        self._has_deleted = True
        self._draining: list[TurnsHeld] = []
        self._beginning = asyncio.Lock()
        self._running: dict[str, asyncio.Task[RestoredStore]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-checkpoints")

    async def stop(self) -> None:
        """A restore that is not finished goes on in the next process."""
        await cancelled(self._watching, *self._running.values())

    async def make(
        self, run: str, name: str, *, drain_s: float | None = None, metadata: bytes | None = None
    ) -> Checkpoint:
        """Make a checkpoint of a run, or (ALL_RUNS) of all; `metadata` is JSON. With `drain_s` after the turns in
        flight have ended, which may take so many seconds.

        Raises CheckpointExists, CheckpointBusy (a restore or another drain is going on, or turns did not end in time),
        StoreUnavailable, StoreFull.
        """
        if drain_s is None:
            return await self._make(Make(run, name, "now", metadata=metadata))
        await self._require_free(run, name)
        held = TurnsHeld(name, "drain", self._incarnation(), run=_in_fleet(run))
        self._draining.append(held)
        try:
            await self._hold(held)
            await asyncio.sleep(self._gates.settled_s)
            await self._drained(run, drain_s)
            return await self._make(Make(run, name, "drain", metadata=metadata))
        finally:
            self._draining.remove(held)
            await self._free(held)

    async def _make(self, make: Make) -> Checkpoint:
        made = await self._writer.submit(make)
        if isinstance(made, NameTaken):
            raise _taken(make.name)
        if isinstance(made, Restoring):
            raise _busy()
        assert not isinstance(made, Missing), "no restore is running"
        reach("after_checkpoint")
        return made

    async def _require_free(self, run: str, name: str) -> None:
        if await self._database.read(partial(store.named, run=run, name=name)) is not None:
            raise _taken(name)

    async def _drained(self, run: str, timeout_s: float) -> None:
        """Wait until no turn of the run is in flight in any process. Raises CheckpointBusy."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self._database.read(partial(_has_open_turns, run=run)):  # noqa: ASYNC110 - they may be others'
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise CheckpointBusy(f"turns were still in flight after {timeout_s:g} s; no checkpoint was made") from None

    async def every(self, run: str | None, metadata: Mapping[str, Sequence[str]]) -> list[Checkpoint]:
        """Those of a run, of the whole store (ALL_RUNS) or (None) all, that have one of the values of each key in their
        metadata, the oldest first. Raises StoreUnavailable."""
        found = await self._database.read(partial(store.every, run=run))
        return [one for one in found if has_all(one.metadata or b"{}", metadata)]

    async def of_session(self, session_id: str) -> Sequence[InCheckpoint]:
        """The checkpoints that have the session, the oldest first. Raises StoreUnavailable."""
        return await self._database.read(lambda connection: store.of_session(connection, session_id))

    async def delete(self, run: str, name: str) -> None:
        """Raises NotFound, CheckpointBusy, StoreUnavailable, StoreFull."""
        outcome = await self._writer.submit(Delete(run, name))
        if isinstance(outcome, Restoring):
            raise _busy()
        if not outcome:
            raise _unknown(name)
        self._on_delete()
        self._has_deleted = True
        self._woken.set()

    async def restore(self, run: str, name: str) -> RestoredStore:
        """Take a run (ALL_RUNS: the store) back to its checkpoint. Of one that is being restored, wait for the end.

        It goes on if the caller does not wait, and after a crash. Raises NotFound, CheckpointBusy, StoreUnavailable,
        StoreFull.
        """
        running = self._running.get(run)
        held = self._fleet.fleet.held.get(_in_fleet(run))
        if running is not None and not running.done() and held is not None and held.checkpoint == name:
            return await asyncio.shield(running)
        if await self._database.read(partial(store.named, run=run, name=name)) is None:
            raise _unknown(name)
        number = await self._database.read(partial(feed.number_of_restores, run=run))
        before = f"{BEFORE}{number}-{name}"[:128]
        async with self._beginning:
            placed = await self._hold(TurnsHeld(name, "restore", self._incarnation(), before, run=_in_fleet(run)))
            reach("after_held")
            running = self._run(placed)
        return await asyncio.shield(running)

    def _run(self, held: TurnsHeld) -> asyncio.Task[RestoredStore]:
        """Start to restore, in a task that outlives the request."""
        running = asyncio.create_task(self._restored(held), name="turnlog-restore")
        running.add_done_callback(_tell)
        self._running[_run_of(held)] = running
        return running

    async def _restored(self, held: TurnsHeld) -> RestoredStore:
        assert held.before is not None
        await asyncio.sleep(self._gates.settled_s)
        try:
            restored = await self._restores.run(_run_of(held), held.checkpoint, held.before)
        except NotFound:
            await self._free(held)
            raise
        await self._free(held)
        return restored

    async def _hold(self, held: TurnsHeld) -> TurnsHeld:
        """Hold the turns, unless somebody holds some of them. Raises CheckpointBusy."""

        def decide(fleet: Fleet) -> FleetEvent:
            if fleet.holding(held.run):
                raise _busy()
            return held

        await self._fleet.append(decide)
        return held

    async def _free(self, held: TurnsHeld) -> None:
        """Let the turns go on, unless somebody else has taken over."""
        freed = TurnsFreed(held.checkpoint, run=held.run)
        await self._fleet.append(lambda fleet: freed if fleet.held.get(held.run) == held else None)

    async def _watch(self) -> None:
        while True:
            try:
                async with self._beginning:
                    for held in list(self._fleet.fleet.held.values()):
                        await self._take_over(held)
                await self._drop_rows()
            except AppError as error:
                log.warning("checkpoints: %s; retrying", error)
            except Exception:
                log.exception("unexpected error while watching checkpoints")
            self._woken.clear()
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _take_over(self, held: TurnsHeld) -> None:
        """Finish what a dead process has begun, or this one could not finish."""
        running = self._running.get(_run_of(held))
        if held in self._draining or (running is not None and not running.done()):
            return
        own = self._incarnation()
        if held.incarnation != own and not self._database.is_sqlite:
            left = await self._lease_left(held.incarnation)
            if left is not None and left > 0:
                return
        if held.reason == "drain":
            await self._free(held)
            return
        taken = msgspec.structs.replace(held, incarnation=own)
        if taken != held:
            placed = await self._fleet.append(lambda fleet: taken if fleet.held.get(held.run) == held else None)
            if placed is None:
                return
        log.info("resuming the restore of run %s to checkpoint %s", _run_of(held), held.checkpoint)
        self._run(taken)

    async def _drop_rows(self) -> None:
        """After the start too: a process may have died in the middle of it."""
        after: str | None = "" if self._has_deleted else None
        while after is not None:
            after = await self._writer.submit(DropRows(after, ROWS_AT_ONCE))
        self._has_deleted = False


def _has_open_turns(connection: Connection, run: str) -> bool:
    return any(run in (ALL_RUNS, of) for of, _ in fleet_store.open_counts(connection))


def _in_fleet(run: str) -> str | None:
    return None if run == ALL_RUNS else run


def _run_of(held: TurnsHeld) -> str:
    return ALL_RUNS if held.run is None else held.run


def _tell(done: asyncio.Task[RestoredStore]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("a restore was interrupted: %s; retrying", error)


def _busy() -> CheckpointBusy:
    return CheckpointBusy("a checkpoint of the run or of the whole store is being restored, or turns drain for one")


def _taken(name: str) -> CheckpointExists:
    return CheckpointExists(f"checkpoint {name} already exists")


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no checkpoint {name}")
