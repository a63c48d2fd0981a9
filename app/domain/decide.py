"""What a command does to a session: events, or an error that changes nothing."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

from app.domain.events import (
    BlobRef,
    Event,
    RewardAssigned,
    RolledBack,
    TurnCommitted,
    TurnOpened,
    VersionSpan,
)
from app.domain.history import Incoming, Plan
from app.domain.session import Session
from app.errors import InvalidRequest, SessionClosed, SessionNotFound


def require_open(session: Session | None, session_id: str) -> Session:
    """The session, if a turn may be taken in it. Raises SessionNotFound, SessionClosed."""
    if session is None:
        raise SessionNotFound(f"session {session_id} does not exist")
    if session.status != "open":
        raise SessionClosed(f"session {session_id} is {session.status}")
    return session


def open_turn(session: Session, plan: Plan, *, incarnation: int, body_hash: str, retry_key: str | None) -> TurnOpened:
    return TurnOpened(
        turn=len(session.turns) + 1,
        parent=plan.parent,
        incarnation=incarnation,
        body_hash=body_hash,
        retry_key=retry_key,
    )


class Reply(msgspec.Struct, frozen=True):
    """What the log keeps of an engine's validated reply.

    `prompt_ids` and `output_ids` are little-endian int32, `message_hash` is the canonical hash of its message.
    """

    dialect: Literal["sglang", "vllm"]
    engine: str
    prompt_ids: bytes
    output_ids: bytes
    finish_reason: str | None
    weight_versions: tuple[VersionSpan, ...]
    message_hash: str
    requested_at: float


class Tokens(msgspec.Struct, frozen=True):
    """How a prompt continues the stored tokens: the first `base` are the parent's, the rest are new."""

    base: int
    segment: int
    cause: Literal["drift", "divergence"] | None
    hash: str


class TurnBlobs(msgspec.Struct, frozen=True):
    """Where a turn's content is: its own rows' hash, and the numbers of the per-session blobs it uses."""

    content_hash: str
    params: int
    tools: int | None
    new: tuple[BlobRef, ...]


TOKEN_BYTES = 4


def hash_tokens(*parts: bytes | memoryview) -> str:
    """SHA-256 over little-endian int32 token ids, as hex."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def place_tokens(session: Session, plan: Plan, prompt_ids: bytes, output_ids: bytes) -> Tokens:
    """Does the engine's prompt continue the parent's tokens exactly? Where not, a new segment begins.

    The comparison is by length and SHA-256 of the parent's tokens, so no state grows with the prompt.
    """
    digest = hash_tokens(prompt_ids, output_ids)
    if plan.parent == 0:
        return Tokens(0, _next_segment(session, plan), None, digest)
    if plan.segment_cause is not None:
        return Tokens(0, _next_segment(session, plan), plan.segment_cause, digest)
    if plan.base_messages == 0:
        return Tokens(0, _next_segment(session, plan), "divergence", digest)
    parent = session.turn(plan.parent)
    size = parent.token_count * TOKEN_BYTES
    if len(prompt_ids) >= size and hash_tokens(memoryview(prompt_ids)[:size]) == parent.tokens_hash:
        return Tokens(parent.token_count, parent.segment, None, digest)
    return Tokens(0, _next_segment(session, plan), "drift", digest)


def _next_segment(session: Session, plan: Plan) -> int:
    """Segments are numbered along the live path, so a discarded one leaves no gap."""
    return 0 if plan.parent == 0 else session.turn(plan.parent).segment + 1


def commit_turn(
    session: Session,
    opened: TurnOpened,
    fence: int,
    plan: Plan,
    incoming: Incoming,
    reply: Reply,
    tokens: Tokens,
    *,
    blobs: TurnBlobs,
) -> list[Event]:
    """The events that make the turn part of the session, a rollback before it where it replaces turns."""
    new = range(plan.base_messages, len(incoming))
    committed = TurnCommitted(
        turn=opened.turn,
        parent=plan.parent,
        fence=fence,
        segment=tokens.segment,
        segment_cause=tokens.cause,
        base_messages=plan.base_messages,
        new_messages=len(new),
        message_hashes=(*(incoming.canonical(index) for index in new), reply.message_hash),
        client_hash=incoming.spelling(len(incoming)),
        base_tokens=tokens.base,
        suffix_tokens=len(reply.prompt_ids) // TOKEN_BYTES - tokens.base,
        output_tokens=len(reply.output_ids) // TOKEN_BYTES,
        tokens_hash=tokens.hash,
        finish_reason=reply.finish_reason,
        weight_versions=reply.weight_versions,
        dialect=reply.dialect,
        engine=reply.engine,
        requested_at=reply.requested_at,
        body_hash=opened.body_hash,
        retry_key=opened.retry_key,
        content_hash=blobs.content_hash,
        params=blobs.params,
        tools=blobs.tools,
        new_blobs=blobs.new,
    )
    if plan.discarded:
        return [RolledBack(plan.parent, plan.discarded), committed]
    return [committed]


def assign_reward(
    session: Session | None, session_id: str, reward: float, components: dict[str, float], turn: int | None
) -> RewardAssigned:
    """Raises SessionNotFound, SessionClosed (erased), InvalidRequest (not finite, no such turn)."""
    if session is None:
        raise SessionNotFound(f"session {session_id} does not exist")
    if session.status == "erased":
        raise SessionClosed(f"session {session_id} is erased")
    for name, value in (
        ("reward", reward),
        *((f"components.{key}", value) for key, value in components.items()),
    ):
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number")
    if turn is not None and not 1 <= turn <= len(session.turns):
        raise InvalidRequest(f"turn {turn} does not exist; the session has {len(session.turns)}")
    return RewardAssigned(reward, components, turn)
