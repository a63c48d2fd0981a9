"""Gates over a real store: who waits, in which order they pass, and what ends the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from helpers.gates import Passing
from helpers.store import Store

from app.domain.fleet import AdapterPaused, AdapterResumed, FleetPaused, FleetResumed, Placed
from app.errors import Overloaded
from app.features.gates.gates import AT_ONCE, REST_S, Gates, Wait
from app.fleet.state import FleetState

pytestmark = pytest.mark.anyio


@pytest.fixture
async def state(sqlite_store: Store) -> AsyncIterator[FleetState]:
    made = FleetState(sqlite_store.database, sqlite_store.writer)
    await made.start()
    yield made
    await made.stop()


async def shut(state: FleetState, name: str = "lora") -> None:
    count = state.fleet.closings("default", name)[1] + 1
    await state.append(lambda fleet: AdapterPaused(name, count, 0.0), lease_s=600)


async def open_(state: FleetState, name: str = "lora") -> None:
    await state.append(lambda fleet: AdapterResumed(name, fleet.gates.adapters[name].closings))


class Crowd:
    """Turns that wait, and the order in which they pass."""

    def __init__(self, gates: Gates, count: int, adapter: str = "lora") -> None:
        self.passed: list[int] = []
        turns = [Passing(adapter) for _ in range(count)]
        self.tasks = [asyncio.create_task(self._one(turn, gates.arrive(turn))) for turn in turns]

    async def _one(self, turn: Passing, wait: Wait | None) -> None:
        if wait is not None:
            await wait(turn)
        self.passed.append(turn.ticket)

    async def all(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*self.tasks)


async def test_they_pass_in_order_of_their_tickets_and_quickly(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    crowd = Crowd(gates, 1000)
    await asyncio.sleep(0)
    assert gates.held() == {("default", "lora"): 1000}
    await open_(state)
    await crowd.all()
    assert crowd.passed == sorted(crowd.passed)
    assert gates.held().total() == 0


async def test_who_comes_while_they_pass_stands_behind_them_and_holds_nobody_else_up(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    crowd = Crowd(gates, 10 * AT_ONCE)
    await asyncio.sleep(0)
    await open_(state)
    await asyncio.sleep(0)
    assert 0 < len(crowd.passed) <= 2 * AT_ONCE, "not all at once"
    assert gates.arrive(Passing("other")) is None
    arriving = Passing("lora")
    wait = gates.arrive(arriving)
    assert wait is not None
    late = asyncio.ensure_future(wait(arriving))
    await asyncio.sleep(0)
    assert not late.done()
    await shut(state)
    await asyncio.sleep(4 * REST_S)
    assert len(crowd.passed) < len(crowd.tasks), "a gate that is shut stops those who have not passed"
    await open_(state)
    await late
    assert len(crowd.passed) == len(crowd.tasks)
    assert crowd.passed == sorted(crowd.passed)
    assert gates.arrive(Passing("lora")) is None


async def test_a_gate_that_is_shut_again_at_once_keeps_their_places(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    crowd = Crowd(gates, 5)
    await asyncio.sleep(0)
    seq = state.fleet.version
    for placed in (
        Placed(seq + 1, 1.0, AdapterResumed("lora", 1)),
        Placed(seq + 2, 2.0, AdapterPaused("lora", 2, 9e9)),
    ):
        state._apply(placed)  # both before anybody who waits has had the time to go
    late = Crowd(gates, 5)
    await asyncio.sleep(0.01)
    assert gates.held() == {("default", "lora"): 10}
    state._apply(Placed(seq + 3, 3.0, AdapterResumed("lora", 2)))
    await crowd.all()
    await late.all()
    assert (crowd.passed, late.passed) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])


async def test_one_that_gives_up_leaves_the_others(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    crowd = Crowd(gates, 3)
    await asyncio.sleep(0)
    crowd.tasks[1].cancel()
    await asyncio.wait({crowd.tasks[1]})
    assert gates.held() == {("default", "lora"): 2}
    await open_(state)
    await asyncio.gather(crowd.tasks[0], crowd.tasks[2])
    assert len(crowd.passed) == 2


async def test_each_waits_for_its_own_gate_and_the_fleets(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    await state.append(lambda fleet: FleetPaused(1, 0.0), lease_s=600)
    ours, others = Crowd(gates, 2), Crowd(gates, 2, "other")
    await open_(state)
    await asyncio.sleep(0)
    assert gates.held() == {("default", "lora"): 2, ("default", "other"): 2}
    await shut(state)
    await state.append(lambda fleet: FleetResumed(1))
    await others.all()
    assert gates.held() == {("default", "lora"): 2}
    await open_(state)
    await ours.all()


async def test_a_server_that_stops_lets_go_of_all(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    crowd = Crowd(gates, 3)
    asking = asyncio.create_task(gates.opens(None, "lora", 60))
    await asyncio.sleep(0)
    gates.stop()
    found = await asyncio.gather(*crowd.tasks, return_exceptions=True)
    assert [type(one) for one in found] == [Overloaded] * 3
    assert await asking is False
    with pytest.raises(Overloaded):
        await gates.wait(Passing("lora"))
    assert await gates.opens(None, "lora", 60) is False
    await gates.wait(Passing("other"))


async def test_asking_for_an_adapter_goes_by_its_own_gate(state: FleetState) -> None:
    gates = Gates(state)
    await state.append(lambda fleet: FleetPaused(1, 0.0), lease_s=600)
    assert await gates.opens(None, "lora", 60) is True
    await shut(state)
    assert await gates.opens(None, "lora", 0) is False
    asking = [asyncio.create_task(gates.opens(None, "lora", 60)) for _ in range(2)]
    await asyncio.sleep(0)
    await open_(state)
    assert await asyncio.gather(*asking) == [True, True]
    assert gates.held().total() == 0


async def test_who_asks_for_an_adapter_waits_on_where_it_is_open_for_a_moment(state: FleetState) -> None:
    gates = Gates(state)
    await shut(state)
    asking = asyncio.create_task(gates.opens(None, "lora", 60))
    await asyncio.sleep(0)
    seq = state.fleet.version
    state._apply(Placed(seq + 1, 1.0, AdapterResumed("lora", 1)))
    state._apply(Placed(seq + 2, 2.0, AdapterPaused("lora", 2, 9e9)))
    await asyncio.sleep(0.01)
    assert not asking.done()
    state._apply(Placed(seq + 3, 3.0, AdapterResumed("lora", 2)))
    assert await asking is True


async def test_what_was_shut_meanwhile_is_told_also_where_it_is_open_again(state: FleetState) -> None:
    gates = Gates(state)
    ours, others = Passing("lora"), Passing("other")
    assert gates.try_pass(ours)
    assert gates.try_pass(others)
    assert not await gates.was_shut(ours)
    await shut(state)
    assert not gates.try_pass(ours)
    await open_(state)
    assert await gates.was_shut(ours)
    assert not await gates.was_shut(others)
