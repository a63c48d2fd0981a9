"""Operations on a whole session: create, reward, close, free, erase, snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
from sqlalchemy import Connection, bindparam, or_, select, update

from app.crash_points import reach
from app.domain.events import (
    DEFAULT_RUN,
    AnnotationWritten,
    BlobsTombstoned,
    CloseReason,
    Event,
    Failure,
    RewardAssigned,
    RolloutJoined,
    SessionClosed,
    SessionCreated,
    SessionErased,
    UnknownEvent,
    decode,
    encode,
)
from app.domain.names import first_id
from app.domain.session import without_message
from app.store import pins, rollouts
from app.store import statements as sql
from app.store.dialect import NoRoom, Tx
from app.store.log import (
    Appended,
    BaseOperation,
    Note,
    Refused,
    StoredBlob,
    abandon,
    advance_head,
    append,
    append_all,
    blob_row,
    end_staging,
    free_chunks,
    holders_of,
    ids_elsewhere,
    refused,
)
from app.store.schema import events

# What an erasure removes from the log: the components of rewards, names and values, the values and writers of
# annotations, and the messages of failures. Only they can hold a client's text in an event. The rows keep their places
# in both orders, so that readers find no gap; each event says that something is missing. They go in steps: there may be
# megabytes of them.

WITH_TEXT = (RewardAssigned.__name__, AnnotationWritten.__name__, SessionClosed.__name__)
"""The types of event that are rewritten."""

IN_HEAD = ("note", "tags")
"""The session's annotations that are columns of its row, too."""

UNREADABLE = b""
"""Replaces an event that is damaged or of a newer release, since nobody can say which parts may stay. It still counts
as unreadable."""

_texts = (
    select(events.c.seq, events.c.type, events.c.version, events.c.data)
    .where(
        events.c.session_id == bindparam("sid"),
        events.c.seq > bindparam("after"),
        or_(*(events.c.type == name for name in WITH_TEXT)),
    )
    .order_by(events.c.seq)
)
_some_texts = _texts.limit(bindparam("most"))
_rewrite = (
    update(events)
    .where(events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place"))
    .values(version=RewardAssigned.VERSION, data=bindparam("left"))
)
assert RewardAssigned.VERSION == AnnotationWritten.VERSION == SessionClosed.VERSION


class TextRow(NamedTuple):
    """A stored reward, annotation or close, not yet decoded."""

    seq: int
    type: str
    version: int
    data: bytes


class Rewritten(NamedTuple):
    """The new content of event `seq`. `is_in_head`: the session's row shows what it said, and changes with it."""

    seq: int
    data: bytes
    is_in_head: bool = False


def text_rows(connection: Connection, session_id: str, after: int, most: int) -> list[TextRow]:
    """Up to `most` of a session's rewards, annotations and closes after event `after`, in order."""
    rows = connection.execute(_some_texts, {"sid": session_id, "after": after, "most": most})
    return [TextRow(*row) for row in rows]


def without_text(rows: Iterable[TextRow]) -> list[Rewritten]:
    """The events that hold a client's text, without it."""
    rewritten: list[Rewritten] = []
    for row in rows:
        try:
            event = decode(row.type, row.version, row.data)
        except UnknownEvent:
            if row.data != UNREADABLE:
                rewritten.append(Rewritten(row.seq, UNREADABLE))
            continue
        match event:
            case RewardAssigned() if has_text(event):
                left: Event = msgspec.structs.replace(event, components={}, components_erased=True)
                rewritten.append(Rewritten(row.seq, encode(left)))
            case AnnotationWritten() if has_text(event):
                left = msgspec.structs.replace(event, value=None, writer=None, erased=True)
                rewritten.append(Rewritten(row.seq, encode(left), event.turn is None and event.name in IN_HEAD))
            case SessionClosed(failed=Failure() as failed) if has_text(event):
                left = msgspec.structs.replace(event, failed=without_message(failed))
                rewritten.append(Rewritten(row.seq, encode(left)))
    return rewritten


class EraseTexts(BaseOperation, frozen=True):
    """Rewrite events of a session that is being erased. `freed` is their size in bytes. `unless_pinned`: nothing is
    written if a checkpoint has the session."""

    durable: ClassVar[bool] = False
    session_id: str
    rewritten: Sequence[Rewritten]
    freed: int
    unless_pinned: bool = False

    @property
    def size(self) -> int:
        return self.freed

    def apply(self, tx: Tx) -> bool:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if self.unless_pinned and pins.pinned_upto(tx, self.session_id):
            return False
        if head is None or head[1] == "open":
            return False
        rewrite(tx, self.session_id, self.rewritten)
        return True


def erase_remaining(tx: Tx, session_id: str, after: int) -> None:
    """Remove what events after event `after` hold of a client's text, in the transaction that erases the session, so
    that none can come between. They are few."""
    rows = tx.all(_texts, {"sid": session_id, "after": after})
    rewrite(tx, session_id, without_text(TextRow(*row) for row in rows))


def has_text(event: Event) -> bool:
    """Does the event hold what an erasure removes?"""
    match event:
        case RewardAssigned():
            return bool(event.components)
        case AnnotationWritten():
            return event.value is not None or event.writer is not None
        case SessionClosed():
            return event.failed is not None and event.failed.message is not None
        case _:
            return False


def rewrite(tx: Tx, session_id: str, rewritten: Sequence[Rewritten]) -> None:
    tx.run_all(_rewrite, [{"sid": session_id, "place": text.seq, "left": text.data} for text in rewritten])


class Create(BaseOperation, frozen=True):
    """Create a session. Returns Existing if the id or its generation of the run's name is taken, Refused if its root is
    closed, Circular, OfRun, or NoRoom."""

    session_id: str
    at: float
    event: SessionCreated
    blob: StoredBlob | None

    @property
    def size(self) -> int:
        return 512 + (len(self.blob.data) if self.blob else 0)

    @property
    def is_of_set(self) -> bool:
        """May it be created with others at once? A parent may be in the same batch, before its child."""
        return self.parent is None

    def apply(self, tx: Tx) -> CreateOutcome:
        return self.apply_set(tx, [self])[0]

    @classmethod
    def apply_set(cls, tx: Tx, operations: Sequence[Create]) -> list[CreateOutcome]:
        """The outcomes of creations of different sessions, in the same order, by one statement a table."""
        taken = tx.each(sql.heads, [{"sid": create.session_id} for create in operations])
        outcomes: dict[str, Any] = {head[0]: Existing(*head) for head in taken}
        named = {one for create in operations for one in (*create._own_ids, create.parent) if one is not None}
        gone = ids_elsewhere(tx, sorted(named))
        roots: dict[str, str | None] = {}
        runs: dict[str, str] = {}
        for create in operations:
            session_id = create.session_id
            if session_id in outcomes:
                continue
            if own := gone.intersection(create._own_ids):
                outcomes[session_id] = Existing(min(own), "archived", create.event.body_hash)
                continue
            if create.parent in gone:
                outcomes[session_id] = Refused("archived")
                continue
            root_id = None if create.parent is None else rollouts.root_for(tx, create.parent)
            root = None if root_id is None else tx.one(sql.head, {"sid": root_id})
            if root_id == session_id:
                outcomes[session_id] = Circular()
            elif root is not None and root[1] != "open":
                outcomes[session_id] = Refused(root[1])
            elif root is not None and create.event.config.run not in (None, root[5]):
                outcomes[session_id] = OfRun(root[5])
            else:
                roots[session_id] = root_id
                runs[session_id] = create.event.config.of_run if root is None else root[5]
        for session_id, _, _, run in rollouts.below(tx, roots):
            if run != runs[session_id]:  # a child that was there before names another run
                outcomes[session_id] = OfRun(run)
                roots.pop(session_id, None)
        begun = _begun(tx, [one for one in operations if one.session_id in roots], runs)
        for session_id, first in begun:
            outcomes[session_id] = first
            del roots[session_id]
        no_room = without_room(tx, {session_id: runs[session_id] for session_id in roots})
        for session_id, error in no_room.items():
            outcomes[session_id] = error
            del roots[session_id]
        outcomes |= {session_id: no_room[of.session_id] for session_id, of in begun if of.session_id in no_room}
        new = [create._under(tx, roots, runs) for create in operations if create.session_id in roots]
        tx.insert(sql.insert_session, [new_head(c.session_id, c.at, c.event, roots[c.session_id]) for c in new])
        adopted = rollouts.adopt(tx, roots)
        of_groups = {(runs[c.session_id], group_id) for c in new if (group_id := c.event.config.group_id) is not None}
        rollouts.note_groups(tx, sorted(of_groups))
        for session_id, root_id in roots.items():
            rollouts.note(tx, runs[session_id], None, root_id)
        blobs = [blob_row(create.session_id, create.blob) for create in new if create.blob is not None]
        tx.insert(sql.insert_blob, blobs)
        for create, appended in zip(
            new, append_all(tx, [(c.session_id, 1, c.at, [c.event]) for c in new]), strict=True
        ):
            outcomes[create.session_id] = Appended(appended.events, adopted.get(create.session_id, ()))
        reach("in_create")
        return [outcomes[create.session_id] for create in operations]

    def _under(self, tx: Tx, roots: Mapping[str, str | None], runs: Mapping[str, str]) -> Create:
        """As it is created, in the run and under the limits of its rollout; below an evaluation it is one."""
        root_id, event, run = roots[self.session_id], self.event, runs[self.session_id]
        if run != event.config.of_run:
            event = msgspec.structs.replace(event, config=msgspec.structs.replace(event.config, run=run))
        if root_id is not None and rollouts.has_limits(tx, root_id):
            event = msgspec.structs.replace(event, budget=root_id)
        if root_id is not None and rollouts.is_evaluation(tx, root_id):
            event = msgspec.structs.replace(event, config=msgspec.structs.replace(event.config, evaluation=True))
        return self if event is self.event else msgspec.structs.replace(self, event=event)

    @property
    def parent(self) -> str | None:
        return self.event.config.parent

    @property
    def _own_ids(self) -> tuple[str, ...]:
        """Its id, and that which its name's first session has if a header began it."""
        event = self.event
        if event.name is None or event.generation != 1:
            return (self.session_id,)
        return self.session_id, first_id(event.config.of_run, event.name)


def _begun(tx: Tx, creates: Iterable[Create], runs: Mapping[str, str]) -> list[tuple[str, Existing]]:
    """Of those whose generation of a name is there under another id, or is created here before them: that session. In
    the default run a name's first one has it as its id."""
    keys = [
        (create, runs[create.session_id], create.event.name)
        for create in creates
        if create.event.name is not None and (create.event.generation != 1 or runs[create.session_id] != DEFAULT_RUN)
    ]
    given = [{"of_run": run, "called": name, "number": create.event.generation} for create, run, name in keys]
    there = {(run, name): Existing(*row) for run, name, *row in reversed(tx.each(sql.generations_from, given))}
    begun = []
    for create, *key in keys:
        own = Existing(create.session_id, "open", create.event.body_hash)
        first = there.setdefault((key[0], key[1]), own)
        if first is not own:
            begun.append((create.session_id, first))
    return begun


def without_room(tx: Tx, runs: Mapping[str, str]) -> dict[str, NoRoom]:
    """Of new sessions and their runs, those that their run does not take."""
    refused: dict[str, NoRoom] = {}
    for room_of in tx.points.creating:
        for run, room in room_of(tx, Counter(runs.values())).items():
            of_run = [session_id for session_id, its_run in runs.items() if its_run == run]
            refused |= dict.fromkeys(of_run[room.left :], room)
    return refused


def new_head(session_id: str, at: float, created: SessionCreated, root_id: str | None) -> dict[str, Any]:
    """The head of a session whose log begins with `created`, a fork's too."""
    return {
        "session_id": session_id,
        "version": 1,
        "status": "open",
        "open_turns": 0,
        "turns": 0,
        "group_id": created.config.group_id,
        "created_at": at,
        "updated_at": at,
        "body_hash": created.body_hash,
        "attempt": created.config.attempt,
        "root_id": root_id,
        "name": created.name,
        "generation": created.generation,
        "run": created.config.of_run,
        "group_size": created.config.group_size,
        "evaluation": created.config.evaluation is True,
    }


class Existing(msgspec.Struct, frozen=True):
    """`session_id` has another id where it is the name's generation."""

    session_id: str
    status: str
    body_hash: str


class Circular(msgspec.Struct, frozen=True):
    """The named parent descends from the session itself."""


class OfRun(msgspec.Struct, frozen=True):
    """The session's rollout belongs to this run, not to the one that is named."""

    run: str


CreateOutcome = Appended | Existing | Refused | Circular | OfRun | NoRoom


class AssignReward(BaseOperation, frozen=True):
    """Assign a reward, to an open or closed session, which ends its failure. If its root has a reward, the head keeps
    that one."""

    session_id: str
    at: float
    event: RewardAssigned

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(sql.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        _, run, group_id, root_id = row
        if self.event.turn is None and not self._is_overruled(tx, root_id):
            tx.run(sql.set_reward, {"sid": self.session_id, "value": self.event.reward})
            rollouts.note(tx, run, group_id, root_id)
        appended = append(tx, self.session_id, row[0], self.at, [self.event])
        may_have_members = rollouts.may_have_members(tx, self.session_id)
        reach("in_reward")
        return msgspec.structs.replace(appended, may_have_members=may_have_members)

    def _is_overruled(self, tx: Tx, root_id: str | None) -> bool:
        return root_id is not None and rollouts.last_reward(tx, self.session_id, of_root=True) is not None


class ShareReward(BaseOperation, frozen=True):
    """Write the current reward of a session's root into the session's own log, unless it is there. It ends a failure.

    Run after rewarding a root, in one transaction per session. The reward is read here, so the last one wins in any
    order.
    """

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        root_id = rollouts.root_of(tx, self.session_id)
        root_reward = None if root_id is None else rollouts.last_reward(tx, root_id, of_root=False)
        own_reward = rollouts.last_reward(tx, self.session_id, of_root=True)
        is_known = own_reward is not None and root_reward is not None and _value(root_reward) == _value(own_reward)
        if root_reward is None or (is_known and tx.one(sql.is_failed, {"sid": self.session_id}) is None):
            return Appended(())
        row = tx.one(sql.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        version, run, group_id, _ = row
        tx.run(sql.set_reward, {"sid": self.session_id, "value": root_reward.reward})
        rollouts.note(tx, run, group_id, root_id)
        event = RewardAssigned(root_reward.reward, root_reward.components, of_root=True)
        return append(tx, self.session_id, version, self.at, [event])


class JoinRollout(BaseOperation, frozen=True):
    """Write into the session's log that its rollout has another root: its rows differ from before.

    Run after the root, or a session between, was created, in one transaction per session.
    """

    session_id: str
    at: float

    def apply(self, tx: Tx) -> Appended | Refused:
        row = tx.one(sql.touch, {"sid": self.session_id, "at": self.at})
        if row is None:
            return refused(tx, self.session_id)
        version, _, _, root_id = row
        joined = RolloutJoined(root_id, rollouts.has_limits(tx, root_id), rollouts.is_evaluation(tx, root_id))
        if joined.evaluation:
            tx.run(sql.set_evaluation, {"sid": self.session_id})
        return append(tx, self.session_id, version, self.at, [joined])


def _value(event: RewardAssigned) -> tuple[float, dict[str, float]]:
    return event.reward, event.components


class Finish(Note, frozen=True):
    """Let no more turns be opened in an open session. Those that are in flight go on."""

    def apply(self, tx: Tx) -> Appended | Refused:
        outcome = super().apply(tx)
        reach("in_finish")
        return outcome


class Close(BaseOperation, frozen=True):
    """Close an open session; its open turn is abandoned and can no longer commit.

    `failed`: its rollout has failed; one that is closed with its root takes over whether that has. `engine_session` is
    its id at its engine, which must be told. `known`: only at this version of its log. `idle_since`: only if it and its
    rollout have no turn in flight and are unchanged since then.
    """

    session_id: str
    at: float
    reason: CloseReason = "deleted"
    engine_session: str | None = None
    known: int | None = None
    idle_since: float | None = None
    failed: Failure | None = None

    def apply(self, tx: Tx) -> Appended | Refused:
        given = {"sid": self.session_id, "at": self.at}
        if self.known is not None:
            row = tx.one(sql.close_known_head, {**given, "known": self.known})
        elif self.idle_since is not None:
            row = tx.one(sql.close_idle_head, {**given, "idle_since": self.idle_since})
        else:
            row = tx.one(sql.close_head, given)
        if row is None:
            return refused(tx, self.session_id)
        run, group_id, root_id = row
        rollouts.note(tx, run, group_id, root_id)
        abandoned = abandon(tx, self.session_id, self.at, holders_of(tx, self.session_id), "session_closed")
        end_staging(tx, [(self.session_id, None)])
        for follow in tx.points.closed:
            follow(tx, self.session_id, self.engine_session)
        # Read behind the lock of the session's row: a reward of the root that comes later waits for it.
        failed = rollouts.failure_of(tx, root_id) if self.reason == "root" and root_id is not None else self.failed
        if failed is not None:
            tx.run(sql.set_failed, {"sid": self.session_id, "kind": failed.kind})
        closed = advance_head(tx, self.session_id, self.at, [SessionClosed(self.reason, failed)])
        reach("in_close")
        may_have_members = rollouts.may_have_members(tx, self.session_id)
        return Appended(abandoned.events + closed.events, (), abandoned.voided, may_have_members)


class FreeReplay(BaseOperation, frozen=True):
    """Tombstone the remaining replay payloads of a closed session.

    Nothing is written if the version differs from the one that the event was decided for, or with `unless_pinned` if a
    checkpoint has the session. `FreeChunks` frees the bytes, in steps.
    """

    durable: ClassVar[bool] = False
    session_id: str
    version: int
    at: float
    event: BlobsTombstoned
    unless_pinned: bool = False

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] not in sql.ENDED:
            return Refused(None if head is None else head[1])
        if head[0] != self.version or (self.unless_pinned and pins.pinned_upto(tx, self.session_id)):
            return Appended(())
        return advance_head(tx, self.session_id, self.at, [self.event])


class FreeChunks(BaseOperation, frozen=True):
    """Free the bytes of up to `most` chunks of a closed session, tombstoned by event `by`, and its refused replies.

    True while there may be more.
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
        if head is None or head[1] not in sql.ENDED:
            return False
        tx.run(sql.drop_all_refused, {"sid": self.session_id})
        chunks = tx.all(sql.live_chunks, {"sid": self.session_id, "most": self.most})
        if chunks and tx.one(sql.tombstone_event, {"sid": self.session_id, "place": self.by}) is None:
            return False  # A crash of PostgreSQL has undone the event, which was not synced: the next round writes it.
        free_chunks(tx, [(self.session_id, self.by, [(row[0], row[1]) for row in chunks])])
        return len(chunks) == self.most


class Erase(BaseOperation, frozen=True):
    """Delete the content of a session that is closed or undone; its events stay.

    A client's text in events up to `texts_upto` was removed before (`EraseTexts`), but for `in_head`.
    `unless_pinned`: refused if a checkpoint has the session.
    """

    session_id: str
    at: float
    texts_upto: int = 0
    in_head: Sequence[Rewritten] = ()
    unless_pinned: bool = False

    def apply(self, tx: Tx) -> Appended | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        if self.unless_pinned and pins.pinned_upto(tx, self.session_id):
            return refused(tx, self.session_id)
        row = tx.one(sql.erase_head, {"sid": self.session_id})
        if row is None:
            return refused(tx, self.session_id)
        rollouts.note(tx, *row)
        for statement in sql.drop_content:
            tx.run(statement, {"sid": self.session_id})
        end_staging(tx, [(self.session_id, None)])
        rewrite(tx, self.session_id, self.in_head)
        erase_remaining(tx, self.session_id, self.texts_upto)
        for follow in tx.points.erased:
            follow(tx, self.session_id)
        erased = advance_head(tx, self.session_id, self.at, [SessionErased()])
        reach("in_erase")
        return erased


class Settled(BaseOperation, frozen=True):
    """After this, the visible state of the session is on disk, and on a synchronous standby if there is one.

    Another process's commit can be visible before it is acknowledged; a replay must wait for it too. The row's lock is
    a write, and its commit waits for all earlier ones.
    """

    session_id: str

    def apply(self, tx: Tx) -> None:
        tx.lock(sql.lock_head, {"sid": self.session_id})


class SaveSnapshot(BaseOperation, frozen=True):
    """Replace the session's snapshot; an older one does no harm."""

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
