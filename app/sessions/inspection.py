"""A session and its events as JSON, for people and for tools."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain.events import BlobRef, Recorded, name_of, to_fields
from app.domain.session import Affinity, OpenTurn, Payload, Reward, Session, Turn


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
        "fork": None if session.fork is None else msgspec.structs.asdict(session.fork),
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
