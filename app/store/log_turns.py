"""Operations on a session's open turn: claim, stage, commit, release, and abandoning those of dead processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from sqlalchemy import Connection

from app import crash_points
from app.domain.events import (
    BlobsTombstoned,
    Event,
    LimitName,
    Recorded,
    RolledBack,
    TurnCommitted,
    TurnOpened,
    encode,
)
from app.store import pins
from app.store import statements as sql
from app.store.damage import BrokenRow
from app.store.dialect import ClaimRow, CommitRow, LogRow, Tx
from app.store.log import (
    Appended,
    BaseOperation,
    Deferred,
    Holder,
    Note,
    Refused,
    StoredBlob,
    StoredChunk,
    Tombstones,
    TurnOperation,
    abandon,
    advance_head,
    blob_row,
    chunk_row,
    end_staging,
    free_chunks,
    holders_of,
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


class Known(msgspec.Struct, frozen=True):
    """The state that an operation was decided for: the log's version, when its last event was written, and how many
    turns were committed.

    The time tells apart logs with the same number of events: a PostgreSQL crash may lose claims, which are not synced,
    and other events then take their places.
    """

    version: int
    last_event_at: float
    turns: int


class Seen(NamedTuple):
    """A session whose head is locked: what it is like until the transaction ends.

    `now` is its state, and `last_turn` the highest number given to a turn. `is_ahead`: its log goes on from what the
    operation knows, and since then no turn has been undone, turns have not been ended, and no other limits hold.
    `pinned_upto` and `staged`, the numbers of the turn's staged chunks, are those of a commit that asks for them.
    """

    status: str
    now: Known
    open_turns: int
    last_turn: int
    is_ahead: bool
    holders: list[Holder]
    pinned_upto: int
    staged: Collection[int]


ClaimRefused = Stale | Busy | TooMany | Limited | Refused


class Claim(BaseOperation, frozen=True):
    """Open a turn, if since `known` no turn has been committed or undone and the session has joined no other rollout,
    whose limits the claim would not know, and fewer than `most` are open.

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

    @property
    def needs_look(self) -> bool:
        """It may repeat an open turn. A linear session's only one is in the way as it is."""
        return self.most > 1 and (self.is_retry or self.event.retry_key is not None)

    @property
    def row(self) -> ClaimRow:
        known, event = self.known, self.event
        asked = event.parent, event.incarnation, event.body_hash, event.retry_key, event.adapter
        fits = self.session_id, known.version, known.turns, self.most, event.turn, known.last_event_at
        return ClaimRow(*fits, *asked, self.at, event.reserved, event.VERSION, encode(event))

    def decide(self, tx: Tx, seen: Seen | None) -> Claim | ClaimRefused | Deferred:
        """The claim for the session as it is, or why there is none."""
        if seen is None or seen.status != "open":
            return Refused(None if seen is None else seen.status)
        now, open_turns = seen.now, seen.open_turns
        if same := self._repeated(seen.holders):
            live = [holder for holder in same if not holder.is_dead]
            if live:
                return Busy(*live[0][:6])
            # Its owner may only seem dead, and must not commit after all.
            ended = abandon(tx, self.session_id, self.at, same, "owner_dead").events
            now, open_turns = Known(ended[-1].seq, self.at, now.turns), open_turns - len(ended)
        if open_turns < self.most:
            if now.turns != self.known.turns or not seen.is_ahead:
                return Stale()
            event = msgspec.structs.replace(self.event, turn=seen.last_turn + 1)
            return msgspec.structs.replace(self, known=now, event=event)
        dead = [holder for holder in seen.holders if holder.is_dead]
        live = [holder for holder in seen.holders if not holder.is_dead]
        abandon(tx, self.session_id, self.at, dead, "owner_dead")
        if self.most > 1:
            return Stale() if dead else TooMany()
        if live and self.event.history is not None:
            return Stale()  # Another turn has decided the session's history.
        return Busy(*live[0][:6]) if live else Stale()

    def _repeated(self, holders: Sequence[Holder]) -> list[Holder]:
        """The open turns that the request repeats: with its retry key, or as `is_retry` says."""
        key, opened = self.event.retry_key, self.event
        if not self.needs_look:
            return []
        if key is not None:
            return [holder for holder in holders if holder.retry_key == key]
        elsewhere = (held for held in holders if held.incarnation != opened.incarnation)
        return [held for held in elsewhere if held.fence not in self.unlike and held.body_hash == opened.body_hash]

    def apply(self, tx: Tx) -> Appended | ClaimRefused:
        outcome: Appended | ClaimRefused = look_and_write(tx, [self])[self.session_id]
        return outcome


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


class Commit(TurnOperation, frozen=True):
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
    def turn(self) -> TurnCommitted:
        for event in self.events:
            if type(event) is TurnCommitted:
                return event
        raise ValueError("a commit has a turn")

    @property
    def staged(self) -> set[int]:
        """The numbers of this turn's staged chunks."""
        own = {chunk.number for ref in self.turn.payloads for chunk in ref.chunks if chunk.fence == self.fence}
        return own - {chunk.number for chunk in self.chunks}

    @property
    def has_tombstones(self) -> bool:
        return any(type(event) is BlobsTombstoned for event in self.events)

    @property
    def needs_look(self) -> bool:
        """A checkpoint may have what its tombstones free, or its staged chunks may be gone."""
        for event in self.events:
            if type(event) is BlobsTombstoned:
                return True
            if type(event) is TurnCommitted and event.payloads and self.staged:
                return True
        return False

    @property
    def row(self) -> CommitRow:
        known, turn = self.known, self.turn
        fits = self.session_id, known.version, known.turns, self.fence, self.incarnation, self.opened_at
        head = len(self.events), self.at, max(turn.version_numbers, default=None), turn.engine
        lost = sum(event.tool_errors for event in self.events if type(event) is RolledBack)
        place = turn.turn, turn.parent, turn.segment, turn.choice_index
        return CommitRow(*fits, *head, turn.tool_errors - lost, *place, turn.protocol, self.tokens, self.exchange)

    @property
    def log(self) -> list[LogRow]:
        return [
            LogRow(self.session_id, seq, type(event).__name__, event.VERSION, self.at, encode(event))
            for seq, event in enumerate(self.events, self.known.version + 1)
        ]

    def decide(self, tx: Tx, seen: Seen | None) -> Commit | Stale | Pinned | Refused:
        """The commit for the session as it is, or why there is none."""
        if seen is None or seen.status != "open":
            return Refused(None if seen is None else seen.status)
        held = self.fence, self.incarnation, self.opened_at
        if held not in [(one.fence, one.incarnation, one.opened_at) for one in seen.holders]:
            return Refused("open")
        if not self.staged <= set(seen.staged):
            return Refused("open")
        if self.has_tombstones:
            if seen.pinned_upto > self.pinned_upto:
                return Pinned(seen.pinned_upto)
            if seen.now != self.known:
                return Stale()
        if seen.now.turns != self.known.turns:
            return Stale()
        return msgspec.structs.replace(self, known=seen.now)

    def also(self, tx: Tx) -> None:
        """What a feature's kind of commit writes behind the turn's rows."""

    def apply(self, tx: Tx) -> Appended | Stale | Pinned | Refused:
        outcome: Appended | Stale | Pinned | Refused = look_and_write(tx, [self])[self.session_id]
        return outcome


def write(tx: Tx, claims: Sequence[Claim], commits: Sequence[Commit]) -> dict[str, Appended]:
    """Write those whose sessions are as they know them, and which nobody else has locked; the outcomes by session.

    No two may be of one session, and none may need a look at it first.
    """
    taken = tx.open_turns([claim.row for claim in claims]) if claims else ()
    written = {
        claim.session_id: Appended((Recorded(claim.known.version + 1, claim.at, claim.event),))
        for claim in claims
        if claim.session_id in taken
    }
    if crash_points.ARMED and written:
        crash_points.reach("in_claim")
    if not commits:
        return written
    log = [event for commit in commits for event in commit.log]
    advanced = tx.commit_turns([commit.row for commit in commits], log)
    blobs: list[dict[str, Any]] = []
    chunks: list[dict[str, Any]] = []
    staged: list[tuple[str, int | None]] = []
    freed: list[Tombstones] = []
    for commit in commits:
        session_id = commit.session_id
        if session_id not in advanced:
            continue
        new = enumerate(commit.events, commit.known.version + 1)
        written[session_id] = Appended(tuple(Recorded(seq, commit.at, event) for seq, event in new))
        if commit.blobs:
            blobs += [blob_row(session_id, blob) for blob in commit.blobs]
        if commit.chunks:
            chunks += [chunk_row(session_id, commit.fence, chunk) for chunk in commit.chunks]
        if commit.stages:
            staged.append((session_id, commit.fence if commit.stages == "turn" else None))
        if len(commit.events) > 1:
            freed += tombstones_of(session_id, written[session_id])
        commit.also(tx)
    if blobs:
        tx.insert(sql.insert_blob, blobs)
    if chunks:
        tx.insert(sql.insert_chunk, chunks)
    if staged:
        end_staging(tx, staged)
    if freed:
        free_chunks(tx, freed)
    if crash_points.ARMED and advanced:
        crash_points.reach("in_commit")
    return written


def look_and_write(tx: Tx, operations: Sequence[Claim | Commit]) -> dict[str, Any]:
    """Claims and commits, each of another session, that may not be for the session as it is: the head is locked and
    looked at, and what is decided then is written by the same statements. The outcomes by session."""
    seen = _look(tx, operations)
    outcomes: dict[str, Any] = {}
    claims: list[Claim] = []
    commits: list[Commit] = []
    for operation in operations:
        decided = operation.decide(tx, seen.get(operation.session_id))
        if isinstance(decided, Claim):
            claims.append(decided)
        elif isinstance(decided, Commit):
            commits.append(decided)
        else:
            outcomes[operation.session_id] = decided
    written = write(tx, claims, commits)
    assert len(written) == len(claims) + len(commits), "a session changed while its head was locked"
    return outcomes | written


def _look(tx: Tx, operations: Sequence[Claim | Commit]) -> dict[str, Seen]:
    """The sessions of the operations that there are."""
    asked = {operation.session_id: operation for operation in operations}
    for session_id in asked:
        tx.lock(sql.lock_head, {"sid": session_id})
    holders: dict[str, list[Holder]] = defaultdict(list)
    leases = [{"sid": sid, "lease": one.lease_s if isinstance(one, Claim) else 0.0} for sid, one in asked.items()]
    for session_id, *holder in tx.each(sql.open_turns_of, leases):
        holders[session_id].append(Holder(*holder))
    freeing = [sid for sid, operation in asked.items() if isinstance(operation, Commit) and operation.has_tombstones]
    pinned = pins.pinned_upto_each(tx, freeing) if freeing else {}
    staged: dict[str, set[int]] = defaultdict(set)
    staging = [
        {"sid": sid, "fenced": operation.fence}
        for sid, operation in asked.items()
        if isinstance(operation, Commit) and operation.staged
    ]
    for session_id, number in tx.each(sql.chunk_numbers, staging):
        staged[session_id].add(number)
    seen: dict[str, Seen] = {}
    heads = [{"sid": sid, "known": operation.known.version} for sid, operation in asked.items()]
    for sid, status, version, at, turns, open_turns, last_turn, was_at, is_overtaken in tx.each(sql.heads_since, heads):
        if at is None:
            raise BrokenRow("a head whose last event is not in the log")
        is_ahead = was_at == asked[sid].known.last_event_at and not is_overtaken
        now = Known(version, at, turns)
        seen[sid] = Seen(status, now, open_turns, last_turn, is_ahead, holders[sid], pinned.get(sid, 0), staged[sid])
    return seen


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
        tx.run(sql.drop_staged_chunks, {"sid": self.session_id, "fenced": self.fence})
        if not self.keeps_staged:
            end_staging(tx, [(self.session_id, self.fence)])
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


class NoteDelivery(Note, frozen=True):
    """Write down that a reply was not delivered, or was given again, in an open session."""

    durable: ClassVar[bool] = False


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

    def apply(self, tx: Tx) -> int:
        lost: dict[str, set[float]] = {}
        for session_id, opened_at in tx.all(sql.open_turns_by, {"incarnation": self.incarnation}):
            if (session_id, opened_at) not in self.known:
                lost.setdefault(session_id, set()).add(opened_at)
        count = 0
        for session_id in sorted(lost):
            own = [holder for holder in holders_of(tx, session_id) if holder.incarnation == self.incarnation]
            unknown = [holder for holder in own if holder.opened_at in lost[session_id]]
            count += len(abandon(tx, session_id, self.at, unknown, "not_released").events)
        return count


def next_dead(connection: Connection, after: str, lease_s: float) -> str | None:
    """The next session after `after` with an open turn of a dead process."""
    session_id: str | None = connection.execute(
        sql.dead_open_turns, {"after": after, "most": 1, "lease_s": lease_s}
    ).scalar()
    return session_id
