"""What can be written: one operation a class, each judged on its own inside a shared transaction.

An operation never raises for what a client may have caused; it returns an outcome that says so. So one
that loses its fence does not fail its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from app.domain import upcast
from app.domain.events import (
    VERSIONS,
    Event,
    Recorded,
    RewardAssigned,
    SessionClosed,
    SessionErased,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    name_of,
)
from app.store import statements as sql
from app.store.dialect import Row, Tx

Result = TypeVar("Result", covariant=True)


class Operation(Protocol[Result]):
    """What it is about to write: `size` is about how many bytes.

    `durable` says that an acknowledgement rests on it, `brief` that it takes some tens of microseconds.
    """

    durable: ClassVar[bool]
    brief: ClassVar[bool]

    @property
    def session_id(self) -> str: ...

    @property
    def size(self) -> int: ...

    def apply(self, tx: Tx) -> Result: ...


class Refused(msgspec.Struct, frozen=True):
    """Nothing was written: the session's status is `status`, or None where there is no such session."""

    status: str | None


class Appended(msgspec.Struct, frozen=True):
    """Written; `events` in their places."""

    events: tuple[Recorded, ...]


class Stale(msgspec.Struct, frozen=True):
    """Nothing was claimed: the session has moved on from the expected version."""


class Busy(msgspec.Struct, frozen=True):
    """Nothing was claimed: a live process holds the session's open turn."""

    turn: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None


class StoredBlob(msgspec.Struct, frozen=True):
    """A per-session blob's row; `data` is a compressed frame, `size` and `hash` those of the raw bytes."""

    number: int
    kind: str
    size: int
    hash: str
    data: bytes


def _append(tx: Tx, session_id: str, first: int, at: float, new: Sequence[Event]) -> Appended:
    """Write events at `first` and after; the caller has moved the head's version past them."""
    positions = tx.positions(len(new))
    rows: list[dict[str, Any]] = []
    for seq, event in enumerate(new, first):
        name = name_of(event)
        row = {
            "session_id": session_id,
            "seq": seq,
            "type": name,
            "version": VERSIONS[name],
            "at": at,
            "data": upcast.encode(event),
        }
        if positions is not None:
            row["position"] = next(positions)
        rows.append(row)
    tx.insert(sql.insert_event, rows)
    return Appended(tuple(Recorded(seq, at, event) for seq, event in enumerate(new, first)))


def _advance_head(
    tx: Tx, session_id: str, at: float, new: Sequence[Event], *, freed: int = 0, committed: int = 0
) -> Appended:
    row = tx.one(
        sql.advance_head, {"sid": session_id, "count": len(new), "freed": freed, "committed": committed, "at": at}
    )
    assert row is not None, f"open turn of session {session_id} without a head"
    return _append(tx, session_id, row[0] - len(new) + 1, at, new)


def _refused(tx: Tx, session_id: str) -> Refused:
    head = tx.one(sql.head, {"sid": session_id})
    return Refused(None if head is None else head[1])


class _Operation(msgspec.Struct, frozen=True):
    """An operation that writes little and is acknowledged; those that differ say so."""

    durable: ClassVar[bool] = True
    brief: ClassVar[bool] = False

    @property
    def size(self) -> int:
        return 512


class Create(_Operation, frozen=True):
    """A new session, or Existing where the id is taken."""

    session_id: str
    at: float
    event: Event
    body_hash: str
    group_id: str | None
    blob: StoredBlob | None

    @property
    def size(self) -> int:
        return 512 + (len(self.blob.data) if self.blob else 0)

    def apply(self, tx: Tx) -> Appended | Existing:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is not None:
            return Existing(head[1], head[3])
        row = {
            "session_id": self.session_id,
            "version": 1,
            "status": "open",
            "open_turns": 0,
            "turns": 0,
            "group_id": self.group_id,
            "created_at": self.at,
            "updated_at": self.at,
            "body_hash": self.body_hash,
        }
        tx.insert(sql.insert_session, [row])
        if self.blob is not None:
            tx.insert(sql.insert_blob, [_blob_row(self.session_id, self.blob)])
        return _append(tx, self.session_id, 1, self.at, [self.event])


class Existing(msgspec.Struct, frozen=True):
    status: str
    body_hash: str


class Claim(_Operation, frozen=True):
    """Take the session's one open turn, at exactly the version that the caller knows.

    A claim whose holder is dead is abandoned in the log on the way; the outcome is then Stale, because
    the version has moved.
    """

    durable: ClassVar[bool] = False
    brief: ClassVar[bool] = True
    session_id: str
    expected: int
    at: float
    event: TurnOpened
    lease_s: float

    def apply(self, tx: Tx) -> Appended | Stale | Busy | Refused:
        if not tx.run(sql.claim_head, {"sid": self.session_id, "expected": self.expected}):
            return self._why_not(tx)
        fence = self.expected + 1
        row = {
            "session_id": self.session_id,
            "fence": fence,
            "turn": self.event.turn,
            "parent_turn": self.event.parent,
            "incarnation": self.event.incarnation,
            "body_hash": self.event.body_hash,
            "retry_key": self.event.retry_key,
            "opened_at": self.at,
        }
        tx.insert(sql.insert_open_turn, [row])
        return _append(tx, self.session_id, fence, self.at, [self.event])

    def _why_not(self, tx: Tx) -> Stale | Busy | Refused:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": self.lease_s})
        live = [row for row in holders if not row[5]]
        _abandon(tx, self.session_id, self.at, [row for row in holders if row[5]], "owner_dead")
        return Busy(*live[0][:5]) if live else Stale()


def _abandon(tx: Tx, session_id: str, at: float, holders: Sequence[Row], reason: Any) -> Appended:
    """End open turns that are not the caller's own; one that has ended meanwhile is passed over."""
    tx.lock(sql.lock_head, {"sid": session_id})
    gone = [
        TurnAbandoned(row[0], row[1], reason)
        for row in holders
        if tx.run(sql.drop_open_turn, {"sid": session_id, "fenced": row[1]})
    ]
    if not gone:
        return Appended(())
    return _advance_head(tx, session_id, at, gone, freed=len(gone))


class Commit(_Operation, frozen=True):
    """End the open turn with what it brought, if the fence still stands; else nothing is written."""

    session_id: str
    fence: int
    incarnation: int
    at: float
    events: Sequence[Event]
    facts: bytes
    wire: bytes
    blobs: Sequence[StoredBlob]

    @property
    def size(self) -> int:
        return 1024 + len(self.facts) + len(self.wire) + sum(len(blob.data) for blob in self.blobs)

    def apply(self, tx: Tx) -> Appended | Refused:
        if not _take(tx, self.session_id, self.fence, self.incarnation):
            return _refused(tx, self.session_id)
        turn = self.events[-1]
        assert isinstance(turn, TurnCommitted)
        row = {
            "session_id": self.session_id,
            "turn": turn.turn,
            "parent_turn": turn.parent,
            "segment": turn.segment,
            "choice_index": turn.choice_index,
            "protocol": turn.protocol,
            "facts": self.facts,
            "wire": self.wire,
        }
        tx.insert(sql.insert_turn, [row])
        tx.insert(sql.insert_blob, [_blob_row(self.session_id, blob) for blob in self.blobs])
        return _advance_head(tx, self.session_id, self.at, self.events, freed=1, committed=1)


def _take(tx: Tx, session_id: str, fence: int, incarnation: int) -> bool:
    """The fence: does this process still hold this open turn? If so it holds it no longer."""
    tx.lock(sql.lock_head, {"sid": session_id})
    return tx.one(sql.free_open_turn, {"sid": session_id, "fenced": fence, "holder": incarnation}) is not None


class Release(_Operation, frozen=True):
    """End the open turn without a commit."""

    durable: ClassVar[bool] = False
    brief: ClassVar[bool] = True
    session_id: str
    fence: int
    incarnation: int
    at: float
    event: Event

    def apply(self, tx: Tx) -> Appended | Refused:
        if not _take(tx, self.session_id, self.fence, self.incarnation):
            return _refused(tx, self.session_id)
        return _advance_head(tx, self.session_id, self.at, [self.event], freed=1)


class AssignReward(_Operation, frozen=True):
    """In an open or a closed session."""

    session_id: str
    at: float
    event: RewardAssigned

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(sql.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return _refused(tx, self.session_id)
        if self.event.turn is None:
            tx.run(sql.set_reward, {"sid": self.session_id, "value": self.event.reward})
        return _append(tx, self.session_id, row[0], self.at, [self.event])


class Close(_Operation, frozen=True):
    """Close an open session; its open turn ends abandoned and can no longer commit."""

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        if not tx.run(sql.set_status, {"sid": self.session_id, "was": "open", "state": "closed"}):
            return _refused(tx, self.session_id)
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": 0.0})
        gone = _abandon(tx, self.session_id, self.at, holders, "session_closed")
        closed = _advance_head(tx, self.session_id, self.at, [SessionClosed()])
        return Appended(gone.events + closed.events)


class Erase(_Operation, frozen=True):
    """Delete the content of a closed session; the log's skeleton stays."""

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        if not tx.run(sql.set_status, {"sid": self.session_id, "was": "closed", "state": "erased"}):
            return _refused(tx, self.session_id)
        for statement in sql.drop_content:
            tx.run(statement, {"sid": self.session_id})
        return _advance_head(tx, self.session_id, self.at, [SessionErased()])


class SaveSnapshot(_Operation, frozen=True):
    """Replace the session's snapshot; one that is older than the stored one does no harm."""

    durable: ClassVar[bool] = False
    session_id: str
    seq: int
    format: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def apply(self, tx: Tx) -> None:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] == "erased":
            return
        tx.run(sql.drop_snapshot, {"sid": self.session_id})
        row = {"session_id": self.session_id, "seq": self.seq, "format": self.format, "data": self.data}
        tx.insert(sql.insert_snapshot, [row])


class AbandonDead(_Operation, frozen=True):
    """Abandon up to `most` open turns of dead processes, of sessions after `after`; returns the last id seen."""

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
        """Of no session in particular: it comes first in a batch."""
        return ""

    def apply(self, tx: Tx) -> tuple[str | None, int]:
        found = tx.all(sql.dead_open_turns, {"after": self.after, "most": self.most, "lease_s": self.lease_s})
        for (session_id,) in found:
            holders = tx.all(sql.open_turns_of, {"sid": session_id, "lease_s": self.lease_s})
            _abandon(tx, session_id, self.at, [row for row in holders if row[5]], "owner_dead")
        return (found[-1][0] if len(found) == self.most else None), len(found)


def _blob_row(session_id: str, blob: StoredBlob) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "number": blob.number,
        "kind": blob.kind,
        "size": blob.size,
        "hash": blob.hash,
        "data": blob.data,
    }
