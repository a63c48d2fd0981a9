"""Writing to a session as a whole: create, reward, close, free, erase, and its snapshot."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from app.crash_points import reach
from app.domain.events import BlobsTombstoned, RewardAssigned, SessionClosed, SessionCreated, SessionErased
from app.store import groups
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.erasure import erase_later
from app.store.log import (
    Appended,
    BaseOperation,
    Refused,
    StoredBlob,
    abandon,
    advance_head,
    append,
    blob_row,
    refused,
)


class Create(BaseOperation, frozen=True):
    """A new session, or Existing where the id is taken."""

    session_id: str
    at: float
    event: SessionCreated
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
        tx.insert(sql.insert_session, [self.head_row()])
        groups.note(tx, self.group_id)
        tx.insert(sql.insert_blob, self.blob_rows())
        appended = append(tx, self.session_id, 1, self.at, [self.event])
        reach("in_create")
        return appended

    def head_row(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "version": 1,
            "status": "open",
            "open_turns": 0,
            "turns": 0,
            "group_id": self.group_id,
            "created_at": self.at,
            "updated_at": self.at,
            "body_hash": self.body_hash,
            "attempt": self.event.config.attempt,
        }

    def blob_rows(self) -> list[dict[str, Any]]:
        return [] if self.blob is None else [blob_row(self.session_id, self.blob)]


class Existing(msgspec.Struct, frozen=True):
    status: str
    body_hash: str


class AssignReward(BaseOperation, frozen=True):
    """In an open or a closed session."""

    session_id: str
    at: float
    event: RewardAssigned

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        if self.event.turn is None:
            tx.run(sql.set_reward, {"sid": self.session_id, "value": self.event.reward})
            groups.note(tx, row[1])
        appended = append(tx, self.session_id, row[0], self.at, [self.event])
        reach("in_reward")
        return appended


class Close(BaseOperation, frozen=True):
    """Close an open session; its open turn ends abandoned and can no longer commit."""

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.close_head, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        groups.note(tx, row[0])
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": 0.0})
        gone = abandon(tx, self.session_id, self.at, holders, "session_closed")
        closed = advance_head(tx, self.session_id, self.at, [SessionClosed()])
        reach("in_close")
        return Appended(gone.events + closed.events)


class CloseIdle(BaseOperation, frozen=True):
    """Close an open session that has no turn in flight and has not changed since `idle_since`."""

    session_id: str
    at: float
    idle_since: float

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.close_idle_head, {"sid": self.session_id, "at": self.at, "idle_since": self.idle_since})
        if row is None:
            return refused(tx, self.session_id)
        groups.note(tx, row[0])
        return advance_head(tx, self.session_id, self.at, [SessionClosed("idle")])


class FreeReplay(BaseOperation, frozen=True):
    """Tombstone what a closed session has left of replay payloads.

    Nothing is written at another version than that from which the event was decided. The bytes are freed by
    `FreeChunks`, in steps.
    """

    durable: ClassVar[bool] = False
    session_id: str
    version: int
    at: float
    event: BlobsTombstoned

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "closed":
            return Refused(None if head is None else head[1])
        if head[0] != self.version:
            return Appended(())
        return advance_head(tx, self.session_id, self.at, [self.event])


class FreeChunks(BaseOperation, frozen=True):
    """Free the bytes of up to `most` chunks of a closed session whose payloads event `by` has tombstoned.

    Its refused replies go with them. True while there may be more.
    """

    durable: ClassVar[bool] = False
    session_id: str
    by: int
    most: int

    @property
    def size(self) -> int:
        return self.most << 20

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "closed":
            return False
        tx.run(sql.drop_all_refused, {"sid": self.session_id})
        found = tx.all(sql.live_chunks, {"sid": self.session_id, "most": self.most})
        for fence, number in found:
            tx.run(sql.tombstone_chunk, {"sid": self.session_id, "fenced": fence, "place": number, "by": self.by})
        return len(found) == self.most


class Erase(BaseOperation, frozen=True):
    """Delete the content of a closed session; the log's skeleton stays.

    The components of rewards up to event `components_upto` have been taken out already (`EraseComponents`).
    """

    session_id: str
    at: float
    components_upto: int = 0

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.erase_head, {"sid": self.session_id})
        if row is None:
            return refused(tx, self.session_id)
        groups.note(tx, row[0])
        for statement in sql.drop_content:
            tx.run(statement, {"sid": self.session_id})
        erase_later(tx, self.session_id, self.components_upto)
        erased = advance_head(tx, self.session_id, self.at, [SessionErased()])
        reach("in_erase")
        return erased


class Settled(BaseOperation, frozen=True):
    """What is seen of the session is on disk when this has ended, and where there is a synchronous standby on that too.

    A commit of another process can be seen before it is: its own acknowledgement waits for that, a replay must as well.
    The row's lock is a write, whose commit waits for all that was written before.
    """

    session_id: str

    def apply(self, tx: Tx) -> None:
        tx.lock(sql.lock_head, {"sid": self.session_id})


class SaveSnapshot(BaseOperation, frozen=True):
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
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] == "erased":
            return
        tx.run(sql.drop_snapshot, {"sid": self.session_id})
        row = {"session_id": self.session_id, "seq": self.seq, "format": self.format, "data": self.data}
        tx.insert(sql.insert_snapshot, [row])
