"""A session: what each event changes (`apply`, `fold`), the state that this makes, and the tree of its turns.

A process keeps `Session` between requests, and a snapshot stores it. It grows by a few hundred bytes a turn, never by
the prompt, and can be dropped at any time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, Literal

import msgspec

from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    AnnotationWritten,
    BlobRef,
    BlobsTombstoned,
    BranchCause,
    ChunkRef,
    ColumnRef,
    EngineShape,
    Event,
    Failure,
    ForkRef,
    GivenIds,
    History,
    LimitName,
    LimitReached,
    PayloadRef,
    Recorded,
    ReplayKind,
    ReplyRedelivered,
    ReplyUndelivered,
    RewardAssigned,
    RolledBack,
    RolloutJoined,
    SessionClosed,
    SessionConfig,
    SessionCreated,
    SessionErased,
    SessionFinished,
    SessionRestored,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
    UnknownEvent,
    engine_error,
    shape_of,
)
from workers.codec import describe

RECENT_BLOBS = 8
"""How many blobs a new turn's parameters and tools are compared with before they are stored again."""


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What later turns need to know of a committed one. `message_count` and `token_count` include its reply.

    `opened_seq` and `seq` are of its `TurnOpened` (0 for a copied turn, which has none) and its `TurnCommitted`, which
    process `incarnation` wrote at `committed_at`. `retry_count` as in `TurnOpened`.
    """

    number: int
    parent: int
    segment: int
    base_messages: int
    message_count: int
    message_hashes: tuple[str, ...]
    client_hash: str
    base_tokens: int
    token_count: int
    tokens_hash: str
    tokens_text_bytes: int
    output_tokens: int
    finish_reason: str | None
    retry_key: str | None
    body_hash: str
    seq: int
    params: int
    tools: int | None
    protocol: str
    branch: int = 0
    branch_cause: BranchCause | None = None
    carries: int | None = None
    agent_id: str | None = None
    opened_seq: int = 0
    incarnation: int = 0
    committed_at: float = 0.0
    echo: int | None = None
    calls_hash: str | None = None
    bare_hash: str | None = None
    left_out: tuple[str, ...] = ()
    given_ids: GivenIds | None = None
    odd_ids: bool = False
    odd_arguments: bool = False
    retry_count: int = 0
    tool_errors: int = 0

    @property
    def shape(self) -> EngineShape:
        return shape_of(self.protocol)

    @property
    def history_parent(self) -> int:
        """The turn whose messages it continues; 0 if it begins a conversation."""
        return self.parent if self.base_messages else 0

    @property
    def token_parent(self) -> int:
        """The turn whose tokens, or text alone, it continues; 0 if its prompt begins anew."""
        return self.parent if self.base_tokens or (not self.tokens_hash and self.base_messages) else 0

    def supersedes(self, other: Turn) -> bool:
        """Is this, once it has a child, what a client got instead of `other`: the same request, sent once more?"""
        return (
            self.opened_seq > other.seq
            and self.body_hash == other.body_hash != ""
            and (self.history_parent, self.agent_id) == (other.history_parent, other.agent_id)
        )

    @property
    def input_hashes(self) -> tuple[str, ...]:
        """The hashes of the request's messages that are not its parent's."""
        return self.message_hashes[:-1]


class Turns:
    """Turns by number, iterated in the order of commits. Immutable: `added` returns another one.

    Successors share one list, so that a commit does not copy all turns before it. Each sees only its own first turns,
    of which there are `count`; a second successor of the same state copies. `newest` is the turn committed last.
    """

    __slots__ = ("_places", "_turns", "count", "newest")

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns = list(turns)
        self._places = {turn.number: place for place, turn in enumerate(self._turns)}
        self.count = len(self._turns)
        self.newest: Turn | None = self._turns[-1] if self._turns else None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Turn]:
        return islice(self._turns, self.count)

    def __reversed__(self) -> Iterator[Turn]:
        return (self._turns[place] for place in range(self.count - 1, -1, -1))

    def __contains__(self, number: object) -> bool:
        return self._places.get(number, self.count) < self.count  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, number: int) -> Turn:
        place = self._places[number]
        if place >= self.count:
            raise KeyError(number)
        return self._turns[place]

    def get(self, number: int) -> Turn | None:
        place = self._places.get(number, self.count)
        return self._turns[place] if place < self.count else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Turns({list(self)!r})"

    def committed_after(self, seq: int) -> Iterator[Turn]:
        """The turns whose commits are later events than `seq`, the newest first."""
        return takewhile(lambda turn: turn.seq > seq, reversed(self))

    def added(self, turn: Turn) -> Turns:
        """These turns and a new one. Raises ValueError if its number is taken."""
        count = self.count
        if self._places.get(turn.number, count) < count:
            raise ValueError(f"turn {turn.number} is committed twice")
        if not count or len(self._turns) != count:
            return Turns([*self, turn])
        after = Turns.__new__(Turns)
        after._turns, after._places, after.count = self._turns, self._places, count + 1
        after._turns.append(turn)
        after._places[turn.number] = count
        after.newest = turn
        return after

    def tentative(self) -> Turns:
        """These turns, to which one may be added to see what would follow: the shared storage stays as it is."""
        return _Tentative(self)


class _Tentative(Turns):
    """Turns of which the last, if any, is not in the shared storage."""

    __slots__ = ("_base", "_last")

    def __init__(self, base: Turns, last: Turn | None = None) -> None:
        self._base = base
        self._last = last
        self.count = base.count + (last is not None)
        self.newest = last or base.newest

    def __iter__(self) -> Iterator[Turn]:
        yield from self._base
        if self._last is not None:
            yield self._last

    def __reversed__(self) -> Iterator[Turn]:
        if self._last is not None:
            yield self._last
        yield from reversed(self._base)

    def __contains__(self, number: object) -> bool:
        return number in self._base or (self._last is not None and number == self._last.number)

    def __getitem__(self, number: int) -> Turn:
        turn = self.get(number)
        if turn is None:
            raise KeyError(number)
        return turn

    def get(self, number: int) -> Turn | None:
        if self._last is not None and number == self._last.number:
            return self._last
        return self._base.get(number)

    def added(self, turn: Turn) -> Turns:
        if self._last is not None:
            return Turns([*self, turn])
        if turn.number in self:
            raise ValueError(f"turn {turn.number} is committed twice")
        return _Tentative(self._base, turn)


EMPTY = Turns()

Status = Literal["open", "closed", "erased", "undone"]
"""`undone`: the session was created after the checkpoint to which the store was taken back."""


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A readable replay payload: rows [start, stop) in consecutive chunks; see `PayloadRef`.

    `is_own`: only the chunks with the turn's own rows are left, which an export of the sampled rows reads.
    """

    kind: ReplayKind
    start: int
    stop: int
    sent: int
    shape: tuple[int, ...]
    chunks: tuple[ChunkRef, ...]
    is_own: bool = False

    @property
    def row_ids(self) -> int:
        return math.prod(self.shape)


class OpenTurn(msgspec.Struct, frozen=True, array_like=True):
    """A claim: the turn that is in flight."""

    turn: int
    parent: int
    fence: int
    incarnation: int
    body_hash: str
    retry_key: str | None
    adapter: str | None = None
    agent_id: str | None = None
    reserved: int | None = None
    retry_count: int = 0


class Affinity(msgspec.Struct, frozen=True, array_like=True):
    """The engine that has the session's prefix; `control` names the affinity where a client asked for it."""

    engine: str
    control: str | None = None


class AssignedReward(msgspec.Struct, frozen=True, array_like=True):
    reward: float
    components: dict[str, float]


class Annotation(msgspec.Struct, frozen=True, array_like=True):
    """What event `seq` says of the session or a turn: a JSON value of `size` bytes, which the event holds, or a
    column, whose numbers are in the table `annotation_columns`."""

    seq: int
    at: float
    writer: str | None
    size: int
    column: ColumnRef | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """As in `SessionFinished`."""

    snapshot_id: str
    producer_finished: bool


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The state after event `version`.

    `turns` are the committed turns: a tree, of which a linear session has one live path. `open_turns` are the turns in
    flight, by number; `last_turn` is the highest number given out, `branches` counts the branches. `last_event_at` is
    when the last event was written: with `version` it distinguishes this log from another with as many events. `blobs`
    are the per-session blobs that a turn may refer to again. `payloads` are the replay payloads, by turn, that have not
    been tombstoned. `reward` is the session's own, or, where `has_roots_reward`, that of the root of its rollout.
    `fork`: it began as a copy. `deliveries` are what is written down of replies that were not delivered, by turn: True
    once such a reply was given to a retry, None if that one may not have been read. `history` says who may attach
    where; None until the first turn decides. `is_reclaimed`: it was closed because it was idle. `name` and `generation`
    as in `SessionCreated`; `frees_name`: the name's next request begins the next one. `undone` are the turns that a
    restore has undone, and `undone_payloads` their replay payloads that have not been tombstoned; they are in
    none of the other fields. `annotations` are those of each turn by their names, under 0 those of the session; `note`
    and `tags` are the values of two of these. `images` are the blobs of its images by their SHA-256; `blobs` has none
    of them.

    `budgets` are the sessions whose limits its turns count against: itself, the root of its rollout. `spent_turns` and
    `spent_tokens` are what it has used of them. `reached` are the limits that ended or refused something, by the turn
    that they ended, or after which nothing more was allowed. `finished`: no turn is opened any more. `failed`: it was
    closed as failed, and no reward has come since. `engine_errors` counts turns that ended without a commit and
    requests that limits refused; `tool_errors` failed calls whose results its turns brought, but for discarded ones.
    """

    session_id: str
    version: int
    status: Status
    config: SessionConfig
    body_hash: str
    created_at: float
    last_event_at: float
    metadata: BlobRef | None = None
    turns: Turns = EMPTY
    open_turns: dict[int, OpenTurn] = {}
    blobs: tuple[BlobRef, ...] = ()
    blob_count: int = 0
    reward: AssignedReward | None = None
    turn_rewards: dict[int, AssignedReward] = {}
    closed_at: float | None = None
    payloads: dict[int, tuple[Payload, ...]] = {}
    affinity: Affinity | None = None
    has_roots_reward: bool = False
    fork: ForkRef | None = None
    last_turn: int = 0
    branches: int = 0
    deliveries: dict[int, bool | None] = {}
    history: History | None = "linear"
    is_reclaimed: bool = False
    undone: Turns = EMPTY
    undone_payloads: dict[int, tuple[Payload, ...]] = {}
    note: str | None = None
    tags: tuple[str, ...] = ()
    images: dict[str, int] = {}
    budgets: tuple[str, ...] = ()
    spent_turns: int = 0
    spent_tokens: int = 0
    reached: dict[int, LimitName] = {}
    annotations: dict[int, dict[str, Annotation]] = {}
    name: str | None = None
    generation: int | None = None
    frees_name: bool = False
    finished: Finished | None = None
    failed: Failure | None = None
    engine_errors: int = 0
    tool_errors: int = 0

    @property
    def revision(self) -> int:
        """A number that grows with every turn that is opened or committed: what has been seen of the session."""
        newest = self.turns.newest
        return max(1, 0 if newest is None else newest.seq, *(held.fence for held in self.open_turns.values()))

    @property
    def is_complete(self) -> bool:
        """Was it finished, by an agent that came to its end, and is no turn in flight?"""
        return self.finished is not None and self.finished.producer_finished and not self.open_turns

    @property
    def is_text(self) -> bool:
        """Are its turns recorded without ids?"""
        return self.config.capture == "text"

    @property
    def context_turns(self) -> int:
        """How many of the first turns were copied from another session, and are in that one's loss alone."""
        return 0 if self.fork is None else self.fork.context_turns

    @property
    def has_next(self) -> bool:
        """Does the name's next request begin another session, or has one begun it?"""
        return self.frees_name and self.status != "undone"

    @property
    def open_turn(self) -> OpenTurn | None:
        """The turn in flight of a linear session, which has at most one."""
        return next(iter(self.open_turns.values()), None)

    @property
    def is_tree(self) -> bool:
        return self.history == "tree"

    @property
    def leaf(self) -> Turn | None:
        """The newest turn: in a linear session the end of its live path, in a tree that of its main branch."""
        return self.turns.newest

    @property
    def path(self) -> tuple[int, ...]:
        """The turns from the root to the leaf: a linear session's live turns."""
        leaf = self.leaf
        return () if leaf is None else tuple(self.line(leaf.number))

    @property
    def every_turn(self) -> list[Turn]:
        """The committed turns, those that are undone too, in the order of their commits."""
        return sorted((*self.turns, *self.undone), key=lambda turn: turn.seq) if self.undone else list(self.turns)

    @property
    def every_payload(self) -> dict[int, tuple[Payload, ...]]:
        """The readable replay payloads, by turn, those of turns that are undone too."""
        return {**self.payloads, **self.undone_payloads} if self.undone_payloads else self.payloads

    @property
    def with_undone(self) -> Session:
        """The state as if nothing were undone."""
        every = {"turns": Turns(self.every_turn), "payloads": self.every_payload}
        return msgspec.structs.replace(self, **every, undone=EMPTY, undone_payloads={}) if self.undone else self

    def turn(self, number: int) -> Turn:
        """A committed turn. Raises KeyError."""
        return self.turns[number]

    def payload(self, number: int, kind: ReplayKind) -> Payload | None:
        """Turn `number`'s payload of a kind; None where there was none or it has been tombstoned."""
        return next((payload for payload in self.whole_payloads(number) if payload.kind == kind), None)

    def whole_payloads(self, number: int) -> list[Payload]:
        """Those of turn `number` of which every row can be read."""
        return [payload for payload in self.payloads.get(number, ()) if not payload.is_own]

    def first_own_row(self, number: int) -> int:
        """The first row of turn `number` that no turn before it has: a sequence's last token has none yet."""
        turn = self.turn(number)
        return min(turn.base_tokens, self.turn(turn.parent).token_count - 1) if turn.base_tokens else 0

    def own_payloads(self, number: int) -> tuple[Payload, ...]:
        """What is kept of turn `number`'s payloads where only its own rows are: the chunks that have them."""
        first = self.first_own_row(number)
        kept: list[Payload] = []
        for payload in self.payloads[number]:
            chunks = tuple(chunk for chunk in payload.chunks if chunk.start + chunk.rows > first)
            if chunks:
                kept.append(msgspec.structs.replace(payload, start=chunks[0].start, chunks=chunks, is_own=True))
        return tuple(kept)

    def line(self, number: int) -> list[int]:
        """The turns from the root to turn `number`."""
        return [turn.number for turn in self._chain(number, lambda turn: turn.parent > 0)]

    def message_chain(self, number: int) -> list[Turn]:
        """The turns whose messages make up the history after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.base_messages > 0)

    def token_chain(self, number: int) -> list[Turn]:
        """The turns whose tokens make up the sequence after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.token_parent > 0)

    def _chain(self, number: int, continues: Callable[[Turn], bool]) -> list[Turn]:
        chain = [self.turn(number)]
        while continues(chain[-1]):
            chain.append(self.turn(chain[-1].parent))
        chain.reverse()
        return chain


def encode_session(session: Session) -> bytes:
    """The state as a snapshot stores it."""
    return msgspec.msgpack.encode(session, enc_hook=list)


def decode_session(data: bytes) -> Session:
    """Raises MsgspecError."""
    return msgspec.msgpack.decode(data, type=Session, dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    return kind(msgspec.convert(value, list[Turn]))


def apply(session: Session | None, recorded: Recorded, session_id: str) -> Session:
    """The state one event later.

    Raises UnknownEvent if the event does not follow: after a gap, or if the log does not begin with SessionCreated.
    """
    event, seq = recorded.event, recorded.seq
    if session is None:
        if seq != 1 or not isinstance(event, SessionCreated):
            raise UnknownEvent(f"the log of session {session_id} does not begin with SessionCreated")
        return Session(
            session_id=session_id,
            version=1,
            status="open",
            config=event.config,
            body_hash=event.body_hash,
            created_at=recorded.at,
            last_event_at=recorded.at,
            metadata=event.metadata,
            blob_count=0 if event.metadata is None else 1,
            fork=event.fork,
            history=event.config.history,
            budgets=_budgets(session_id, event.config, event.budget),
            name=event.name,
            generation=event.generation,
        )
    if seq != session.version + 1:
        raise _does_not_follow(session, recorded)
    # The two events of every turn come first, each in one step: others are rare.
    if isinstance(event, TurnOpened):
        opened = OpenTurn(
            event.turn,
            event.parent,
            seq,
            event.incarnation,
            event.body_hash,
            event.retry_key,
            event.adapter,
            event.agent_id,
            event.reserved,
            event.retry_count,
        )
        return msgspec.structs.replace(
            session,
            version=seq,
            last_event_at=recorded.at,
            open_turns={**session.open_turns, event.turn: opened},
            last_turn=max(session.last_turn, event.turn),
            history=session.history or event.history,
        )
    if isinstance(event, TurnCommitted):
        return _committed(session, event, recorded)
    return msgspec.structs.replace(
        session, version=seq, last_event_at=recorded.at, **_changes(session, event, recorded)
    )


def fold(session_id: str, events: Iterable[Recorded], session: Session | None = None) -> Session | None:
    """The state after all events, from `session` on; None for an empty log. Raises UnknownEvent."""
    newest = session
    for state in states(session_id, list(events), session):
        newest = state
    return newest


def states(session_id: str, events: Sequence[Recorded], session: Session | None = None) -> Iterator[Session]:
    """The state after each of the events, from `session` on.

    Raises UnknownEvent at an event that does not follow; a restore does not if it goes back to before `session`.
    """
    targets = {recorded.event.to_seq for recorded in events if isinstance(recorded.event, SessionRestored)}
    earlier: dict[int, Session] = {}
    for recorded in events:
        if session is not None and isinstance(recorded.event, SessionRestored):
            then = earlier.get(recorded.event.to_seq)
            if then is None and recorded.event.to_seq:
                raise UnknownEvent(f"session {session_id}: event {recorded.seq} goes back to before what is known")
            session = restored(session, then, recorded)
        else:
            session = apply(session, recorded, session_id)
        if session.version in targets:
            earlier[session.version] = session
        yield session


def restored(now: Session, then: Session | None, recorded: Recorded) -> Session:
    """The state `then` again, after the restore `recorded`; None: the session was created later.

    What the log has given out since (numbers of turns, branches and blobs) is not given out again, and what was
    tombstoned since stays so.
    """
    if recorded.seq != now.version + 1:
        raise _does_not_follow(now, recorded)
    turns = EMPTY if then is None else then.turns
    payloads = now.every_payload
    after = msgspec.structs.replace(
        now,
        version=recorded.seq,
        last_event_at=recorded.at,
        turns=turns,
        undone=Turns(turn for turn in now.every_turn if turn.number not in turns),
        payloads={turn: kept for turn, kept in payloads.items() if turn in turns},
        undone_payloads={turn: kept for turn, kept in payloads.items() if turn not in turns},
        open_turns={},
        **(_UNDONE if then is None else {name: getattr(then, name) for name in _OF_THE_TIME}),
    )
    return msgspec.structs.replace(after, closed_at=recorded.at) if after.status == "undone" else after


_OF_THE_TIME = (
    *("status", "reward", "turn_rewards", "has_roots_reward", "annotations", "note", "tags"),
    *("history", "closed_at", "is_reclaimed", "frees_name", "deliveries", "finished", "failed"),
    *("spent_turns", "spent_tokens", "reached", "engine_errors", "tool_errors"),
)
_UNDONE: dict[str, Any] = {
    "status": "undone",
    "reward": None,
    "turn_rewards": {},
    "has_roots_reward": False,
    "annotations": {},
    "note": None,
    "tags": (),
    "is_reclaimed": False,
    "frees_name": True,  # Its name, if it has one, goes on from before it.
    "deliveries": {},
    "spent_turns": 0,
    "spent_tokens": 0,
    "reached": {},
    "finished": None,
    "failed": None,
    "engine_errors": 0,
    "tool_errors": 0,
}


def _does_not_follow(session: Session, recorded: Recorded) -> UnknownEvent:
    return UnknownEvent(
        f"session {session.session_id} has version {session.version}; event {recorded.seq} does not follow"
    )


def _changes(session: Session, event: Event, recorded: Recorded) -> dict[str, Any]:
    match event:
        case TurnRejected() | TurnAbandoned():
            left = {number: held for number, held in session.open_turns.items() if number != event.turn}
            return {"open_turns": left, "engine_errors": session.engine_errors + (engine_error(event) is not None)}
        case ReplyUndelivered() | ReplyRedelivered():
            told = isinstance(event, ReplyRedelivered) or (None if event.is_unknown else False)
            return {"deliveries": {**session.deliveries, event.turn: told}}
        case RolledBack():
            return {"tool_errors": session.tool_errors - event.tool_errors}
        case RolloutJoined():
            root = event.root if event.has_limits else None
            config = msgspec.structs.replace(session.config, evaluation=True) if event.evaluation else session.config
            return {"config": config, "budgets": _budgets(session.session_id, config, root)}
        case LimitReached():
            spent = session.spent_tokens + event.sampled
            reached = {**session.reached, event.turn: event.limit}
            return {"reached": reached, "spent_tokens": spent, "engine_errors": session.engine_errors + event.refused}
        case BlobsTombstoned():
            return _tombstoned(session, event)
        case RewardAssigned():
            return _rewarded(session, event)
        case AnnotationWritten():
            return _annotated(session, event, recorded)
        case AffinityBound():
            return {"affinity": Affinity(event.engine, event.control)}
        case AffinityReleased():
            return {"affinity": None}
        case SessionFinished():
            return {"finished": session.finished or Finished(event.snapshot_id, event.producer_finished)}
        case SessionClosed():
            why = {"is_reclaimed": event.reason == "idle", "frees_name": event.reason == "finished"}
            return {"status": "closed", "open_turns": {}, "closed_at": recorded.at, "failed": event.failed, **why}
        case SessionErased():
            gone: dict[str, Any] = {"open_turns": {}, "payloads": {}, "undone_payloads": {}}
            said: dict[str, Any] = {"annotations": {}, "note": None, "tags": ()}
            return {"status": "erased", **gone, **said, **_without_text(session)}
        case _:
            raise UnknownEvent(f"session {session.session_id}: {type(event).__name__} has no place at {recorded.seq}")


def _budgets(session_id: str, config: SessionConfig, root: str | None) -> tuple[str, ...]:
    own = () if config.limits is None else (session_id,)
    return own if root is None else (*own, root)


def _tombstoned(session: Session, event: BlobsTombstoned) -> dict[str, Any]:
    kept, undone = {**session.payloads}, {**session.undone_payloads}
    for turn in event.turns:
        kept.pop(turn, None)
        undone.pop(turn, None)
    kept.update((turn, session.own_payloads(turn)) for turn in event.own)
    return {"payloads": kept, "undone_payloads": undone}


def _without_text(session: Session) -> dict[str, Any]:
    """Rewards stay as numbers, and a failure as its kind. A state from before the events were rewritten may still hold
    the rest."""
    return {
        "failed": session.failed and without_message(session.failed),
        "reward": None if session.reward is None else AssignedReward(session.reward.reward, {}),
        "turn_rewards": {turn: AssignedReward(assigned.reward, {}) for turn, assigned in session.turn_rewards.items()},
    }


def without_message(failed: Failure) -> Failure:
    return failed if failed.message is None else Failure(failed.kind, erased=True)


def _rewarded(session: Session, event: RewardAssigned) -> dict[str, Any]:
    """An episode has one reward: the root's replaces any other in all of its sessions. It ends a failure."""
    reward = AssignedReward(event.reward, event.components)
    if event.turn is not None:
        return {"turn_rewards": {**session.turn_rewards, event.turn: reward}}
    if session.has_roots_reward and not event.of_root:
        return {}
    failed = session.failed if event.restored else None
    return {"reward": reward, "has_roots_reward": event.of_root, "failed": failed}


def _annotated(session: Session, event: AnnotationWritten, recorded: Recorded) -> dict[str, Any]:
    of_turn = {**session.annotations.get(event.turn or 0, {})}
    if event.value is None and event.column is None:
        of_turn.pop(event.name, None)
    else:
        of_turn[event.name] = Annotation(recorded.seq, recorded.at, event.writer, event.size, event.column)
    changes: dict[str, Any] = {"annotations": {**session.annotations, event.turn or 0: of_turn}}
    if event.turn is None and event.name == "note":
        changes["note"] = event.value
    elif event.turn is None and event.name == "tags":
        changes["tags"] = tuple(event.value or ())
    return changes


def _committed(session: Session, event: TurnCommitted, recorded: Recorded) -> Session:
    """Raises UnknownEvent unless the parent is an earlier turn, so that every chain of turns ends."""
    newest = session.turns.newest
    if event.parent:
        is_known = (newest is not None and newest.number == event.parent) or event.parent in session.turns
        follows = is_known and event.parent < event.turn
    else:
        follows = event.turn > 0 and not (event.base_messages or event.base_tokens)
    if not follows or (session.undone.count and event.turn in session.undone):
        raise _cannot_follow(session, event)
    held = session.open_turns.get(event.turn)
    branch, cause = _derived_branch(session, event) if event.branch is None else (event.branch, event.branch_cause)
    turn = Turn(
        number=event.turn,
        parent=event.parent,
        segment=event.segment,
        base_messages=event.base_messages,
        message_count=event.base_messages + event.new_messages + 1,
        message_hashes=event.message_hashes,
        client_hash=event.client_hash,
        base_tokens=event.base_tokens,
        token_count=event.base_tokens + event.suffix_tokens + event.output_tokens,
        tokens_hash=event.tokens_hash,
        tokens_text_bytes=event.tokens_text_bytes,
        output_tokens=event.output_tokens,
        finish_reason=event.finish_reason,
        retry_key=event.retry_key,
        body_hash=event.body_hash,
        seq=recorded.seq,
        params=event.params,
        tools=event.tools,
        protocol=event.protocol,
        branch=branch,
        branch_cause=cause,
        carries=event.carries,
        agent_id=event.agent_id,
        opened_seq=0 if held is None else held.fence,
        incarnation=0 if held is None else held.incarnation,
        retry_count=0 if held is None else held.retry_count,
        committed_at=recorded.at,
        echo=event.echo,
        calls_hash=event.calls_hash,
        bare_hash=event.bare_hash,
        left_out=event.left_out,
        given_ids=event.given_ids,
        odd_ids=event.odd_ids,
        odd_arguments=event.odd_arguments,
        tool_errors=event.tool_errors,
    )
    try:
        turns = session.turns.added(turn)
    except ValueError as error:
        raise _cannot_follow(session, event) from error
    changes: dict[str, Any] = {}
    if event.new_blobs:
        shared = tuple(ref for ref in event.new_blobs if ref.kind != "image")
        changes["blobs"] = (*session.blobs, *shared)[-RECENT_BLOBS:]
        if len(shared) < len(event.new_blobs):
            new = {ref.hash: ref.number for ref in event.new_blobs if ref.kind == "image"}
            changes["images"] = {**session.images, **new}
        changes["blob_count"] = session.blob_count + len(event.new_blobs)
    if held is not None and held.reserved is not None:
        changes["spent_turns"] = session.spent_turns + 1
        changes["spent_tokens"] = session.spent_tokens + event.output_tokens
    if event.tool_errors:
        changes["tool_errors"] = session.tool_errors + event.tool_errors
    if event.limit is not None:
        changes["reached"] = {**session.reached, event.turn: event.limit}
    if event.payloads:
        live = tuple(_payload(session, event.parent, ref) for ref in event.payloads)
        changes["payloads"] = {**session.payloads, event.turn: live}
    return msgspec.structs.replace(
        session,
        version=recorded.seq,
        last_event_at=recorded.at,
        turns=turns,
        open_turns={number: other for number, other in session.open_turns.items() if number != event.turn},
        last_turn=max(session.last_turn, event.turn),
        branches=max(session.branches, branch + 1),
        **changes,
    )


def _cannot_follow(session: Session, event: TurnCommitted) -> UnknownEvent:
    return UnknownEvent(f"session {session.session_id}: turn {event.turn} cannot follow turn {event.parent}")


def _derived_branch(session: Session, event: TurnCommitted) -> tuple[int, BranchCause | None]:
    """The branch of a turn whose event does not name it: a copy.

    The newest turn is the only live one without a child.
    """
    newest = session.leaf
    if newest is None:
        return 0, "start"
    if event.parent == newest.number:
        if event.continues_tokens:
            return newest.branch, None
        return session.branches, "drift" if event.base_messages else "root"
    new = event.message_hashes[:-1]
    siblings = (
        turn for turn in session.turns if (turn.parent, turn.base_messages) == (event.parent, event.base_messages)
    )
    return session.branches, "retry" if any(turn.input_hashes == new for turn in siblings) else "fork"


def _payload(session: Session, parent: int, ref: PayloadRef) -> Payload:
    """The payload with the chunks shared with its parent's. Raises UnknownEvent if those are missing."""
    before = session.payload(parent, ref.kind)
    shared = () if before is None else before.chunks[: ref.shared]
    if len(shared) != ref.shared:
        raise UnknownEvent(f"session {session.session_id}: {ref.kind} shares chunks that turn {parent} does not have")
    return Payload(ref.kind, ref.start, ref.stop, ref.sent, ref.shape, (*shared, *ref.chunks))


RID_MARK = "turnlog-"

RID_CHARACTERS = 32
"""Length after the mark. All rids have one length, so that none is a prefix of another: engines abort by prefix."""


def rid_of(session_id: str, fence: int, incarnation: int) -> str:
    """A generation's id at the engine. A claim is not synced: one that is lost with the power leaves its fence to
    another process's turn, which must not be taken for it."""
    name = f"{session_id}\0{fence}\0{incarnation}"
    return RID_MARK + hashlib.sha256(name.encode()).hexdigest()[:RID_CHARACTERS]


def engine_session_of(session_id: str) -> str:
    """A session's id at the engine. It holds a character that no id chosen by a client may have."""
    return "turnlog~" + hashlib.sha256(session_id.encode()).hexdigest()[:RID_CHARACTERS]


describe(Session, list[Turn])
