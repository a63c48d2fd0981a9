"""The operations that can be written: one class each, decided separately inside a shared transaction.

An operation never raises for what a client may have caused; it returns an outcome instead. So one that loses its fence
does not fail the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from app.domain.events import (
    BlobsTombstoned,
    ChunkKey,
    Event,
    Recorded,
    TurnAbandoned,
    encode,
    engine_error,
    name_of,
)
from app.store import statements as sql
from app.store.dialect import Tx

Result = TypeVar("Result", covariant=True)


class Operation(Protocol[Result]):
    """One write. `size` is about how many bytes it writes.

    `durable`: an acknowledgement depends on it. `runs_inline`: it takes some tens of microseconds. `is_alone`: it
    belongs to the only turn in flight in this process.
    """

    durable: ClassVar[bool]
    runs_inline: ClassVar[bool]

    @property
    def session_id(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def is_alone(self) -> bool: ...

    def apply(self, tx: Tx) -> Result: ...


class Refused(msgspec.Struct, frozen=True):
    """Nothing was written: the session has this `status`; None if there is no such session."""

    status: str | None


class Deferred:
    """The outcome of an operation that was not tried: another transaction has locked its session's row."""


DEFERRED = Deferred()

VoidedClaim = tuple[int, int]
"""A claim's fence and its incarnation."""


class Appended(msgspec.Struct, frozen=True):
    """The events were written, with these positions. `adopted` are the sessions that have a new root since, `voided`
    the claims of others that the events have ended. `may_have_members`: false if no session is below this one."""

    events: tuple[Recorded, ...]
    adopted: tuple[str, ...] = ()
    voided: tuple[VoidedClaim, ...] = ()
    may_have_members: bool = True


class StoredBlob(msgspec.Struct, frozen=True):
    """A session's blob; `data` is a compressed frame, `size` and `hash` are of the raw bytes."""

    number: int
    kind: str
    size: int
    hash: str
    data: bytes


class StoredChunk(msgspec.Struct, frozen=True):
    """A chunk of a replay payload. Its key is its turn's fence and `number`. `data` is empty if it is
    the object `location`."""

    number: int
    kind: str
    size: int
    hash: str
    data: bytes
    location: str | None = None


def append(tx: Tx, session_id: str, first: int, at: float, new: Sequence[Event]) -> Appended:
    """Write events from seq `first` on; the caller has advanced the head's version."""
    return append_all(tx, [(session_id, first, at, new)])[0]


def append_all(tx: Tx, logs: Sequence[tuple[str, int, float, Sequence[Event]]]) -> list[Appended]:
    """As `append` for each (session_id, first, at, new), in one statement."""
    rows: list[dict[str, Any]] = []
    for session_id, first, at, new in logs:
        for seq, event in enumerate(new, first):
            name = name_of(event)
            row = {
                "session_id": session_id,
                "seq": seq,
                "type": name,
                "version": event.VERSION,
                "at": at,
                "data": encode(event),
                "of_session": session_id,
                "last_seq": seq - 1,
            }
            if tx.positions is not None:
                row["position"] = next(tx.positions)
            rows.append(row)
    tx.insert(sql.insert_event, rows)
    return [
        Appended(tuple(Recorded(seq, at, event) for seq, event in enumerate(new, first))) for _, first, at, new in logs
    ]


def advance_head(tx: Tx, session_id: str, at: float, new: Sequence[Event], *, freed: int = 0) -> Appended:
    wrong = sum(engine_error(event) is not None for event in new)
    advance = {"sid": session_id, "count": len(new), "freed": freed, "at": at, "wrong": wrong}
    head = tx.one(sql.advance_head, advance)
    assert head is not None, f"open turn of session {session_id} without a head"
    return append(tx, session_id, head[0] - len(new) + 1, at, new)


def refused(tx: Tx, session_id: str) -> Refused:
    head = tx.one(sql.head, {"sid": session_id})
    return Refused(None if head is None else head[1])


class BaseOperation(msgspec.Struct, frozen=True):
    """Defaults for an operation: small, durable, with a transaction on a thread. One that belongs to no session runs
    alone."""

    durable: ClassVar[bool] = True
    runs_inline: ClassVar[bool] = False

    @property
    def session_id(self) -> str:
        return ""

    @property
    def size(self) -> int:
        return 512

    @property
    def is_alone(self) -> bool:
        return False


class Note(BaseOperation, frozen=True):
    """Append an event to the log of an open session."""

    session_id: str
    at: float
    event: Event

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = refused(tx, self.session_id)
        return advance_head(tx, self.session_id, self.at, [self.event]) if head.status == "open" else head


class TurnOperation(BaseOperation, frozen=True):
    """An operation on an open turn, by the process that holds it.

    A claim is told by its fence, the process, and when it was taken: where a PostgreSQL crash undid a claim, its fence
    may be that of another turn.
    """

    session_id: str
    fence: int
    incarnation: int
    opened_at: float

    @property
    def held(self) -> dict[str, Any]:
        """Parameters of the statements on a held open turn."""
        return {
            "sid": self.session_id,
            "fenced": self.fence,
            "holder": self.incarnation,
            "claimed_at": self.opened_at,
        }

    def holds(self, tx: Tx) -> bool:
        """Does the process still hold the turn?"""
        tx.lock(sql.lock_head, {"sid": self.session_id})
        return tx.one(sql.holds_open_turn, self.held) is not None


class Holder(NamedTuple):
    """An open turn. `is_dead`: so is the process that claimed it."""

    turn: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None
    opened_at: float
    is_dead: bool


def holders_of(tx: Tx, session_id: str, lease_s: float = 0.0) -> list[Holder]:
    """The open turns of a session. A process is dead that was ended, or has sent no heartbeat for `lease_s` seconds."""
    return [Holder(*row[1:]) for row in tx.each(sql.open_turns_of, [{"sid": session_id, "lease": lease_s}])]


def abandon(tx: Tx, session_id: str, at: float, holders: Sequence[Holder], reason: Any) -> Appended:
    """Abandon open turns of others; those that have ended meanwhile are skipped. Whose process lives may be writing
    objects of it: these are not deleted before it has ended."""
    tx.lock(sql.lock_head, {"sid": session_id})
    abandoned = [
        TurnAbandoned(holder.turn, holder.fence, reason)
        for holder in holders
        if tx.run(sql.drop_open_turn, {"sid": session_id, "fenced": holder.fence})
    ]
    if not abandoned:
        return Appended(())
    for event in abandoned:
        tx.run(sql.drop_staged_chunks, {"sid": session_id, "fenced": event.fence})
    written = {holder.fence: holder.incarnation for holder in holders}
    voided = tuple((event.fence, written[event.fence]) for event in abandoned)
    if reason in ("session_closed", "restored"):
        for follow in tx.points.voided:
            follow(tx, session_id, voided)
    appended = advance_head(tx, session_id, at, abandoned, freed=len(abandoned))
    return msgspec.structs.replace(appended, voided=voided)


def ids_elsewhere(tx: Tx, session_ids: Sequence[str]) -> set[str]:
    """Those of the ids that are of sessions in an archive, or were erased there."""
    rows = [{"sid": session_id} for session_id in session_ids]
    return {row[0] for elsewhere in tx.points.departed for row in tx.each(elsewhere.ids, rows)}


def end_staging(tx: Tx, turns: Sequence[tuple[str, int | None]]) -> None:
    """What has been staged of these turns, a session and a fence each, is not needed any more; without a fence, of all
    turns of the session."""
    for follow in tx.points.unstaged:
        follow(tx, turns)


Tombstones = tuple[str, int, Iterable[ChunkKey]]
"""A session, the event that frees chunks, and their keys."""


def tombstones_of(session_id: str, appended: Appended) -> list[Tombstones]:
    """Those that the events say."""
    events = ((recorded.seq, recorded.event) for recorded in appended.events)
    return [(session_id, seq, event.freed) for seq, event in events if isinstance(event, BlobsTombstoned)]


def free_chunks(tx: Tx, freed: Sequence[Tombstones]) -> None:
    """Delete the bytes of chunks, and tell which objects nothing refers to any more."""
    rows = [
        {"sid": session_id, "fenced": fence, "place": number, "by": by}
        for session_id, by, keys in freed
        for fence, number in keys
    ]
    objects = [(row[0], row[1]) for row in tx.each(sql.tombstone_chunks, rows) if row[0] is not None] if rows else []
    for follow in tx.points.freed:
        follow(tx, objects)


def size_of(stored: Sequence[StoredBlob | StoredChunk]) -> int:
    return sum(len(content.data) for content in stored)


def chunk_row(session_id: str, fence: int, chunk: StoredChunk) -> dict[str, Any]:
    data = None if chunk.location else chunk.data
    return {**msgspec.structs.asdict(chunk), "session_id": session_id, "fence": fence, "data": data}


def blob_row(session_id: str, blob: StoredBlob) -> dict[str, Any]:
    return {**msgspec.structs.asdict(blob), "session_id": session_id}
