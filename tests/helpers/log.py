"""Events and operations with everything filled in that a test does not care about."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from app.domain.events import (
    BlobRef,
    ChunkRef,
    PayloadRef,
    RolledBack,
    SessionConfig,
    SessionCreated,
    TurnCommitted,
    TurnOpened,
)
from workers.reply import VersionSpan

BODY = "b" * 32


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def int32(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def float64(values: Sequence[float]) -> bytes:
    return array("d", values).tobytes()


def created(window: int = 1, metadata: BlobRef | None = None, **config: Any) -> SessionCreated:
    return SessionCreated(SessionConfig(rollback_window=window, **config), BODY, metadata)


def opened(turn: int, parent: int, incarnation: int = 1, **fields: Any) -> TurnOpened:
    return TurnOpened(turn=turn, parent=parent, incarnation=incarnation, **{"body_hash": BODY, **fields})


def committed(turn: int, parent: int, fence: int, **fields: Any) -> TurnCommitted:
    """Turn `turn` of one prompt token and two output tokens, continuing nothing unless told."""
    given: dict[str, Any] = {
        "segment": 0,
        "base_messages": 0,
        "new_messages": 1,
        "message_hashes": (digest(f"user {turn}"), digest(f"reply {turn}")),
        "client_hash": digest(f"spelling {turn}"),
        "base_tokens": 0,
        "suffix_tokens": 1,
        "output_tokens": 2,
        "tokens_hash": digest(f"tokens {turn}"),
        "tokens_text_bytes": 6,
        "body_hash": BODY,
        "content_hash": digest(f"content {turn}"),
        "params": 0,
        "dialect": "sglang",
        "engine": "http://engine",
        "weight_versions": (VersionSpan("1", 0, 2),),
        "requested_at": 1.0,
        "finish_reason": "stop",
        **fields,
    }
    return TurnCommitted(turn=turn, parent=parent, fence=fence, **given)


def rolled_back(to_turn: int, *discarded: int) -> RolledBack:
    return RolledBack(to_turn, discarded)


def payload(fence: int, *numbers: int, shared: int = 0) -> PayloadRef:
    """A payload that brings a row in each of these chunks, behind `shared` rows of its parent's."""
    chunks = tuple(
        ChunkRef(fence, number, shared + at, 1, "uint8", 2, digest("row")) for at, number in enumerate(numbers)
    )
    return PayloadRef("routed_experts", 0, shared + len(numbers), 0, (2,), chunks, shared)
