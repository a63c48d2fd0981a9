"""A session and its events as JSON, for clients and the command line."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from app.domain.events import BlobRef, Recorded, name_of, to_fields
from app.domain.session import Payload, Session
from app.domain.tree import superseded
from app.domain.turns import Turn

OPEN_TURN = ("turn", "parent", "fence", "incarnation", "adapter")


def described(session: Session) -> dict[str, Any]:
    """The state as JSON-able fields, without hashes that only the server compares. Times are epoch seconds."""
    gone = superseded(session)
    return {
        **_fields(session, "session_id", "version", "status", "created_at", "closed_at"),
        "config": asdict(session.config),
        "fork": None if session.fork is None else asdict(session.fork),
        "metadata": None if session.metadata is None else _blob(session.metadata),
        "turns": [_turn(turn, live=turn.number not in gone) for turn in session.turns],
        "open_turn": None if session.open_turn is None else _fields(session.open_turn, *OPEN_TURN),
        "open_turns": [_fields(held, *OPEN_TURN) for _, held in sorted(session.open_turns.items())],
        "history": session.history,
        "affinity": None if session.affinity is None else asdict(session.affinity),
        "reward": None if session.reward is None else asdict(session.reward),
        "turn_rewards": {str(turn): asdict(reward) for turn, reward in sorted(session.turn_rewards.items())},
        "note": session.note,
        "tags": list(session.tags),
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
        **_fields(turn, "parent", "segment", "branch", "branch_cause", "agent_id"),
        "live": live,
        "seq": turn.seq,
        "messages": turn.message_count,
        "tokens": turn.token_count,
        **_fields(turn, "output_tokens", "finish_reason"),
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _payload(turn: int, payload: Payload) -> dict[str, Any]:
    return {
        "turn": turn,
        **_fields(payload, "kind", "start", "stop"),
        "shape": list(payload.shape),
        "chunks": len(payload.chunks),
        "bytes": sum(chunk.size for chunk in payload.chunks),
    }


def _blob(blob: BlobRef) -> dict[str, Any]:
    return _fields(blob, "number", "kind", "size")
