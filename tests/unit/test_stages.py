from __future__ import annotations

import pytest

from app.domain.events import Timing
from app.metrics import WINDOW_S, RecentTurnStats
from app.turn.in_flight import Stages
from app.turn.in_flight import TurnStage as S


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_in_the_stage_that_the_turn_is_in_and_adds_up_where_it_is_twice() -> None:
    clock = Clock()
    stages = Stages(clock)
    clock.now += 1
    spent = [(S.PREPARE, 2), (S.ENGINE, 30), (S.VALIDATE, 4), (S.GATE, 500), (S.ENGINE, 60), (S.VALIDATE, 8)]
    for stage, took in (*spent, (S.COMMIT, 0.5), (S.REPLY, 0.25)):
        stages.marks.append((stage, stages.clock()))
        clock.now += took
    assert stages.seconds() == [500, 1, 2, 90, 12, 0.5, 0], "the reply has not ended"
    stages.ended_at = stages.clock()
    assert stages.seconds() == [500, 1, 2, 90, 12, 0.5, 0.25]
    assert stages.timing() == Timing(*(seconds * 1_000_000 for seconds in (500, 1, 2, 90, 12)))


def test_the_last_minute_has_a_rate_and_percentiles_within_a_slot() -> None:
    clock = Clock()
    recent = RecentTurnStats(clock)
    assert (recent.summary().turns_per_s, recent.summary().overhead_p50_ms) == (0, None)
    clock.now += 4
    for _ in range(8):
        recent.turn_ended("committed", 0, 1)
    assert recent.summary().turns_per_s == 2, "by the time that there was"
    clock.now += 200
    for number in range(1, 101):
        recent.turn_ended("committed", number / 1000, number / 10)
    found = recent.summary()
    assert found.turns_per_s == pytest.approx(100 / WINDOW_S)
    told = (found.overhead_p50_ms, found.overhead_p99_ms, found.engine_p50_ms, found.engine_p99_ms)
    assert told == pytest.approx((50, 99, 5000, 9900), rel=0.05)


def test_what_is_older_than_a_minute_is_forgotten_but_for_the_errors_since_the_start() -> None:
    """Replies without a new turn are neither turns nor errors."""
    clock = Clock()
    recent = RecentTurnStats(clock)
    for outcome in ("committed", "session_busy", "replayed", "joined"):
        recent.turn_ended(outcome, 0, 1)
    assert recent.summary().errors == {"session_busy": 1}
    clock.now += WINDOW_S - 1
    recent.turn_ended("session_busy", 0, 0)
    assert recent.summary().errors == {"session_busy": 2}
    assert recent.summary().turns_per_s > 0
    clock.now += 3
    assert (recent.summary().errors, recent.summary().turns_per_s) == ({"session_busy": 1}, 0)
    clock.now += 2 * WINDOW_S
    assert (recent.summary().errors, recent.summary().errors_total) == ({}, {"session_busy": 2})
    recent.turn_ended("aborted", 0, 1)
    assert (recent.summary().turns_per_s > 0, recent.summary().errors) == (True, {})
