"""Time of a turn by stage, and statistics of the last minute.

A turn is in exactly one stage at any moment. Its stages add up to the time from the last byte of the request to
the last byte of the reply:

    claim ─▶ (gate ─▶) prepare ─▶ (gate ─▶) engine ─▶ validate ─▶ commit ─▶ reply
                          ▲                             │
                          └──── cut off by a pause ─────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

import msgspec

from app.domain.events import Timing

MonotonicClock = Callable[[], float]
"""A monotonic clock, in seconds."""


class TurnStage(IntEnum):
    """`gate`: waiting while a gate is shut. `claim`: parsing, matching and writing the claim. `prepare`: building the
    prompt and choosing an engine. `engine`: from dispatch to the reply's last byte. `validate`: validating the reply.
    `commit`: writing the turn to disk. `reply`: sending the reply, until the last byte is handed to the connection."""

    GATE = 0
    CLAIM = 1
    PREPARE = 2
    ENGINE = 3
    VALIDATE = 4
    COMMIT = 5
    REPLY = 6


class Stages:
    """When one turn entered each of its stages, beginning with `claim`; repeated stages add up.

    `marks` are the stages in their order, each with the time of `clock` at which it was entered. The turn
    appends to them itself: a function for it would be six calls a turn. `ended_at` is when the last
    byte of the reply or error was sent.

    For a committed turn: `request_bytes` and `reply_bytes` (from the engine) as received, `stored_bytes` as stored.
    """

    __slots__ = ("clock", "ended_at", "marks", "reply_bytes", "request_bytes", "stored_bytes")

    def __init__(self, clock: MonotonicClock) -> None:
        self.clock = clock
        self.marks = [(TurnStage.CLAIM, clock())]
        self.ended_at: float | None = None
        self.request_bytes = 0
        self.reply_bytes = 0
        self.stored_bytes = 0

    def seconds(self) -> list[float]:
        """Seconds by stage. A stage that has not ended counts as 0."""
        seconds = [0.0] * len(TurnStage)
        stage, since = self.marks[0]
        for following, at in self.marks:
            seconds[stage] += at - since
            stage, since = following, at
        if self.ended_at is not None:
            seconds[stage] += self.ended_at - since
        return seconds

    def timing(self) -> Timing:
        """What the log keeps: it is written before the commit ends, so without the later stages."""
        gate, claim, prepare, engine, validate = self.seconds()[: TurnStage.COMMIT]
        return Timing(
            round(gate * 1e6), round(claim * 1e6), round(prepare * 1e6), round(engine * 1e6), round(validate * 1e6)
        )


COMMITTED = "committed"
ABORTED = "aborted"
"""Committed, but an engine ended the generation early."""

REPLAYED, JOINED = "replayed", "joined"
"""A retry that got the stored reply, or that waited for the turn in flight."""

ENGINE_ERROR = "engine_error"
"""An engine's own 4xx or 5xx, passed to the client."""

OUTCOMES = (COMMITTED, ABORTED, REPLAYED, JOINED, ENGINE_ERROR)
"""How a request for a turn ends; an `AppError` has its code as outcome instead."""

NEW_TURNS = frozenset((COMMITTED, ABORTED))

SUCCEEDED = frozenset((COMMITTED, ABORTED, REPLAYED, JOINED))
"""Outcomes in which the client got its turn."""

WINDOW_S = 60

PER_OCTAVE = 8
"""Histogram slots per factor of two: a percentile is accurate to about 5 %."""

SLOT_ZERO_S = 1e-6


class _Second(msgspec.Struct):
    """The turns that ended in one second. Times are counted by histogram slot."""

    number: int = -1
    turns: int = 0
    overhead: dict[int, int] = msgspec.field(default_factory=dict)
    engine: dict[int, int] = msgspec.field(default_factory=dict)
    errors: Counter[str] = msgspec.field(default_factory=Counter)


class RecentTurnsSummary(msgspec.Struct, frozen=True):
    """Statistics of the last minute, or since the start if shorter; None where no turn was committed.

    `errors` counts the minute's errors by code (`engine_error`: the engine's own), `errors_total` all since the start.
    """

    turns_per_s: float
    overhead_p50_ms: float | None
    overhead_p99_ms: float | None
    engine_p50_ms: float | None
    engine_p99_ms: float | None
    errors: dict[str, int]
    errors_total: dict[str, int]


class RecentTurnStats:
    """Statistics of the turns that ended in this process within the last minute."""

    def __init__(self, clock: MonotonicClock) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = [_Second() for _ in range(WINDOW_S + 1)]
        self._errors: Counter[str] = Counter()

    def turn_ended(self, outcome: str, overhead: float, engine: float) -> None:
        """A reply or an error was sent. `outcome` is one of `OUTCOMES`, or an `AppError`'s code; the others are seconds
        of Turnlog's own work and of the engine's."""
        number = int(self._clock())
        index = number % len(self._seconds)
        second = self._seconds[index]
        if second.number != number:
            second = self._seconds[index] = _Second(number)
        if outcome in NEW_TURNS:
            second.turns += 1
            for slots, seconds in ((second.overhead, overhead), (second.engine, engine)):
                slot = int(math.log2(seconds / SLOT_ZERO_S) * PER_OCTAVE) if seconds > SLOT_ZERO_S else 0
                slots[slot] = slots.get(slot, 0) + 1
        elif outcome not in SUCCEEDED:
            second.errors[outcome] += 1
            self._errors[outcome] += 1

    def summary(self) -> RecentTurnsSummary:
        """Includes the second that has only begun."""
        now = self._clock()
        kept = [second for second in self._seconds if now - WINDOW_S < second.number + 1]
        overhead: Counter[int] = Counter()
        engine: Counter[int] = Counter()
        errors: Counter[str] = Counter()
        for second in kept:
            overhead.update(second.overhead)
            engine.update(second.engine)
            errors.update(second.errors)
        elapsed = min(max(now - self._began, 1.0), float(WINDOW_S))
        return RecentTurnsSummary(
            turns_per_s=sum(second.turns for second in kept) / elapsed,
            overhead_p50_ms=_percentile_ms(overhead, 0.5),
            overhead_p99_ms=_percentile_ms(overhead, 0.99),
            engine_p50_ms=_percentile_ms(engine, 0.5),
            engine_p99_ms=_percentile_ms(engine, 0.99),
            errors=dict(errors),
            errors_total=dict(self._errors),
        )


def _percentile_ms(slots: Counter[int], share: float) -> float | None:
    """The middle of the slot that holds the percentile `share`, in ms."""
    left = math.ceil(share * slots.total())
    for slot in sorted(slots):
        left -= slots[slot]
        if left <= 0:
            return SLOT_ZERO_S * 1000 * math.exp2((slot + 0.5) / PER_OCTAVE)
    return None
