"""An engine's reply after validation."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from app.domain.calls import SampledCall
from app.domain.events import LogprobsOf, Part, PayloadRef, VersionSpan
from workers.parse_prompt import KnownText
from workers.reply import WorkerResult


class ValidatedReply(msgspec.Struct, frozen=True):
    """The source of a turn's event and its stored content.

    `result` is the validated content of the reply of `engine`, which was asked at `requested_at` (seconds since the
    epoch) with weight version `dispatched`, if known. `weight_versions` are the spans of the output tokens,
    `message_hash` is the canonical hash of the message, `calls_hash` and `bare_hash` as in `TurnCommitted`, `calls` are
    the message's. `sent_ids`: the prompt was sent as ids. `trimmed`: how many of the parent's last tokens it leaves
    out. `parts`: which engine generated which output tokens, if there were several. `logprobs_of` as in
    `TurnCommitted`. `text` makes that of all tokens, if the reply was validated here and has a long prompt.
    """

    result: WorkerResult
    engine: str
    requested_at: float
    message_hash: str
    calls_hash: str | None = None
    bare_hash: str | None = None
    calls: tuple[SampledCall, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    payloads: tuple[PayloadRef, ...] = ()
    trimmed: int = 0
    sent_ids: bool = False
    dispatched: str | None = None
    parts: tuple[Part, ...] = ()
    logprobs_of: LogprobsOf | None = None
    text: Callable[[], KnownText] | None = None
