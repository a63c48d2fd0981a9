"""The event loop's lag: the largest of the last minute, of a loop that was really held."""

from __future__ import annotations

import asyncio
import time

import pytest

from app import process as lag
from app.process import SPAN_S, SPANS, LoopLag


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_largest_of_the_last_minute() -> None:
    clock = Clock()
    seen = LoopLag(clock)
    assert seen.largest_s == 0
    for second, late in ((0, 0.2), (1, 0.5), (2, 0.1), (SPAN_S + 1, 0.3), (SPAN_S * SPANS - 1, 0.05)):
        clock.now = second
        seen.note(late)
        assert seen.largest_s == max(0.2 if second == 0 else 0.5, late)
    clock.now = SPAN_S * SPANS + 1
    assert seen.largest_s == 0.3
    clock.now = 10 * SPAN_S * SPANS
    assert seen.largest_s == 0


@pytest.mark.anyio
async def test_a_loop_that_is_held_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "EVERY_S", 0.001)
    seen = LoopLag(time.monotonic)
    noted = asyncio.Event()
    note = seen.note

    def noting(lag_s: float) -> None:
        note(lag_s)
        noted.set()

    monkeypatch.setattr(seen, "note", noting)
    seen.start()
    await noted.wait()
    time.sleep(0.3)  # the fault itself: the loop is held
    noted.clear()
    await noted.wait()
    await seen.stop()
    assert seen.largest_s >= 0.29
