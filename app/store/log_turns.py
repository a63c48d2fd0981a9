"""Operations on a session's open turn: claim, stage, commit, release, and abandoning those of dead processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection

from app import crash_points
from app.domain.events import (
    BlobsTombstoned,
    Event,
    LimitName,
    ReplyRedelivered,
    ReplyUndelivered,
    TurnCommitted,
    TurnOpened,
)
from app.store import pins, staged_tokens
from app.store import statements as sql
from app.store.dialect import Row, Tx
from app.store.log import (
    Appended,
    BaseOperation,
    Refused,
    SetOperation,
    StoredBlob,
    StoredChunk,
    Tombstones,
    TurnOperation,
    abandon,
    advance_head,
    append_all,
    blob_row,
    chunk_row,
    free_chunks,
    refused,
    size_of,
    tombstones_of,
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
    opened_at: float


class TooMany(msgspec.Struct, frozen=True):
    """Nothing was claimed: a tree has as many open turns as it may."""


class Limited(msgspec.Struct, frozen=True):
    """Nothing was claimed: a limit stands in the way. `reserved_by`: turns in flight of these processes have reserved
    what is left of it, and may give some back."""

    limit: LimitName
    reserved_by: frozenset[int] = frozenset()


class Holder(NamedTuple):
    """A row of `statements.open_turns_of`: an open turn, and whether the process that claimed it is dead."""

    turn: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None
    opened_at: float
    is_dead: bool

    def busy(self) -> Busy:
        return Busy(*self[:6])


def holders_of(tx: Tx, session_id: str, lease_s: float) -> list[Holder]:
    """The open turns of a session."""
    return [Holder(*row) for row in tx.all(sql.open_turns_of, {"sid": session_id, "lease_s": lease_s})]


class Known(msgspec.Struct, frozen=True):
    """The state that an operation was decided for: the log's version, when its last event was written, and how many
    turns were committed.

    The time tells apart logs with the same number of events: a PostgreSQL crash may lose claims, which are not synced,
    and other events then take their places.
    """

    version: int
    last_event_at: float
    turns: int


class Claim(SetOperation, frozen=True):
    """Open a turn, if no turn has been committed or undone since `known`, and fewer than `most` are open.

    The store gives the turn its number and its fence, the `seq` of the returned event. Busy names the open turn that is
    in the way, or that the request repeats. `is_retry`: its client marked it as a retry without a key. Then no other
    process may have an open turn with its body, but for those with the fences `unlike`, which are other agents'. A dead
    process's claim is abandoned where it is in the way; the outcome is then Stale, since the version has changed.
    """

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    session_id: str
    known: Known
    at: float
    event: TurnOpened
    lease_s: float
    most: int = 1
    is_retry: bool = False
    unlike: Collection[int] = ()
    is_alone: bool = False
    size: int = 512

    @classmethod
    def apply_set(cls, tx: Tx, operations: Sequence[Claim]) -> list[Appended | Stale | Busy | TooMany | Refused]:
        outcomes: dict[str, Any] = {}
        for claim in operations:
            if (busy := claim._repeated(tx)) is not None:
                outcomes[claim.session_id] = busy
        free = [claim for claim in operations if claim.session_id not in outcomes]
        won = {row[0]: row for row in tx.each(sql.claim_heads, [claim._conditions() for claim in free])}
        winners = [(claim, *won[claim.session_id][1:]) for claim in free if claim.session_id in won]
        tx.insert(sql.insert_open_turn, [claim._open_row(fence, number) for claim, fence, number in winners])
        logs = [(claim.session_id, fence, claim.at, [claim._opened(number)]) for claim, fence, number in winners]
        outcomes |= zip((session_id for session_id, *_ in logs), append_all(tx, logs), strict=True)
        for claim in free:
            if claim.session_id not in won:
                outcomes[claim.session_id] = claim._failure(tx)
        if crash_points.ARMED:
            crash_points.reach("in_claim")
        return [outcomes[claim.session_id] for claim in operations]

    def _conditions(self) -> dict[str, Any]:
        known = self.known
        return {
            "sid": self.session_id,
            "known": known.version,
            "known_at": known.last_event_at,
            "known_turns": known.turns,
            "most": self.most,
        }

    def _repeated(self, tx: Tx) -> Busy | None:
        """The open turn of a living process that the claim's request repeats: with its retry key, or as `is_retry`
        says. A dead process's is abandoned: it must not commit after all."""
        key, opened = self.event.retry_key, self.event
        if self.most == 1 or (key is None and not self.is_retry):
            return None
        tx.lock(sql.lock_head, {"sid": self.session_id})
        holders = holders_of(tx, self.session_id, self.lease_s)
        if key is not None:
            same = [holder for holder in holders if holder.retry_key == key]
        else:
            elsewhere = (held for held in holders if held.incarnation != opened.incarnation)
            same = [held for held in elsewhere if held.fence not in self.unlike and held.body_hash == opened.body_hash]
        live = [holder for holder in same if not holder.is_dead]
        if same and not live:
            abandon(tx, self.session_id, self.at, same, "owner_dead")
        return live[0].busy() if live else None

    def _opened(self, number: int) -> TurnOpened:
        """The event, with the number that the store has given the turn."""
        return msgspec.structs.replace(self.event, turn=number)

    def _open_row(self, fence: int, number: int) -> dict[str, Any]:
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
            "reserved": self.event.reserved,
        }

    def _failure(self, tx: Tx) -> Stale | Busy | TooMany | Refused:
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        if head[2] < self.most:
            return Stale()
        holders = holders_of(tx, self.session_id, self.lease_s)
        live = [holder for holder in holders if not holder.is_dead]
        dead = [holder for holder in holders if holder.is_dead]
        abandon(tx, self.session_id, self.at, dead, "owner_dead")
        if self.most > 1:
            return Stale() if dead else TooMany()
        if live and self.event.history is not None:
            return Stale()  # Another turn has decided the session's history.
        return live[0].busy() if live else Stale()


class Stage(TurnOperation, frozen=True):
    """Write chunks of an open turn before its commit, so that no transaction is long; False without the claim.

    If the turn ends without a commit, they are deleted.
    """

    durable: ClassVar[bool] = False
    chunks: Sequence[StoredChunk]

    @property
    def size(self) -> int:
        return size_of(self.chunks)

    def apply(self, tx: Tx) -> bool:
        if not self.holds(tx):
            return False
        tx.insert(sql.insert_chunk, [chunk_row(self.session_id, self.fence, chunk) for chunk in self.chunks])
        return True


class Pinned(msgspec.Struct, frozen=True):
    """Nothing was committed: checkpoints have the session up to event `upto`, and the tombstones were decided for
    fewer. They must be decided again."""

    upto: int


COMMIT_BYTES = 1024
"""About what a commit writes besides contents, blobs and chunks."""


class Commit(SetOperation, TurnOperation, frozen=True):
    """Commit the open turn if this process still holds it; else nothing is written.

    Its events depend on the turns committed before it, and tombstones on those that are open too, which may share the
    chunks that they free: they are written only to the state that they were `known` to be decided for, else the outcome
    is Stale, and they must be decided again. Tombstones spare what checkpoints have up to event `pinned_upto`; if these
    have more by now, the outcome is Pinned.

    `chunks` are those that were not staged. Staged ones must still be there: staging is not synced, and a PostgreSQL
    crash may have undone it but kept the claim. `is_alone`: no other turn is in flight in this process. `stages`: what
    staged tokens go with the commit, those of this turn or of the whole session.
    """

    at: float
    known: Known
    events: Sequence[Event]
    tokens: bytes | None
    exchange: bytes
    blobs: Sequence[StoredBlob]
    chunks: Sequence[StoredChunk] = ()
    is_alone: bool = False
    stages: Literal["turn", "session"] | None = None
    pinned_upto: int = 0
    size: int = COMMIT_BYTES

    @property
    def staged(self) -> set[int]:
        """The numbers of this turn's staged chunks."""
        own = {chunk.number for ref in self.turn.payloads for chunk in ref.chunks if chunk.fence == self.fence}
        return own - {chunk.number for chunk in self.chunks}

    @classmethod
    def apply_set(cls, tx: Tx, operations: Sequence[Commit]) -> list[Appended | Stale | Pinned | Refused]:
        for commit in operations:
            tx.lock(sql.lock_head, {"sid": commit.session_id})
        outcomes: dict[str, Any] = cls._pinned(tx, [commit for commit in operations if commit.has_tombstones])
        tried = [commit for commit in operations if commit.session_id not in outcomes and commit._has_staged(tx)]
        ended = {row[0] for row in tx.each(sql.free_open_turns, [commit._conditions() for commit in tried])}
        winners = [commit for commit in tried if commit.session_id in ended]
        tx.insert(sql.insert_turn, [commit._turn_row() for commit in winners])
        tx.insert(sql.insert_blob, [blob_row(commit.session_id, blob) for commit in winners for blob in commit.blobs])
        chunks = [(commit, chunk) for commit in winners for chunk in commit.chunks]
        tx.insert(sql.insert_chunk, [chunk_row(commit.session_id, commit.fence, chunk) for commit, chunk in chunks])
        staged = [(commit, commit.fence if commit.stages == "turn" else None) for commit in winners if commit.stages]
        tx.each(staged_tokens.drop_committed, [{"sid": commit.session_id, "fenced": fence} for commit, fence in staged])
        versions = {row[0]: row[1] for row in tx.each(sql.commit_heads, [commit._changes() for commit in winners])}
        logs = [
            (commit.session_id, versions[commit.session_id] - len(commit.events) + 1, commit.at, commit.events)
            for commit in winners
        ]
        freed: list[Tombstones] = []
        for commit, appended in zip(winners, append_all(tx, logs), strict=True):
            freed += tombstones_of(commit.session_id, appended)
            outcomes[commit.session_id] = appended
        free_chunks(tx, freed)
        if crash_points.ARMED:
            crash_points.reach("in_commit")
        return [outcomes.get(commit.session_id) or commit._failure(tx) for commit in operations]

    @staticmethod
    def _pinned(tx: Tx, commits: Sequence[Commit]) -> dict[str, Pinned]:
        """Those whose tombstones do not spare what checkpoints have."""
        upto = pins.pinned_upto_each(tx, [commit.session_id for commit in commits]) if commits else {}
        late = [commit.session_id for commit in commits if upto.get(commit.session_id, 0) > commit.pinned_upto]
        return {session_id: Pinned(upto[session_id]) for session_id in late}

    def _has_staged(self, tx: Tx) -> bool:
        staged = self.staged
        if not staged:
            return True
        return staged <= {row[0] for row in tx.all(sql.chunk_numbers, {"sid": self.session_id, "fenced": self.fence})}

    def _conditions(self) -> dict[str, Any]:
        known, is_whole = self.known, self.has_tombstones
        return {
            **self.held,
            "known": known.version if is_whole else None,
            "known_at": known.last_event_at if is_whole else None,
            "known_turns": known.turns,
        }

    def _failure(self, tx: Tx) -> Stale | Refused:
        """Stale if it is only decided for another state."""
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return Refused(None if head is None else head[1])
        is_held = tx.one(sql.holds_open_turn, self.held) is not None
        return Stale() if is_held and self._has_staged(tx) else Refused("open")

    @property
    def has_tombstones(self) -> bool:
        return any(isinstance(event, BlobsTombstoned) for event in self.events)

    @property
    def turn(self) -> TurnCommitted:
        return next(event for event in self.events if isinstance(event, TurnCommitted))

    def _changes(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "sid": self.session_id,
            "count": len(self.events),
            "moved_at": self.at,
            "weight": max(turn.version_numbers, default=None),
            "by": turn.engine,
        }

    def _turn_row(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "session_id": self.session_id,
            "turn": turn.turn,
            "parent_turn": turn.parent,
            "segment": turn.segment,
            "choice_index": turn.choice_index,
            "protocol": turn.protocol,
            "tokens": self.tokens,
            "exchange": self.exchange,
        }


class Release(TurnOperation, frozen=True):
    """End the open turn without a commit. `keeps_staged`: a retry may go on from the tokens that it has staged.
    `then` are further events."""

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    at: float
    event: Event
    keeps_staged: bool = False
    then: Sequence[Event] = ()

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        if tx.one(sql.free_open_turn, self.held) is None:
            return refused(tx, self.session_id)
        tx.run(sql.drop_staged, {"sid": self.session_id, "fenced": self.fence})
        if not self.keeps_staged:
            staged_tokens.drop_of_turn(tx, self.session_id, self.fence)
        released = advance_head(tx, self.session_id, self.at, [self.event, *self.then], freed=1)
        if crash_points.ARMED:
            crash_points.reach("in_release")
        return released


REFUSED_KEPT = 8
"""How many refused replies a session keeps: the newest."""


class Reject(TurnOperation, frozen=True):
    """End the open turn because of its reply. The beginning of it (`data`) is kept; it had `reply_size` bytes."""

    durable: ClassVar[bool] = False
    at: float
    event: Event
    reply_size: int
    data: bytes

    @property
    def size(self) -> int:
        return 512 + len(self.data)

    def apply(self, tx: Tx) -> Appended | Refused:
        end = Release(self.session_id, self.fence, self.incarnation, self.opened_at, self.at, self.event)
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


class AbsorbAttempt(BaseOperation, frozen=True):
    """A late attempt at a committed turn's request is to be given its reply; False if it may not.

    Its bytes came at `came_at` by the process's monotonic `clock`, and so long ago must be before the commit by the
    database's, so that processes' clocks need not agree. A turn absorbs at most `most` attempts, whichever processes
    they are late at.
    """

    durable: ClassVar[bool] = False
    runs_inline: ClassVar[bool] = True
    session_id: str
    turn: int
    most: int
    came_at: float
    clock: Callable[[], float]

    def apply(self, tx: Tx) -> bool:
        age_s = self.clock() - self.came_at
        given = {"sid": self.session_id, "number": self.turn, "most": self.most, "age_s": age_s}
        return tx.one(sql.absorb_attempt, given) is not None


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
        dead = tx.all(sql.dead_open_turns, {"after": self.after, "most": self.most, "lease_s": self.lease_s})
        for (session_id,) in dead:
            holders = holders_of(tx, session_id, self.lease_s)
            abandon(tx, session_id, self.at, [holder for holder in holders if holder.is_dead], "owner_dead")
        return (dead[-1][0] if len(dead) == self.most else None), len(dead)


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
    session_id: str | None = connection.execute(
        sql.dead_open_turns, {"after": after, "most": 1, "lease_s": lease_s}
    ).scalar()
    return session_id
