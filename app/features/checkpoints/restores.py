"""Takes a run, or the whole store, back to a checkpoint, while its turns are held.

    before      a checkpoint keeps the present state; its rows say which sessions are done
    sessions    those that have changed since, one transaction each
    groups      leases and acknowledgements
    end         the epoch is raised

Each step checks what is done already, so the whole is repeated after a crash. Nothing is deleted: a session's log says
from which event on it is again what it was. Sessions that are created meanwhile are left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from app.crash_points import reach
from app.domain.events import Recorded, UnknownEvent
from app.domain.groups import GroupKey
from app.domain.patterns import ALL_RUNS
from app.domain.session import Session, fold
from app.errors import NotFound, SessionUnreadable
from app.features.checkpoints import operations as store
from app.features.checkpoints.operations import (
    Changed,
    Checkpoint,
    FinishRestore,
    Make,
    Missing,
    RestoreGroups,
    RestoreSession,
    Restoring,
)
from app.features.checkpoints.rules import restoring
from app.sessions.cache import SessionCache
from app.sessions.event_log import Followers
from app.sessions.lifecycle import Sessions
from app.store import repair
from app.store.feed import cursor_epoch
from app.store.log import Appended
from app.store.ports import Database, Writer
from app.store.repair import FoldedLog
from app.store.sessions import EventRow, decode_events, event_rows
from turnlog.replies import RestoredStore

log = logging.getLogger("turnlog.checkpoints")

PAGE = 500
"""Sessions listed in one query."""

AT_ONCE = 128
"""Sessions that are folded and written at a time; the writer commits them together."""

INLINE = 64
"""Up to this many events are folded on the event loop, about 1 ms."""

GROUPS_AT_ONCE = 200
"""Groups in one transaction."""

HEAD = (
    *("status", "closed_at", "reward", "turns", "weight_version", "engine", "note", "tags"),
    *("spent_turns", "spent_tokens", "failed", "evaluation", "annotated", "engine_errors", "tool_errors"),
)
"""The columns of a session's row that a restore changes, besides those that every event does."""


class _Tally(msgspec.Struct):
    sessions: int = 0
    undone: int = 0
    unreadable: list[str] = []


class Restores:
    """`clock` gives seconds since the epoch. After the sessions were taken back each of `then` is called."""

    def __init__(
        self,
        *,
        database: Database,
        writer: Writer,
        cache: SessionCache,
        followers: Followers,
        sessions: Sessions,
        clock: Callable[[], float],
        then: Sequence[Callable[[], Awaitable[object]]],
    ) -> None:
        self._database = database
        self._writer = writer
        self._cache = cache
        self._followers = followers
        self._sessions = sessions
        self._clock = clock
        self._then = then

    async def run(self, run: str, name: str, before: str) -> RestoredStore:
        """Take a run (ALL_RUNS: the store) back to its checkpoint `name`, or finish that.

        Raises NotFound (it was deleted before this began), StoreUnavailable, StoreFull.
        """
        kept = await self._kept(run, name, before)
        target = await self._checkpoint(run, name)
        tally = _Tally()
        if kept.state == "restoring":
            await self._restore_sessions(target, kept, tally)
            await self._restore_groups(target)
        await self._writer.submit(FinishRestore(kept.id, run))
        reach("after_restore_finished")
        await self._sessions.finish_rewarding(None if run == ALL_RUNS else run)
        for follow in self._then:
            await follow()
        erased = await self._database.read(lambda connection: store.erased(connection, target.id))
        epoch = await self._database.read(partial(cursor_epoch, run=None if run == ALL_RUNS else run))
        log.info("restored run %s to checkpoint %s: %d sessions changed", run, name, tally.sessions)
        return RestoredStore(
            run=run,
            name=name,
            before=before,
            epoch=epoch,
            sessions=tally.sessions,
            undone=tally.undone,
            erased=erased,
            unreadable=tally.unreadable,
        )

    async def _checkpoint(self, run: str, name: str) -> Checkpoint:
        checkpoint = await self._database.read(lambda connection: store.named(connection, run, name))
        if checkpoint is None:
            raise NotFound(f"there is no checkpoint {name}")
        return checkpoint

    async def _kept(self, run: str, name: str, before: str) -> Checkpoint:
        """The checkpoint of the present state, made unless it is there. Raises NotFound."""
        made = await self._writer.submit(Make(run, before, "restore", name))
        if isinstance(made, Missing):
            raise NotFound(f"there is no checkpoint {name}")
        assert not isinstance(made, Restoring), "two restores at once"
        return made if isinstance(made, Checkpoint) else await self._checkpoint(run, before)

    async def _restore_sessions(self, target: Checkpoint, kept: Checkpoint, tally: _Tally) -> None:
        # Roots come first. A session that is open again below a root that is closed still, or has still its reward, is
        # what a killed process left behind for those who close and reward with their root.
        for of_roots in (True, False):
            after = ""
            while page := await self._database.read(
                partial(
                    store.to_restore,
                    checkpoint_id=target.id,
                    before_id=kept.id,
                    after=after,
                    limit=PAGE,
                    of_roots=of_roots,
                )
            ):
                for at in range(0, len(page), AT_ONCE):
                    some = page[at : at + AT_ONCE]
                    await asyncio.gather(*(self._restore(target.name, kept.id, *one, tally) for one in some))
                after = page[-1][0]

    async def _restore(self, name: str, before_id: int, session_id: str, seq: int, tally: _Tally) -> None:
        while True:
            try:
                rows = await self._database.read(
                    lambda connection: event_rows(connection, session_id), session_id=session_id
                )
                work = partial(_decided, session_id, rows, seq, name, self._clock(), before_id)
                operation = work() if len(rows) <= INLINE else await asyncio.to_thread(work)
                outcome = await self._writer.submit(operation)
            except (UnknownEvent, SessionUnreadable) as error:
                self._database.unreadable.warn(session_id, error)
                tally.unreadable.append(session_id)
                return
            reach("after_session_restored")
            if not isinstance(outcome, Changed):
                break
        if isinstance(outcome, Appended):
            self._cache.drop(session_id)
            self._followers.notify(session_id)
            tally.sessions += 1
            tally.undone += operation.head["status"] == "undone"

    async def _restore_groups(self, target: Checkpoint) -> None:
        for follow in self._then:
            await follow()
        after: GroupKey | None = GroupKey("", "")
        while after is not None:
            after = await self._writer.submit(RestoreGroups(target.id, target.run, after, GROUPS_AT_ONCE))
            reach("after_groups_restored")


def _decided(
    session_id: str, rows: Sequence[EventRow], seq: int, name: str, at: float, before_id: int
) -> RestoreSession:
    """What takes a session back to its event `seq`. Raises UnknownEvent."""
    events = decode_events(rows)
    then = fold(session_id, events[:seq])
    expected = events[-1].seq
    # Nothing may have happened since that a restore would take back, but for claims that are open still.
    new = [] if seq == expected else restoring(then, name)
    log = [*events, *(Recorded(expected + place, at, event) for place, event in enumerate(new, 1))]
    after = fold(session_id, log)
    assert after is not None, f"session {session_id} has no events"
    after = msgspec.structs.replace(after, open_turns={})
    return RestoreSession(session_id, before_id, expected, at, new, _head(after, log))


def _head(after: Session, events: Sequence[Recorded]) -> dict[str, Any]:
    log = FoldedLog(after, events, None)
    return {name: repair.HEAD[name](log) for name in HEAD}
