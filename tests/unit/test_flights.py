"""Turns in flight: how their work is ended."""

from __future__ import annotations

import asyncio

import pytest

from app.turn.in_flight import Identity, InFlightTurn, RetryMark, TurnCancelled

pytestmark = pytest.mark.anyio


async def test_a_second_reason_to_end_the_work_does_not_interrupt_its_cleaning_up() -> None:
    flight = InFlightTurn(Identity(RetryMark(), "00"))
    working, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    cleaned = []

    async def work() -> None:
        try:
            working.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()
            cleaned.append(True)

    async def cut_work() -> int:
        with pytest.raises(TurnCancelled), flight.cancellable():
            await work()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(cut_work())
    await working.wait()
    flight.cancel("disconnect")
    await ending.wait()
    flight.cancel("session_closed")
    may_end.set()
    assert await task == 0, "cancellations that nobody took back"
    assert cleaned == [True]
    assert flight.cancel_reason == "disconnect"
