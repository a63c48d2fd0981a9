"""A session's state: a fold of its events.

A process keeps `Session` between requests, and a snapshot stores it. It grows by a few hundred bytes a turn, never by
the prompt, and can be dropped at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    BlobRef,
    BlobsTombstoned,
    ChunkRef,
    Event,
    ForkRef,
    PayloadRef,
    Protocol,
    Recorded,
    ReplayKind,
    RewardAssigned,
    RolledBack,
    SessionClosed,
    SessionConfig,
    SessionCreated,
    SessionErased,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
    UnknownEvent,
)

Status = Literal["open", "closed", "erased"]


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What later turns need to know of a committed one. `message_count` and `token_count` include its reply."""

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
    protocol: Protocol


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A readable replay payload: rows [start, stop) in consecutive chunks; see `PayloadRef`."""

    kind: ReplayKind
    start: int
    stop: int
    sent: int
    shape: tuple[int, ...]
    chunks: tuple[ChunkRef, ...]

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


class Affinity(msgspec.Struct, frozen=True, array_like=True):
    """The engine that has the session's prefix; `control` names the affinity where a client asked for it."""

    engine: str
    control: str | None = None


class AssignedReward(msgspec.Struct, frozen=True, array_like=True):
    reward: float
    components: dict[str, float]


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The state after event `version`.

    `turns[n - 1]` is committed turn n, live or discarded. `path` lists the live turns in order; its last
    is the leaf. `open_turns` are the turns in flight, by number. `last_event_at` is when the last event was written:
    with `version` it tells this log from another that has as many events. `blobs` are the per-session blobs that a turn
    may refer to again. `payloads` are the replay payloads, by turn, that have not been tombstoned. `reward` is the
    session's own, or, where `has_roots_reward`, that of the root of its rollout. `fork`: it began as a copy.
    """

    session_id: str
    version: int
    status: Status
    config: SessionConfig
    body_hash: str
    created_at: float
    last_event_at: float
    metadata: BlobRef | None = None
    turns: tuple[Turn, ...] = ()
    path: tuple[int, ...] = ()
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

    @property
    def context_turns(self) -> int:
        """How many of the first turns were copied from another session, and are in that one's loss alone."""
        return 0 if self.fork is None else self.fork.context_turns

    @property
    def open_turn(self) -> OpenTurn | None:
        """The turn in flight of a linear session, which has at most one."""
        return next(iter(self.open_turns.values()), None)

    @property
    def leaf(self) -> Turn | None:
        return self.turns[self.path[-1] - 1] if self.path else None

    def turn(self, number: int) -> Turn:
        return self.turns[number - 1]

    def payload(self, number: int, kind: ReplayKind) -> Payload | None:
        """Turn `number`'s payload of a kind; None where there was none or it has been tombstoned."""
        return next((payload for payload in self.payloads.get(number, ()) if payload.kind == kind), None)

    def superseded_by(self, number: int) -> int:
        """How many live turns the commit of turn `number` rolled back: those from its parent to the previous leaf.

        A committed turn becomes the leaf, so the turn before it was the leaf then.
        """
        parent, before, count = self.turn(number).parent, number - 1, 0
        while before > parent:
            before, count = self.turn(before).parent, count + 1
        return count

    def message_chain(self, number: int) -> list[Turn]:
        """The turns whose messages make up the history after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.base_messages > 0)

    def token_chain(self, number: int) -> list[Turn]:
        """The turns whose tokens make up the sequence after turn `number`, oldest first."""
        return self._chain(number, lambda turn: turn.base_tokens > 0)

    def _chain(self, number: int, continues: Callable[[Turn], bool]) -> list[Turn]:
        chain = [self.turn(number)]
        while continues(chain[-1]):
            chain.append(self.turn(chain[-1].parent))
        chain.reverse()
        return chain


RECENT_BLOBS = 8
"""How many blobs a new turn's parameters and tools are compared with before they are stored again."""


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
        )
    if seq != session.version + 1:
        raise UnknownEvent(f"session {session_id} has version {session.version}; event {seq} does not follow")
    return msgspec.structs.replace(
        session, version=seq, last_event_at=recorded.at, **_changes(session, event, recorded)
    )


def fold(session_id: str, events: Iterable[Recorded], session: Session | None = None) -> Session | None:
    """The state after all events, from `session` on; None for an empty log."""
    for recorded in events:
        session = apply(session, recorded, session_id)
    return session


def _changes(session: Session, event: Event, recorded: Recorded) -> dict[str, Any]:
    match event:
        case TurnOpened():
            return {"open_turns": {**session.open_turns, event.turn: _opened(event, recorded.seq)}}
        case TurnCommitted():
            return _committed(session, event, recorded.seq)
        case TurnRejected() | TurnAbandoned():
            return {"open_turns": _without(session.open_turns, event.turn)}
        case RolledBack():
            return {"path": session.path[: len(session.path) - len(event.discarded)]}
        case BlobsTombstoned():
            dropped = set(event.turns)
            return {"payloads": {turn: kept for turn, kept in session.payloads.items() if turn not in dropped}}
        case RewardAssigned():
            return _rewarded(session, event)
        case AffinityBound():
            return {"affinity": Affinity(event.engine, event.control)}
        case AffinityReleased():
            return {"affinity": None}
        case SessionClosed():
            return {"status": "closed", "open_turns": {}, "closed_at": recorded.at}
        case SessionErased():
            return {"status": "erased", "open_turns": {}, "payloads": {}, **_without_components(session)}
        case _:
            raise UnknownEvent(f"session {session.session_id}: {type(event).__name__} has no place at {recorded.seq}")


def _without_components(session: Session) -> dict[str, Any]:
    """Rewards stay as numbers. A state from before the components were removed may still hold them."""
    return {
        "reward": None if session.reward is None else AssignedReward(session.reward.reward, {}),
        "turn_rewards": {turn: AssignedReward(one.reward, {}) for turn, one in session.turn_rewards.items()},
    }


def _rewarded(session: Session, event: RewardAssigned) -> dict[str, Any]:
    """An episode has one reward: the root's replaces any other in all of its sessions."""
    reward = AssignedReward(event.reward, event.components)
    if event.turn is not None:
        return {"turn_rewards": {**session.turn_rewards, event.turn: reward}}
    if session.has_roots_reward and not event.of_root:
        return {}
    return {"reward": reward, "has_roots_reward": event.of_root}


def _opened(event: TurnOpened, seq: int) -> OpenTurn:
    return OpenTurn(event.turn, event.parent, seq, event.incarnation, event.body_hash, event.retry_key, event.adapter)


def _without(open_turns: dict[int, OpenTurn], turn: int) -> dict[int, OpenTurn]:
    return {number: one for number, one in open_turns.items() if number != turn}


def _committed(session: Session, event: TurnCommitted, seq: int) -> dict[str, Any]:
    _require_parent(session, event)
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
        seq=seq,
        params=event.params,
        tools=event.tools,
        protocol=event.protocol,
    )
    changes: dict[str, Any] = {
        "turns": (*session.turns, turn),
        "path": (*session.path, turn.number),
        "open_turns": _without(session.open_turns, event.turn),
    }
    if event.new_blobs:
        changes["blobs"] = (*session.blobs, *event.new_blobs)[-RECENT_BLOBS:]
        changes["blob_count"] = session.blob_count + len(event.new_blobs)
    if event.payloads:
        live = tuple(_payload(session, event.parent, ref) for ref in event.payloads)
        changes["payloads"] = {**session.payloads, event.turn: live}
    return changes


def _require_parent(session: Session, event: TurnCommitted) -> None:
    """The parent is an earlier turn, so that every chain of turns ends. Raises UnknownEvent."""
    continues = event.base_messages > 0 or event.base_tokens > 0
    if event.turn != len(session.turns) + 1 or not int(continues) <= event.parent < event.turn:
        raise UnknownEvent(f"session {session.session_id}: turn {event.turn} cannot follow turn {event.parent}")


def _payload(session: Session, parent: int, ref: PayloadRef) -> Payload:
    """The payload with the chunks shared with its parent's. Raises UnknownEvent if those are missing."""
    before = session.payload(parent, ref.kind)
    shared = () if before is None else before.chunks[: ref.shared]
    if len(shared) != ref.shared:
        raise UnknownEvent(f"session {session.session_id}: {ref.kind} shares chunks that turn {parent} does not have")
    return Payload(ref.kind, ref.start, ref.stop, ref.sent, ref.shape, (*shared, *ref.chunks))
