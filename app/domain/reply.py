"""An engine's reply once it has passed validation."""

from __future__ import annotations

import msgspec

from app.domain.events import Part, PayloadRef, VersionSpan
from workers.job import WorkerResult


class ValidatedReply(msgspec.Struct, frozen=True):
    """All that a turn's event and its stored content are made of.

    `result` is what validation found in the reply of `engine`, which was asked at `requested_at` (seconds since the
    epoch) under weight version `dispatched`, if that is known. `weight_versions` are the spans of the output tokens,
    `message_hash` is the canonical hash of the message. Of the prompt: whether it was sent as ids (`sent_ids`), and how
    many of the parent's last tokens it leaves out (`trimmed`). `parts` says which engine generated which output tokens
    where several did.
    """

    result: WorkerResult
    engine: str
    requested_at: float
    message_hash: str
    weight_versions: tuple[VersionSpan, ...] = ()
    payloads: tuple[PayloadRef, ...] = ()
    trimmed: int = 0
    sent_ids: bool = False
    dispatched: str | None = None
    parts: tuple[Part, ...] = ()
