"""Turns in flight, the clients that wait for them, and how their work is ended."""

from __future__ import annotations

import asyncio

import pytest
from helpers.log import BODY, created, opened
from unit.making import claimed

from app.domain.events import Event, Recorded, SessionClosed, TurnAbandoned
from app.domain.session import fold
from app.turn.in_flight import InFlightTurn, Stages, TurnCancelled, Waiter

pytestmark = pytest.mark.anyio


def flight() -> InFlightTurn:
    return InFlightTurn("s", Waiter(lambda size: None), Stages(lambda: 0.0))


async def test_a_second_reason_to_end_the_work_does_not_interrupt_its_cleaning_up() -> None:
    cut = flight()
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
        with pytest.raises(TurnCancelled), cut.cancellable():
            await work()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(cut_work())
    await working.wait()
    cut.cancel("disconnect")
    await ending.wait()
    cut.cancel("session_closed")
    may_end.set()
    assert await task == 0, "cancellations that nobody took back"
    assert cleaned == [True]
    assert cut.cancel_reason == "disconnect"


@pytest.mark.parametrize(
    ("log", "may_hold"),
    [
        ([], True),
        ([opened(1, 0)], True),
        ([opened(1, 0), opened(2, 0)], True),
        ([opened(1, 0, body_hash="o" * 32)], False),
        ([opened(2, 0)], False),
        ([opened(1, 0), TurnAbandoned(1, 2, "owner_dead")], False),
        ([opened(1, 0), TurnAbandoned(1, 2, "owner_dead"), opened(1, 0)], False),
        ([opened(1, 0), SessionClosed()], False),
    ],
    ids=["before it", "it", "another beside it", "another body", "another turn", "ended", "taken again", "closed"],
)
def test_a_claim_may_stand_where_the_log_does_not_say_otherwise(log: list[Event], may_hold: bool) -> None:
    """A crash of PostgreSQL may undo a claim, and its number and fence are then another turn's."""
    session = fold("s", [Recorded(seq, 1.0, event) for seq, event in enumerate([created(), *log], 1)])
    assert session is not None
    turn = claimed(session, opened(1, 0, body_hash=BODY))
    assert turn.may_hold_claim(session) is may_hold
