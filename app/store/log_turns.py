"""Operations on a session's open turn: claim, stage, commit, release, and abandoning those of dead processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import msgspec
from sqlalchemy import Connection

from app.crash_points import reach
from app.domain.events import BlobsTombstoned, Event, ReplyRedelivered, ReplyUndelivered, TurnCommitted, TurnOpened
from app.domain.groups import largest_version
from app.store import groups, pins, staged_tokens
from app.store import statements as sql
from app.store.dialect import Row, Tx
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
    held_by,
    holds,
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


class TooMany(msgspec.Struct, frozen=True):
    """Nothing was claimed: a tree has as many open turns as it may."""


class TreeClaim(msgspec.Struct, frozen=True):
    """The conditions of a claim in a tree: `turns` turns are committed, and fewer than `max_open` are open.

    `is_retry`: its client marked it as a retry without a key. Then no other process may have an open turn with its
    body, but for those with the fences `unlike`, which are other agents'.
    """

    turns: int
    max_open: int
    is_retry: bool = False
    unlike: Collection[int] = ()


class Claim(BaseOperation, frozen=True):
    """Open a turn, if the session is at version `expected`, written at `last_event_at`, and has no open turn.

    In a `tree` other turns may be open, and events that commit no turn may follow `expected`; Busy is then only a turn
    that the request repeats. The store then gives the turn its number and its fence, the `seq` of the returned event.

    The time tells apart logs with the same number of events: a PostgreSQL crash may lose claims, which are not synced,
    and other events then take their places. A dead process's claim is abandoned where it is in the way; the outcome is
    then Stale, since the version has changed.
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
    tree: TreeClaim | None = None

    def apply(self, tx: Tx) -> Appended | Stale | Busy | TooMany | Refused:
        given = {"sid": self.session_id, "expected": self.expected, "last_event_at": self.last_event_at}
        row: Row | None
        if self.tree is None:
            row = (self.expected + 1, self.event.turn) if tx.run(sql.claim_head, given) else None
        elif (busy := self._repeated(tx, self.tree)) is not None:
            return busy
        else:
            limits = {"known_turns": self.tree.turns, "max_open": self.tree.max_open}
            row = tx.one(sql.claim_tree_head, {**given, **limits})
        if row is None:
            return self.failure(tx)
        fence, number = row
        tx.insert(sql.insert_open_turn, [self.open_row(fence, number)])
        appended = append(tx, self.session_id, fence, self.at, [self.opened(number)])
        reach("in_claim")
        return appended

    def _repeated(self, tx: Tx, tree: TreeClaim) -> Busy | None:
        """The open turn of a living process that the claim's request repeats: with its retry key, or as `TreeClaim`
        says. A dead process's is abandoned: it must not commit after all."""
        key, opened = self.event.retry_key, self.event
        if key is None and not tree.is_retry:
            return None
        tx.lock(sql.lock_head, {"sid": self.session_id})
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": self.lease_s})
        if key is not None:
            same = [row for row in holders if row[4] == key]
        else:
            elsewhere = (row for row in holders if row[2] != opened.incarnation and row[1] not in tree.unlike)
            same = [row for row in elsewhere if row[3] == opened.body_hash]
        live = [row for row in same if not row[5]]
        if same and not live:
            abandon(tx, self.session_id, self.at, same, "owner_dead")
        return Busy(*live[0][:5]) if live else None

    def opened(self, number: int) -> TurnOpened:
        """The event, with the number that the store has given the turn."""
        return msgspec.structs.replace(self.event, turn=number)

    def open_row(self, fence: int, number: int) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "fence": fence,
            "turn": number,
            "parent_turn": self.event.parent,
            "incarnation": self.event.incarnation,
            "body_hash": self.event.body_hash,
            "retry_key": self.event.retry_key,
            "adapter": self.event.adapter,
            "opened_at": self.at,
        }

    def failure(self, tx: Tx) -> Stale | Busy | TooMany | Refused:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        if self.tree is not None and head[2] < self.tree.max_open:
            return Stale()
        holders = tx.all(sql.open_turns_of, {"sid": self.session_id, "lease_s": self.lease_s})
        live = [row for row in holders if not row[5]]
        dead = [row for row in holders if row[5]]
        abandon(tx, self.session_id, self.at, dead, "owner_dead")
        if self.tree is not None:
            return Stale() if dead else TooMany()
        if live and self.event.history is not None:
            return Stale()  # Another turn has decided the session's history.
        return Busy(*live[0][:5]) if live else Stale()


class Stage(BaseOperation, frozen=True):
    """Write chunks of an open turn before its commit, so that no transaction is long; False without the claim.

    If the turn ends without a commit, they are deleted. `opened_at` as in `Commit`.
    """

    durable: ClassVar[bool] = False
    session_id: str
    fence: int
    incarnation: int
    chunks: Sequence[StoredChunk]
    opened_at: float | None = None

    @property
    def size(self) -> int:
        return size_of(self.chunks)

    def apply(self, tx: Tx) -> bool:
        if not holds(tx, self.session_id, self.fence, self.incarnation, self.opened_at):
            return False
        tx.insert(sql.insert_chunk, [chunk_row(self.session_id, self.fence, chunk) for chunk in self.chunks])
        return True


class Pinned(msgspec.Struct, frozen=True):
    """Nothing was committed: checkpoints have the session up to event `upto`, and the tombstones were decided for
    fewer. They must be decided again."""

    upto: int


class Decided(msgspec.Struct, frozen=True):
    """The state for which a commit's events were decided: the log's version, when its last event was written, and how
    many turns were committed."""

    version: int
    last_event_at: float
    turns: int


class Commit(BaseOperation, frozen=True):
    """Commit the open turn if its fence is still valid; else nothing is written.

    `chunks` are those that were not staged. Staged ones must still be there: staging is not synced, and a PostgreSQL
    crash may have undone it but kept the claim. `is_alone`: no other turn is in flight in this process. `stages`: turns
    stage their tokens, which go with the commit; those that turns before it left too, but in a tree they may yet go on.

    The events of a turn of a tree depend on the turns committed before it: they are written only after `decided_at`,
    else the outcome is Stale, and they must be decided again. `opened_at` is then when its claim was taken: where a
    PostgreSQL crash undid a claim, the fence may be that of another turn of the same process. Its tombstones spare what
    checkpoints have up to event `pinned_upto`; if they have more by now, the outcome is Pinned.
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
    stages: bool = False
    decided_at: Decided | None = None
    opened_at: float | None = None
    pinned_upto: int = 0

    @property
    def size(self) -> int:
        return 1024 + len(self.facts) + len(self.wire) + size_of(self.blobs) + size_of(self.chunks)

    @property
    def staged(self) -> set[int]:
        """The numbers of this turn's staged chunks."""
        own = {chunk.number for ref in self.turn.payloads for chunk in ref.chunks if chunk.fence == self.fence}
        return own - {chunk.number for chunk in self.chunks}

    def apply(self, tx: Tx) -> Appended | Stale | Pinned | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        if self.decided_at is not None and not self._is_current(tx, self.decided_at):
            return Stale()
        if self.has_tombstones and (upto := pins.pinned_upto(tx, self.session_id)) > self.pinned_upto:
            return Pinned(upto)
        if not self._has_staged(tx) or not _take(tx, self.session_id, self.fence, self.incarnation, self.opened_at):
            return refused(tx, self.session_id)
        tx.insert(sql.insert_turn, [self.turn_row()])
        tx.insert(sql.insert_blob, self.blob_rows())
        tx.insert(sql.insert_chunk, self.chunk_rows())
        if self.stages and self.decided_at is None:
            staged_tokens.drop_of_session(tx, self.session_id)
        elif self.stages:
            staged_tokens.drop_of_turn(tx, self.session_id, self.fence)
        changes = {"sid": self.session_id, "count": len(self.events), "freed": 1, "committed": 1, "at": self.at}
        head = tx.one(groups.commit_head, {**changes, "weight": self.weight, "by": self.turn.engine})
        appended = append_after(tx, self.session_id, self.at, self.events, head)
        tombstone(tx, self.session_id, appended)
        reach("in_commit")
        return appended

    def _is_current(self, tx: Tx, decided_at: Decided) -> bool:
        """A tombstone depends on the open turns too: they may share the chunks that it frees."""
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return True  # Refused below.
        if not self.has_tombstones:
            return bool(head[4] == decided_at.turns)
        last = tx.one(sql.event_at, {"sid": self.session_id, "place": decided_at.version})
        return head[0] == decided_at.version and last is not None and last[0] == decided_at.last_event_at

    @property
    def has_tombstones(self) -> bool:
        return any(isinstance(event, BlobsTombstoned) for event in self.events)

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


def _take(tx: Tx, session_id: str, fence: int, incarnation: int, opened_at: float | None) -> bool:
    """Release the open turn if this process still holds it under this fence; was it held?"""
    tx.lock(sql.lock_head, {"sid": session_id})
    statement = sql.free_open_turn if opened_at is None else sql.free_opened_turn
    return tx.one(statement, held_by(session_id, fence, incarnation, opened_at)) is not None


class Release(BaseOperation, frozen=True):
    """End the open turn without a commit. `opened_at` as in `Commit`. `keeps_staged`: a retry may go on from the tokens
    that it has staged."""

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    session_id: str
    fence: int
    incarnation: int
    at: float
    event: Event
    opened_at: float | None = None
    keeps_staged: bool = False

    def apply(self, tx: Tx) -> Appended | Refused:
        if not _take(tx, self.session_id, self.fence, self.incarnation, self.opened_at):
            return refused(tx, self.session_id)
        tx.run(sql.drop_staged, {"sid": self.session_id, "fenced": self.fence})
        if not self.keeps_staged:
            staged_tokens.drop_of_turn(tx, self.session_id, self.fence)
        released = advance_head(tx, self.session_id, self.at, [self.event], freed=1)
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
    opened_at: float | None = None

    @property
    def size(self) -> int:
        return 512 + len(self.data)

    def apply(self, tx: Tx) -> Appended | Refused:
        end = Release(self.session_id, self.fence, self.incarnation, self.at, self.event, self.opened_at)
        released = end.apply(tx)
        if isinstance(released, Appended):
            row = {"session_id": self.session_id, "fence": self.fence, "size": self.reply_size, "data": self.data}
            tx.insert(sql.insert_refused_reply, [row])
            oldest = tx.one(sql.oldest_refused, {"sid": self.session_id, "kept": REFUSED_KEPT})
            if oldest is not None:
                tx.run(sql.drop_refused, {"sid": self.session_id, "upto": oldest[0]})
        return released


class NoteDelivery(BaseOperation, frozen=True):
    """Write down that a reply was not delivered, or was given again, in an open session."""

    durable: ClassVar[bool] = False
    session_id: str
    at: float
    event: ReplyUndelivered | ReplyRedelivered

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        return advance_head(tx, self.session_id, self.at, [self.event])


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


class AbandonLost(BaseOperation, frozen=True):
    """Abandon the open turns of this process that it knows nothing of; returns how many.

    A claim whose answer did not arrive, and one whose release was undone by a crash of PostgreSQL, belong to no turn in
    flight. `known` are the sessions and times of the claims that do: those of `Claim.at`, from before it is submitted.
    """

    durable: ClassVar[bool] = False
    incarnation: int
    at: float
    known: Collection[tuple[str, float]]

    @property
    def session_id(self) -> str:
        """It belongs to no session, so it runs alone."""
        return ""

    def apply(self, tx: Tx) -> int:
        lost: dict[str, list[Row]] = {}
        for row in tx.all(sql.open_turns_by, {"incarnation": self.incarnation}):
            if (row[2], row[3]) not in self.known:
                lost.setdefault(row[2], []).append(row)
        for session_id in sorted(lost):
            abandon(tx, session_id, self.at, lost[session_id], "not_released")
        return sum(map(len, lost.values()))


def next_dead(connection: Connection, after: str, lease_s: float) -> str | None:
    """The next session after `after` with an open turn of a dead process."""
    found: str | None = connection.execute(
        sql.dead_open_turns, {"after": after, "most": 1, "lease_s": lease_s}
    ).scalar()
    return found
