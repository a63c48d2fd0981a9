"""Where a turn's time goes, and what the last minute of turns was like.

A turn is in one stage at any moment, so its stages add up to the time from its request's last byte to its reply's:

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
"""Seconds by a clock that neither jumps nor goes back."""


class TurnStage(IntEnum):
    """`gate`: held back by a pause. `claim`: until the claim was on disk, parsing and matching included. `prepare`:
    making the prompt and placing it. `engine`: from dispatch to the reply's last byte. `validate`: judging the reply.
    `commit`: until the turn is on disk. `reply`: until the last byte was handed to the connection."""

    GATE = 0
    CLAIM = 1
    PREPARE = 2
    ENGINE = 3
    VALIDATE = 4
    COMMIT = 5
    REPLY = 6


class Stages:
    """One turn's time by stage; a stage that it is in more than once adds up. It begins in `claim`.

    Of a turn that committed, `request_bytes` and `reply_bytes` (the engine's) are as received, `stored_bytes` what its
    content takes in the store.
    """

    __slots__ = ("_at", "_clock", "reply_bytes", "request_bytes", "seconds", "stage", "stored_bytes")

    def __init__(self, clock: MonotonicClock) -> None:
        self._clock = clock
        self._at = clock()
        self.stage = TurnStage.CLAIM
        self.seconds = [0.0] * len(TurnStage)
        self.request_bytes = 0
        self.reply_bytes = 0
        self.stored_bytes = 0

    def begin(self) -> None:
        """The request is here as a whole: time counts from now on."""
        self._at = self._clock()

    def enter(self, stage: TurnStage) -> None:
        """The stage before ends now."""
        now = self._clock()
        self.seconds[self.stage] += now - self._at
        self._at = now
        self.stage = stage

    def end(self) -> None:
        """The stage that the turn is in ends now."""
        self.enter(self.stage)

    @property
    def total(self) -> float:
        """Seconds in all stages that have ended."""
        return sum(self.seconds)

    @property
    def overhead(self) -> float:
        """Turnlog's own part: all but waiting for a gate and for the engine."""
        return self.total - self.seconds[TurnStage.GATE] - self.seconds[TurnStage.ENGINE]

    def timing(self) -> Timing:
        """What the log keeps, which is written before the commit has ended."""
        gate, claim, prepare, engine, validate = (round(seconds * 1e6) for seconds in self.seconds[: TurnStage.COMMIT])
        return Timing(gate, claim, prepare, engine, validate)


COMMITTED = "committed"
ABORTED = "aborted"
"""Committed as well, with a generation that an engine ended before its time."""

REPLAYED, JOINED = "replayed", "joined"
"""A retry that got the stored reply, or waited for the turn in flight."""

ENGINE_ERROR = "engine_error"
"""An engine's own 4xx or 5xx, which passed to the client."""

OUTCOMES = (COMMITTED, ABORTED, REPLAYED, JOINED, ENGINE_ERROR)
"""How a request for a turn ends, if not with an `AppError`, whose code is its outcome then."""

NEW_TURNS = frozenset((COMMITTED, ABORTED))

WELL = frozenset((COMMITTED, ABORTED, REPLAYED, JOINED))
"""Outcomes with which a client got its turn."""

WINDOW_S = 60

PER_OCTAVE = 8
"""Slots in which times are counted between one and twice it: a percentile is right to about 5 %."""

SLOT_ZERO_S = 1e-6


class _Second(msgspec.Struct):
    """What ended in one second. Times are counted by slot."""

    number: int = -1
    turns: int = 0
    overhead: Counter[int] = msgspec.field(default_factory=Counter)
    engine: Counter[int] = msgspec.field(default_factory=Counter)
    errors: Counter[str] = msgspec.field(default_factory=Counter)


class RecentTurns(msgspec.Struct, frozen=True):
    """The last minute, or as much of it as there was; None where no turn was committed.

    `errors` are those of the minute by code (`engine_error`: the engine's own), `errors_total` all since the start.
    """

    turns_per_s: float
    overhead_p50_ms: float | None
    overhead_p99_ms: float | None
    engine_p50_ms: float | None
    engine_p99_ms: float | None
    errors: dict[str, int]
    errors_total: dict[str, int]


class Recent:
    """The turns that ended within the last minute, in this process."""

    def __init__(self, clock: MonotonicClock) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = [_Second() for _ in range(WINDOW_S + 1)]
        self._errors: Counter[str] = Counter()

    def turn_ended(self, outcome: str, stages: Stages) -> None:
        """A reply has left, or an error. `outcome` is one of `OUTCOMES`, or the code of an `AppError`."""
        second = self._second(int(self._clock()))
        if outcome in NEW_TURNS:
            second.turns += 1
            second.overhead[_slot(stages.overhead)] += 1
            second.engine[_slot(stages.seconds[TurnStage.ENGINE])] += 1
        elif outcome not in WELL:
            second.errors[outcome] += 1
            self._errors[outcome] += 1

    def _second(self, number: int) -> _Second:
        place = number % len(self._seconds)
        second = self._seconds[place]
        if second.number != number:
            second = self._seconds[place] = _Second(number)
        return second

    def summary(self) -> RecentTurns:
        """Of the seconds that are whole, and of the one that has begun."""
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
        return RecentTurns(
            turns_per_s=sum(second.turns for second in kept) / elapsed,
            overhead_p50_ms=_percentile_ms(overhead, 0.5),
            overhead_p99_ms=_percentile_ms(overhead, 0.99),
            engine_p50_ms=_percentile_ms(engine, 0.5),
            engine_p99_ms=_percentile_ms(engine, 0.99),
            errors=dict(errors),
            errors_total=dict(self._errors),
        )


def _slot(seconds: float) -> int:
    return int(math.log2(seconds / SLOT_ZERO_S) * PER_OCTAVE) if seconds > SLOT_ZERO_S else 0


def _percentile_ms(slots: Counter[int], share: float) -> float | None:
    """In the middle of the slot in which so much of the whole is reached."""
    left = math.ceil(share * slots.total())
    for slot in sorted(slots):
        left -= slots[slot]
        if left <= 0:
            return SLOT_ZERO_S * 1000 * math.exp2((slot + 0.5) / PER_OCTAVE)
    return None
