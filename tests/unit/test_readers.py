"""Turns in flight, the clients that wait for them, and how their work is ended."""

from __future__ import annotations

import asyncio

import pytest
from helpers.log import BODY, created, opened
from unit.making import claimed

from app.domain.events import Event, Recorded, SessionClosed, TurnAbandoned
from app.domain.session import fold
from app.errors import ClientGone
from app.turn.in_flight import InFlightTurn, Stages, TurnCancelled, TurnReply, Waiter

pytestmark = pytest.mark.anyio


class Watched:
    """Readers, and which of them somebody has begun to watch."""

    def __init__(self) -> None:
        self.watched: list[Waiter] = []

    def reader(self) -> Waiter:
        return Waiter(lambda size: None, self.watched.append)


def flight() -> InFlightTurn:
    return InFlightTurn("s", Waiter(lambda size: None), Stages(lambda: 0.0))


async def test_nobody_is_watched_but_while_a_flight_is_held() -> None:
    watch, held = Watched(), flight()
    own, joined = watch.reader(), watch.reader()
    own.wait_for(held)
    assert watch.watched == []
    with held.waiting_at_gate():
        assert watch.watched == [own]
        joined.wait_for(held)
        assert watch.watched == [own, joined]
    watch.reader().wait_for(held)
    assert len(watch.watched) == 2


async def test_a_held_flight_ends_with_its_last_reader() -> None:
    watch, held = Watched(), flight()
    readers = [watch.reader() for _ in range(2)]
    for reader in readers:
        reader.wait_for(held)
    waiting = asyncio.Event()

    async def work() -> None:
        with held.waiting_at_gate(), held.cancellable():
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await waiting.wait()
    readers[0].client_disconnected()
    assert held.cancel_reason is None
    readers[1].client_disconnected()
    assert held.cancel_reason == "disconnect"
    with pytest.raises(TurnCancelled):
        await task


async def test_a_flight_that_is_not_held_outlives_a_client_that_hangs_up() -> None:
    reader, going = Watched().reader(), flight()
    reader.wait_for(going)
    reader.client_disconnected()
    assert going.cancel_reason is None
    reader.leave()
    assert going.cancel_reason == "disconnect"


async def test_who_hung_up_before_is_let_go_when_the_flight_is_held() -> None:
    watch, held = Watched(), flight()
    reader = watch.reader()
    reader.wait_for(held)
    reader.client_disconnected()
    with held.waiting_at_gate():
        assert held.cancel_reason == "disconnect"
    assert watch.watched == []


async def test_a_reader_that_leaves_what_it_joined_does_not_wait_and_does_not_try_again() -> None:
    watch, going = Watched(), flight()
    watch.reader().wait_for(going)
    reader = watch.reader()
    joining = asyncio.create_task(reader.join(going))
    await asyncio.sleep(0)
    reader.leave()
    with pytest.raises(ClientGone):
        await joining
    assert going.cancel_reason is None


async def test_who_stays_gets_what_the_flight_brought() -> None:
    going, reply = flight(), TurnReply(200, [], [b"{}"], turn=1)
    joining = [asyncio.create_task(Watched().reader().join(going)) for _ in range(2)]
    await asyncio.sleep(0)
    going.finish(reply)
    assert await asyncio.gather(*joining) == [reply, reply]
    failed = flight()
    joining = [asyncio.create_task(Watched().reader().join(failed))]
    await asyncio.sleep(0)
    failed.finish(None)
    assert await asyncio.gather(*joining) == [None]


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
