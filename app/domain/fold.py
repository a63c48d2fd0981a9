"""A session as the fold of its events: what each event changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    BlobsTombstoned,
    BranchCause,
    Event,
    PayloadRef,
    Recorded,
    ReplyRedelivered,
    ReplyUndelivered,
    RewardAssigned,
    RolledBack,
    RolloutJoined,
    SessionClosed,
    SessionCreated,
    SessionErased,
    SessionNoted,
    SessionRestored,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
    UnknownEvent,
)
from app.domain.session import EMPTY, Affinity, AssignedReward, OpenTurn, Payload, Session
from app.domain.turns import Turn, Turns

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
            history=event.config.history,
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
    *("status", "reward", "turn_rewards", "has_roots_reward", "note", "tags"),
    *("history", "closed_at", "is_reclaimed", "deliveries"),
)
_UNDONE: dict[str, Any] = {
    "status": "undone",
    "reward": None,
    "turn_rewards": {},
    "has_roots_reward": False,
    "note": None,
    "tags": (),
    "is_reclaimed": False,
    "deliveries": {},
}


def _does_not_follow(session: Session, recorded: Recorded) -> UnknownEvent:
    return UnknownEvent(
        f"session {session.session_id} has version {session.version}; event {recorded.seq} does not follow"
    )


def _changes(session: Session, event: Event, recorded: Recorded) -> dict[str, Any]:
    match event:
        case TurnRejected() | TurnAbandoned():
            return {"open_turns": {number: held for number, held in session.open_turns.items() if number != event.turn}}
        case ReplyUndelivered() | ReplyRedelivered():
            given = isinstance(event, ReplyRedelivered)
            return {"deliveries": {**session.deliveries, event.turn: given}}
        case RolledBack() | RolloutJoined():
            return {}
        case BlobsTombstoned():
            return _tombstoned(session, set(event.turns))
        case RewardAssigned():
            return _rewarded(session, event)
        case SessionNoted():
            return _noted(session, event)
        case AffinityBound():
            return {"affinity": Affinity(event.engine, event.control)}
        case AffinityReleased():
            return {"affinity": None}
        case SessionClosed():
            reclaimed = event.reason == "idle"
            return {"status": "closed", "open_turns": {}, "closed_at": recorded.at, "is_reclaimed": reclaimed}
        case SessionErased():
            gone: dict[str, Any] = {"open_turns": {}, "payloads": {}, "undone_payloads": {}, "note": None, "tags": ()}
            return {"status": "erased", **gone, **_without_components(session)}
        case _:
            raise UnknownEvent(f"session {session.session_id}: {type(event).__name__} has no place at {recorded.seq}")


def _tombstoned(session: Session, dropped: set[int]) -> dict[str, Any]:
    kept = {turn: payloads for turn, payloads in session.payloads.items() if turn not in dropped}
    undone = {turn: payloads for turn, payloads in session.undone_payloads.items() if turn not in dropped}
    return {"payloads": kept, "undone_payloads": undone}


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


def _noted(session: Session, event: SessionNoted) -> dict[str, Any]:
    return {
        "note": session.note if event.note is None else event.note or None,
        "tags": session.tags if event.tags is None else event.tags,
    }


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
        committed_at=recorded.at,
        echo=event.echo,
        calls_hash=event.calls_hash,
        bare_hash=event.bare_hash,
        left_out=event.left_out,
        given_ids=event.given_ids,
        odd_ids=event.odd_ids,
        odd_arguments=event.odd_arguments,
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
        if event.base_tokens:
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
