"""Creates forks: new sessions that begin after a turn of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from app.crash_points import reach
from app.domain.events import BlobsTombstoned, ForkRef, Recorded, UnknownEvent
from app.domain.session import Session, fold
from app.errors import (
    IdempotencyMismatch,
    Overloaded,
    SessionEnded,
    SessionNotFound,
    SessionUnreadable,
)
from app.features.forks.operation import Fork, ForkSource, read_source
from app.features.forks.rules import Forked, config_of_fork, fork
from app.sessions.lifecycle import Clock, Sessions, hash_of, metadata_blob, metadata_ref, refusal
from app.store.dialect import NoRoom
from app.store.log import Appended, Refused, StoredBlob
from app.store.log_sessions import Existing
from app.store.log_turns import Stale
from app.store.ports import Database, Writer
from app.store.sessions import decode_events
from app.store.writer import LOCK_RETRY_PAUSE_S

if TYPE_CHECKING:
    from app.features.objects.objects import Objects

TRIES = 20
"""Attempts to decide a fork while the source keeps tombstoning payloads."""


class ForkOrder(msgspec.Struct, frozen=True):
    """A client's request for forks. None: as in the source. `loss`: the copied turns are in the forks' loss too."""

    source: str
    turn: int
    group_id: str | None = None
    metadata: dict[str, Any] | None = None
    loss: bool = False


class _Decided(msgspec.Struct, frozen=True):
    """What the forks' logs will be. `tombstone` is the number of the source's newest tombstone event then, or 0."""

    forked: Forked
    tombstone: int


class Forks:
    def __init__(
        self, database: Database, writer: Writer, sessions: Sessions, clock: Clock, features: Mapping[str, Any]
    ) -> None:
        self._database = database
        self._writer = writer
        self._sessions = sessions
        self._clock = clock
        self._features = features

    async def fork(self, order: ForkOrder, fork_ids: Sequence[str]) -> None:
        """Create a session for each of these ids, each in one transaction; idempotent for the same ids and order.

        Raises SessionNotFound, SessionClosed (the source is erased), NotFound (no such turn), IdempotencyMismatch (an
        id belongs to another fork), SessionEnded (the fork was closed since), SessionUnreadable, StoreFull, Overloaded,
        PayloadsUnavailable.
        """
        await self._sessions.require_room(*fork_ids)
        blob = None if order.metadata is None else metadata_blob(order.metadata)
        decided: _Decided | None = None
        for nth, fork_id in enumerate(fork_ids):
            if nth:
                await asyncio.sleep(2 * LOCK_RETRY_PAUSE_S)  # Writes to the source that waited for its row come first.
            for _ in range(TRIES):
                decided = decided or await self._decide(order, blob)
                if await self._write(order, fork_id, decided, blob):
                    break
                decided = None
            else:
                raise Overloaded(f"session {order.source} changed during every attempt to fork it: retry")
            reach("after_fork")

    async def _decide(self, order: ForkOrder, blob: StoredBlob | None) -> _Decided:
        source = await self._database.read(
            partial(read_source, session_id=order.source), one_moment=True, session_id=order.source
        )
        return await asyncio.to_thread(_decided, order, source, blob)

    async def _write(self, order: ForkOrder, fork_id: str, decided: _Decided, blob: StoredBlob | None) -> bool:
        """Create one fork; False if the source has changed and the fork must be decided again."""
        forked = decided.forked
        copies = None
        objects: Objects | None = self._features.get("objects")
        if objects is not None and forked.chunks:
            copies = await objects.copied(order.source, fork_id, forked.chunks)
        operation = Fork(order.source, fork_id, self._clock(), forked, blob, decided.tombstone, copies)
        outcome = None
        try:
            outcome = await self._writer.submit(operation)
        finally:
            # Where the outcome is not known, a fork that was created has taken them already.
            if objects is not None and copies is not None and not isinstance(outcome, Appended):
                await objects.end_copies(fork_id, copies)
        if isinstance(outcome, NoRoom):
            raise outcome.error
        if isinstance(outcome, Refused):
            raise refusal(order.source, outcome.status)
        if isinstance(outcome, Existing):
            if outcome.body_hash != forked.created.body_hash:
                raise IdempotencyMismatch("the idempotency key was used for another fork of this session")
            if outcome.status != "open":
                raise SessionEnded(f"session {fork_id} is {outcome.status}; an id is never used again")
        return not isinstance(outcome, Stale)


def _decided(order: ForkOrder, fork_source: ForkSource, blob: StoredBlob | None) -> _Decided:
    """Decide the fork from the source's log. Raises SessionNotFound, SessionClosed, NotFound, SessionUnreadable."""
    try:
        log = decode_events(fork_source.log)
        source = fold(order.source, log)
        if source is None:
            raise SessionNotFound.of(order.source)
        forked = _forked(order, source, log, blob)
    except UnknownEvent as error:
        raise SessionUnreadable(f"session {order.source}: {error}") from error
    lacking = fork_source.lacks(forked)
    if lacking is not None:
        raise SessionUnreadable(f"session {order.source}: {lacking}")
    tombstones = (one.seq for one in log if isinstance(one.event, BlobsTombstoned))
    return _Decided(forked, max(tombstones, default=0))


def _forked(order: ForkOrder, source: Session, log: Sequence[Recorded], blob: StoredBlob | None) -> Forked:
    config = config_of_fork(source, order.group_id)
    metadata = None if blob is None else metadata_ref(blob)
    body_hash = hash_of(config, order.metadata, ForkRef(order.source, order.turn, 0, order.loss))
    return fork(source, log, order.turn, config=config, body_hash=body_hash, metadata=metadata, loss=order.loss)
