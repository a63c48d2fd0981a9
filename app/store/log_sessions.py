"""Writing to a session as a whole: create, reward, close, free, erase, and its snapshot."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from app.crash_points import reach
from app.domain.events import BlobsTombstoned, RewardAssigned, SessionClosed, SessionCreated, SessionErased
from app.store import groups, rollouts
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
    """A new session. Existing where the id is taken, Refused where the root of its rollout is closed, or Circular."""

    session_id: str
    at: float
    event: SessionCreated
    body_hash: str
    group_id: str | None
    blob: StoredBlob | None

    @property
    def size(self) -> int:
        return 512 + (len(self.blob.data) if self.blob else 0)

    def apply(self, tx: Tx) -> Appended | Existing | Refused | Circular:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is not None:
            return Existing(head[1], head[3])
        root_id = None if self.parent is None else rollouts.root_for(tx, self.parent)
        if root_id == self.session_id:
            return Circular()
        root = None if root_id is None else tx.one(sql.head, {"sid": root_id})
        if root is not None and root[1] != "open":
            return Refused(root[1])
        tx.insert(sql.insert_session, [{**self.head_row(), "root_id": root_id}])
        rollouts.adopt(tx, self.session_id, root_id)
        rollouts.note(tx, self.group_id)
        rollouts.note(tx, None, root_id)
        tx.insert(sql.insert_blob, self.blob_rows())
        appended = append(tx, self.session_id, 1, self.at, [self.event])
        reach("in_create")
        return appended

    @property
    def parent(self) -> str | None:
        return self.event.config.parent

    def head_row(self) -> dict[str, Any]:
        """Of a session without a parent."""
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
            "root_id": None,
        }

    def blob_rows(self) -> list[dict[str, Any]]:
        return [] if self.blob is None else [blob_row(self.session_id, self.blob)]


class Existing(msgspec.Struct, frozen=True):
    status: str
    body_hash: str


class Circular(msgspec.Struct, frozen=True):
    """The parent that was named descends from the session itself."""


class AssignReward(BaseOperation, frozen=True):
    """In an open or a closed session. Where its root's reward stands, a session's own does not come to its head."""

    session_id: str
    at: float
    event: RewardAssigned

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        _, group_id, root_id = row
        if self.event.turn is None and not self._is_overruled(tx, root_id):
            tx.run(sql.set_reward, {"sid": self.session_id, "value": self.event.reward})
            rollouts.note(tx, group_id, root_id)
        appended = append(tx, self.session_id, row[0], self.at, [self.event])
        reach("in_reward")
        return appended

    def _is_overruled(self, tx: Tx, root_id: str | None) -> bool:
        return root_id is not None and rollouts.last_reward(tx, self.session_id, of_root=True) is not None


class ShareReward(BaseOperation, frozen=True):
    """Write the reward that a session's root has by now into the session's own log, unless it stands there.

    Whoever rewards a root does this afterwards, in a transaction of its own for each session. As the reward is read
    here, the last one stands in the end, whoever comes last.
    """

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        root_id = rollouts.root_of(tx, self.session_id)
        given = None if root_id is None else rollouts.last_reward(tx, root_id, of_root=False)
        stands = rollouts.last_reward(tx, self.session_id, of_root=True)
        if given is None or (stands is not None and _said(given) == _said(stands)):
            return Appended(())
        row = tx.one(groups.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        version, group_id, _ = row
        tx.run(sql.set_reward, {"sid": self.session_id, "value": given.reward})
        rollouts.note(tx, group_id, root_id)
        event = RewardAssigned(given.reward, given.components, of_root=True)
        return append(tx, self.session_id, version, self.at, [event])


def _said(event: RewardAssigned) -> tuple[float, dict[str, float]]:
    return event.reward, event.components


class Close(BaseOperation, frozen=True):
    """Close an open session; its open turn ends abandoned and can no longer commit. `with_root`: as its root was."""

    session_id: str
    at: float
    with_root: bool = False

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.close_head, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        rollouts.note(tx, *row)
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": 0.0})
        gone = abandon(tx, self.session_id, self.at, holders, "session_closed")
        closed = advance_head(tx, self.session_id, self.at, [SessionClosed("root" if self.with_root else "deleted")])
        reach("in_close")
        return Appended(gone.events + closed.events)


class CloseIdle(BaseOperation, frozen=True):
    """Close an open session that has no turn in flight and has not changed since `idle_since`, nor has its rollout."""

    session_id: str
    at: float
    idle_since: float

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(groups.close_idle_head, {"sid": self.session_id, "at": self.at, "idle_since": self.idle_since})
        if row is None:
            return refused(tx, self.session_id)
        rollouts.note(tx, *row)
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
        rollouts.note(tx, *row)
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
