"""A session as it was after any of its events, for people and for tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from app.domain.events import BlobRef, Recorded, name_of, to_fields
from app.domain.session import Affinity, OpenTurn, Payload, Reward, Session, Turn, fold
from app.errors import InvalidRequest, SessionNotFound
from app.store import reads
from app.store.engine import Database


class SessionAt(NamedTuple):
    """A session's state after the last of `events`, which begin its log."""

    session: Session
    events: Sequence[Recorded]


async def fold_at(database: Database, session_id: str, seq: int | None = None) -> SessionAt:
    """The state after event `seq`, the last if None, from the log alone: no snapshot is asked.

    Raises SessionNotFound; InvalidRequest for a `seq` that the log does not have; UnknownEvent where an event up
    to there cannot be read or one is missing; StoreUnavailable.
    """
    if seq is not None and seq < 1:
        raise InvalidRequest(f"event {seq}: events are numbered from 1")
    rows = await database.read(
        lambda connection: reads.event_rows(connection, session_id, limit=seq), session_id=session_id
    )
    events = reads.decode_events(rows)
    session = fold(session_id, events)
    if session is None:
        raise SessionNotFound(f"no session {session_id}")
    if seq is not None and session.version < seq:
        raise InvalidRequest(f"event {seq}: the log of session {session_id} ends with event {session.version}")
    return SessionAt(session, events)


def described(session: Session) -> dict[str, Any]:
    """The state as JSON-able fields. Hashes that only the server compares are left out; times are epoch seconds."""
    path = set(session.path)
    return {
        "session_id": session.session_id,
        "version": session.version,
        "status": session.status,
        "created_at": session.created_at,
        "closed_at": session.closed_at,
        "config": msgspec.structs.asdict(session.config),
        "metadata": None if session.metadata is None else _blob(session.metadata),
        "turns": [_turn(turn, live=turn.number in path) for turn in session.turns],
        "open_turn": None if session.open_turn is None else _open_turn(session.open_turn),
        "affinity": None if session.affinity is None else _affinity(session.affinity),
        "reward": None if session.reward is None else _reward(session.reward),
        "turn_rewards": {str(turn): _reward(reward) for turn, reward in sorted(session.turn_rewards.items())},
        "payloads": [_payload(turn, one) for turn, kept in sorted(session.payloads.items()) for one in kept],
        "blob_count": session.blob_count,
        "blobs": [_blob(blob) for blob in session.blobs],
    }


def event_fields(recorded: Recorded) -> dict[str, Any]:
    """An event as `GET /sessions/{id}/events` shows it."""
    return {
        "seq": recorded.seq,
        "type": name_of(recorded.event),
        "at": recorded.at,
        **to_fields(recorded.event),
    }


def _turn(turn: Turn, *, live: bool) -> dict[str, Any]:
    return {
        "turn": turn.number,
        "parent": turn.parent,
        "segment": turn.segment,
        "live": live,
        "seq": turn.seq,
        "messages": turn.message_count,
        "tokens": turn.token_count,
        "output_tokens": turn.output_tokens,
        "finish_reason": turn.finish_reason,
    }


def _open_turn(held: OpenTurn) -> dict[str, Any]:
    return {
        "turn": held.turn,
        "parent": held.parent,
        "fence": held.fence,
        "incarnation": held.incarnation,
        "adapter": held.adapter,
    }


def _affinity(bound: Affinity) -> dict[str, Any]:
    return {"engine": bound.engine, "control": bound.control}


def _reward(reward: Reward) -> dict[str, Any]:
    return {"reward": reward.reward, "components": reward.components}


def _payload(turn: int, payload: Payload) -> dict[str, Any]:
    return {
        "turn": turn,
        "kind": payload.kind,
        "start": payload.start,
        "stop": payload.stop,
        "shape": list(payload.shape),
        "chunks": len(payload.chunks),
        "bytes": sum(chunk.size for chunk in payload.chunks),
    }


def _blob(blob: BlobRef) -> dict[str, Any]:
    return {"number": blob.number, "kind": blob.kind, "size": blob.size}
