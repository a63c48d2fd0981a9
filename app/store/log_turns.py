"""Operations on a session's open turn: claim, stage, commit, release, and abandoning those of dead processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from sqlalchemy import Connection

from app.crash_points import reach
from app.domain.events import Event, TurnCommitted, TurnOpened
from app.domain.groups import largest_version
from app.store import groups
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import (
    Appended,
    BaseOperation,
    Refused,
    StoredBlob,
    StoredChunk,
    abandon,
    advance_head,
    append,
    append_after,
    blob_row,
    chunk_row,
    refused,
    size_of,
    tombstone,
)


class Stale(msgspec.Struct, frozen=True):
    """Nothing was claimed: the session is no longer at the expected version."""


class Busy(msgspec.Struct, frozen=True):
    """Nothing was claimed: a live process holds the open turn."""

    turn: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None


class Claim(BaseOperation, frozen=True):
    """Claim the session's open turn, if it is at the version that the caller knows, written at `last_event_at`.

    The time distinguishes logs with the same number of events: a PostgreSQL crash may lose claims, which are not
    synced, and other events then take their places. A dead process's claim is abandoned on the way; the outcome is then
    Stale, since the version has changed.
    """

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    session_id: str
    expected: int
    last_event_at: float
    at: float
    event: TurnOpened
    lease_s: float
    is_alone: bool = False

    @property
    def fence(self) -> int:
        return self.expected + 1

    def apply(self, tx: Tx) -> Appended | Stale | Busy | Refused:
        if not tx.run(
            sql.claim_head, {"sid": self.session_id, "expected": self.expected, "last_event_at": self.last_event_at}
        ):
            return self.failure(tx)
        tx.insert(sql.insert_open_turn, [self.open_row()])
        appended = append(tx, self.session_id, self.fence, self.at, [self.event])
        reach("in_claim")
        return appended

    def open_row(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "fence": self.fence,
            "turn": self.event.turn,
            "parent_turn": self.event.parent,
            "incarnation": self.event.incarnation,
            "body_hash": self.event.body_hash,
            "retry_key": self.event.retry_key,
            "adapter": self.event.adapter,
            "opened_at": self.at,
        }

    def failure(self, tx: Tx) -> Stale | Busy | Refused:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": self.lease_s})
        live = [row for row in holders if not row[5]]
        abandon(tx, self.session_id, self.at, [row for row in holders if row[5]], "owner_dead")
        return Busy(*live[0][:5]) if live else Stale()


class Stage(BaseOperation, frozen=True):
    """Write chunks of an open turn before its commit, so that no transaction is long; False without the claim.

    If the turn ends without a commit, they are deleted.
    """

    durable: ClassVar[bool] = False
    session_id: str
    fence: int
    incarnation: int
    chunks: Sequence[StoredChunk]

    @property
    def size(self) -> int:
        return size_of(self.chunks)

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        held = {"sid": self.session_id, "fenced": self.fence, "incarnation": self.incarnation}
        if tx.one(sql.holds_open_turn, held) is None:
            return False
        tx.insert(sql.insert_chunk, [chunk_row(self.session_id, self.fence, chunk) for chunk in self.chunks])
        return True


class Commit(BaseOperation, frozen=True):
    """Commit the open turn if its fence is still valid; else nothing is written.

    `chunks` are those that were not staged. Staged ones must still be there: staging is not synced, and a PostgreSQL
    crash may have undone it but kept the claim. `is_alone`: no other turn is in flight in this process.
    """

    session_id: str
    fence: int
    incarnation: int
    at: float
    events: Sequence[Event]
    facts: bytes
    wire: bytes
    blobs: Sequence[StoredBlob]
    chunks: Sequence[StoredChunk] = ()
    is_alone: bool = False

    @property
    def size(self) -> int:
        return 1024 + len(self.facts) + len(self.wire) + size_of(self.blobs) + size_of(self.chunks)

    @property
    def staged(self) -> set[int]:
        """The numbers of this turn's staged chunks."""
        own = {chunk.number for ref in self.turn.payloads for chunk in ref.chunks if chunk.fence == self.fence}
        return own - {chunk.number for chunk in self.chunks}

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        if not self._has_staged(tx) or not _take(tx, self.session_id, self.fence, self.incarnation):
            return refused(tx, self.session_id)
        tx.insert(sql.insert_turn, [self.turn_row()])
        tx.insert(sql.insert_blob, self.blob_rows())
        tx.insert(sql.insert_chunk, self.chunk_rows())
        changes = {"sid": self.session_id, "count": len(self.events), "freed": 1, "committed": 1, "at": self.at}
        head = tx.one(groups.commit_head, {**changes, "weight": self.weight, "by": self.turn.engine})
        appended = append_after(tx, self.session_id, self.at, self.events, head)
        tombstone(tx, self.session_id, appended)
        reach("in_commit")
        return appended

    @property
    def turn(self) -> TurnCommitted:
        return next(event for event in self.events if isinstance(event, TurnCommitted))

    @property
    def weight(self) -> int | None:
        return largest_version(self.turn)

    def turn_row(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "session_id": self.session_id,
            "turn": turn.turn,
            "parent_turn": turn.parent,
            "segment": turn.segment,
            "choice_index": turn.choice_index,
            "protocol": turn.protocol,
            "facts": self.facts,
            "wire": self.wire,
        }

    def _has_staged(self, tx: Tx) -> bool:
        staged = self.staged
        if not staged:
            return True
        return staged <= {row[0] for row in tx.all(sql.chunk_numbers, {"sid": self.session_id, "fenced": self.fence})}

    def blob_rows(self) -> list[dict[str, Any]]:
        return [blob_row(self.session_id, blob) for blob in self.blobs]

    def chunk_rows(self) -> list[dict[str, Any]]:
        return [chunk_row(self.session_id, self.fence, chunk) for chunk in self.chunks]


def _take(tx: Tx, session_id: str, fence: int, incarnation: int) -> bool:
    """Release the open turn if this process still holds it under this fence; was it held?"""
    tx.lock(sql.lock_head, {"sid": session_id})
    return tx.one(sql.free_open_turn, {"sid": session_id, "fenced": fence, "incarnation": incarnation}) is not None


class Release(BaseOperation, frozen=True):
    """End the open turn without a commit."""

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    session_id: str
    fence: int
    incarnation: int
    at: float
    event: Event

    def apply(self, tx: Tx) -> Appended | Refused:
        return _release(tx, self.session_id, self.fence, self.incarnation, self.at, self.event)


def _release(tx: Tx, session_id: str, fence: int, incarnation: int, at: float, event: Event) -> Appended | Refused:
    if not _take(tx, session_id, fence, incarnation):
        return refused(tx, session_id)
    tx.run(sql.drop_staged, {"sid": session_id, "fenced": fence})
    released = advance_head(tx, session_id, at, [event], freed=1)
    reach("in_release")
    return released


REFUSED_KEPT = 8
"""How many refused replies a session keeps: the newest."""


class Reject(BaseOperation, frozen=True):
    """End the open turn because of its reply. The beginning of it (`data`) is kept; it had `reply_size` bytes."""

    durable: ClassVar[bool] = False
    session_id: str
    fence: int
    incarnation: int
    at: float
    event: Event
    reply_size: int
    data: bytes

    @property
    def size(self) -> int:
        return 512 + len(self.data)

    def apply(self, tx: Tx) -> Appended | Refused:
        released = _release(tx, self.session_id, self.fence, self.incarnation, self.at, self.event)
        if isinstance(released, Appended):
            row = {"session_id": self.session_id, "fence": self.fence, "size": self.reply_size, "data": self.data}
            tx.insert(sql.insert_refused_reply, [row])
            oldest = tx.one(sql.oldest_refused, {"sid": self.session_id, "kept": REFUSED_KEPT})
            if oldest is not None:
                tx.run(sql.drop_refused, {"sid": self.session_id, "upto": oldest[0]})
        return released


class AbandonDead(BaseOperation, frozen=True):
    """Abandon up to `most` open turns of dead processes, for sessions after `after`; returns the last id seen."""

    durable: ClassVar[bool] = False
    after: str
    most: int
    at: float
    lease_s: float

    @property
    def size(self) -> int:
        return 256 * self.most

    @property
    def session_id(self) -> str:
        """It belongs to no session, so it runs alone."""
        return ""

    def apply(self, tx: Tx) -> tuple[str | None, int]:
        found = tx.all(sql.dead_open_turns, {"after": self.after, "most": self.most, "lease_s": self.lease_s})
        for (session_id,) in found:
            holders = tx.all(sql.open_turns_of, {"sid": session_id, "lease_s": self.lease_s})
            abandon(tx, session_id, self.at, [row for row in holders if row[5]], "owner_dead")
        return (found[-1][0] if len(found) == self.most else None), len(found)


def next_dead(connection: Connection, after: str, lease_s: float) -> str | None:
    """The next session after `after` with an open turn of a dead process."""
    found: str | None = connection.execute(
        sql.dead_open_turns, {"after": after, "most": 1, "lease_s": lease_s}
    ).scalar()
    return found
