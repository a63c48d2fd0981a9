"""Decides what a command does to a session: events, or an error that changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from app.domain import retention
from app.domain.calls import has_odd_ids
from app.domain.completion import RequestPrompt
from app.domain.events import (
    AffinityBound,
    AffinityReleased,
    BlobRef,
    Event,
    GivenIds,
    History,
    PayloadRef,
    Recorded,
    RewardAssigned,
    RolledBack,
    Timing,
    TurnCommitted,
    TurnOpened,
)
from app.domain.history import RequestHistory
from app.domain.rules import Branch, NewTurn, Plan, TreeIndex, branch_of, segment_of
from app.domain.session import Session, Turn, fold
from app.errors import InvalidRequest, Restored, SessionClosed, SessionNotFound
from workers import codec
from workers.reply import ValidatedReply


def open_turn(
    session: Session,
    plan: Plan,
    *,
    incarnation: int,
    body_hash: str,
    retry_key: str | None,
    retry_count: int = 0,
    protocol: str = "chat",
    adapter: str | None = None,
    agent_id: str | None = None,
    history: History = "linear",
) -> TurnOpened:
    """The opening of a turn. In a tree the store gives it its number, as other turns may be opened at the same time."""
    decides = None if session.history else history
    return TurnOpened(
        turn=session.last_turn + 1,
        parent=plan.parent,
        incarnation=incarnation,
        body_hash=body_hash,
        retry_key=retry_key,
        retry_count=retry_count,
        protocol=protocol,
        adapter=adapter,
        agent_id=agent_id,
        history=decides,
    )


class TurnBlobs(msgspec.Struct, frozen=True):
    """The session's blobs that a turn uses, by number; `new` are those that it adds."""

    params: int
    tools: int | None = None
    new: tuple[BlobRef, ...] = ()
    echo: int | None = None
    images: tuple[int, ...] = ()


def token_parent(session: Session, plan: Plan) -> Turn | None:
    """The turn whose tokens the prompt may continue: the parent, unless the history starts again."""
    return session.turns[plan.parent] if plan.base_messages else None


def commit_turn(
    session: Session,
    index: TreeIndex,
    opened: TurnOpened,
    fence: int,
    plan: Plan,
    incoming: RequestHistory | RequestPrompt,
    reply: ValidatedReply,
    *,
    blobs: TurnBlobs,
    payloads: tuple[PayloadRef, ...] = (),
    given_ids: GivenIds | None = None,
    odd_arguments: bool = False,
    tool_errors: int = 0,
    binding: AffinityBound | AffinityReleased | None = None,
    timing: Timing | None = None,
    left_out: tuple[str, ...] = (),
    max_replay_bytes: int | None = None,
    uses: retention.ChunkUses | None = None,
    pinned_upto: int = 0,
) -> list[Event]:
    """The events that commit the turn. `payloads`, `given_ids` and `tool_errors` as in
    `TurnCommitted`; `odd_arguments`: a new message's are so. `binding` is a new binding to its engine.

    A rollback comes before it if it replaces turns, a tombstone after it if payloads leave the window, but for what
    checkpoints pin (`pinned_upto`). They hold for
    `session` alone, of which `index` and `uses` are: in a tree, where another turn may commit first, they are decided
    again.
    """
    hashes = incoming.new_hashes(plan.base_messages)
    continued = reply.base if reply.dialect != "openai" else plan.base_messages
    if plan.base_messages and continued and plan.parent not in index.by_parent:
        # The first child that continues its parent's tokens continues its branch.
        branch = Branch(session.turns[plan.parent].branch)
    else:
        new = NewTurn(plan.parent if plan.base_messages else 0, hashes, incoming.whole_hash, opened.agent_id)
        branch = branch_of(session, index, new)
    segment, cause = segment_of(session, plan, continued, branch)
    committed = TurnCommitted(
        turn=opened.turn,
        parent=plan.parent,
        fence=fence,
        segment=segment,
        segment_cause=cause,
        base_messages=plan.base_messages,
        new_messages=len(hashes),
        message_hashes=(*hashes, reply.message_hash),
        client_hash=incoming.client_hash,
        base_tokens=reply.base,
        suffix_tokens=reply.suffix_tokens,
        output_tokens=reply.output_tokens,
        tokens_hash=reply.sequence.hash,
        tokens_text_bytes=reply.sequence.text_bytes,
        finish_reason=reply.finish_reason,
        weight_versions=reply.weight_versions,
        dialect=reply.dialect,
        engine=reply.engine,
        requested_at=reply.requested_at,
        body_hash=opened.body_hash,
        retry_key=opened.retry_key,
        content_hash=codec.content_hash(reply.tokens, reply.exchange),
        params=blobs.params,
        tools=blobs.tools,
        new_blobs=blobs.new,
        payloads=payloads,
        protocol=opened.protocol,
        trimmed=reply.trimmed if reply.base else 0,
        cached_tokens=reply.cached_tokens,
        speculative=reply.speculative,
        sent_ids=reply.sent_ids,
        adapter=opened.adapter,
        dispatched=reply.dispatched,
        parts=reply.parts,
        timing=timing,
        branch=branch.number,
        branch_cause=branch.cause,
        carries=branch.carries,
        agent_id=opened.agent_id,
        echo=blobs.echo,
        images=blobs.images,
        calls_hash=reply.calls_hash,
        bare_hash=reply.bare_hash,
        logprobs_of=reply.logprobs_of,
        left_out=left_out,
        tool_errors=tool_errors,
    )
    if reply.calls or odd_arguments:
        committed = msgspec.structs.replace(
            committed,
            given_ids=given_ids,
            odd_ids=has_odd_ids(reply.calls),
            odd_arguments=odd_arguments or not all(call.has_object for call in reply.calls),
        )
    events: list[Event] = [] if binding is None else [binding]
    if plan.discarded:
        lost = sum(session.turns[number].tool_errors for number in plan.discarded)
        events.append(RolledBack(plan.parent, plan.discarded, lost))
    events.append(committed)
    if payloads or session.payloads or session.undone_payloads:
        before = msgspec.structs.replace(session, turns=session.turns.tentative())
        after = fold(session.session_id, _numbered(session, events), before)
        tombstoned = None if after is None else retention.tombstones(after, index, max_replay_bytes, uses, pinned_upto)
        events += [] if tombstoned is None else [tombstoned]
    return events


def _numbered(session: Session, events: list[Event]) -> Iterator[Recorded]:
    """The events with the next sequence numbers; their positions do not affect payloads."""
    return (Recorded(seq, 0.0, event) for seq, event in enumerate(events, session.version + 1))


def assign_reward(
    session: Session | None, session_id: str, reward: float, components: dict[str, float], turn: int | None
) -> RewardAssigned:
    """Raises SessionNotFound, SessionClosed (erased), Restored, InvalidRequest (not finite, no such turn)."""
    session = labelled(session, session_id)
    for name, value in (("reward", reward), *((f"components.{key}", value) for key, value in components.items())):
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number")
    if turn is not None and turn not in session.turns:
        raise InvalidRequest(f"turn {turn} is not committed")
    return RewardAssigned(reward, components, turn)


def labelled(session: Session | None, session_id: str) -> Session:
    """The session if it may be given a reward or an annotation: open or closed.

    Raises SessionNotFound, SessionClosed (erased), Restored.
    """
    if session is None:
        raise SessionNotFound.of(session_id)
    if session.status == "erased":
        raise SessionClosed(f"session {session_id} is erased")
    if session.status == "undone":
        raise Restored.of(session_id)
    return session
