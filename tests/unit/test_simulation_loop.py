"""The simulation's event loop: time that jumps, owners that freeze and die, an order that follows from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.tools.simulation.loop import Owner, SimulatedLoop, Stuck


def loop_of(seed: int = 1, faults: list[str] | None = None) -> SimulatedLoop:
    told = [] if faults is None else faults
    return SimulatedLoop(random.Random(seed), lambda message, error: told.append(message))


def run(loop: SimulatedLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(work)


def test_an_hour_takes_no_time_and_timers_keep_their_order() -> None:
    loop = loop_of()
    seen: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))

    async def main() -> None:
        await asyncio.gather(sleep("late", 3600), sleep("soon", 1))

    run(loop, main())
    assert seen == [("soon", 1.0), ("late", 3600.0)]


def test_a_frozen_owner_does_nothing_until_it_thaws() -> None:
    loop = loop_of()
    owner = Owner("process")
    loop.add_owner(owner)
    woke: list[float] = []

    async def work() -> None:
        await asyncio.sleep(1)
        woke.append(loop.time())

    async def main() -> None:
        task = loop.create_task(work(), context=owner.context())
        owner.frozen_until = 5.0
        await asyncio.sleep(0.5)
        await task

    run(loop, main())
    assert woke == [6.0]


def test_a_killed_owner_never_goes_on() -> None:
    loop = loop_of()
    owner = Owner("process")
    loop.add_owner(owner)
    reached: list[str] = []

    async def work() -> None:
        reached.append("began")
        await asyncio.sleep(1)
        reached.append("went on")

    async def main() -> bool:
        task = loop.create_task(work(), context=owner.context())
        await asyncio.sleep(0.5)
        loop.kill(owner)
        await asyncio.sleep(10)
        return task.done()

    assert run(loop, main()) is False
    assert reached == ["began"]


def test_what_runs_on_a_thread_runs_later() -> None:
    loop = loop_of()

    async def main() -> tuple[int, float]:
        return await asyncio.to_thread(lambda: 7), loop.time()

    result, at = run(loop, main())
    assert result == 7
    assert at > 0


def test_waiting_for_nothing_is_noticed() -> None:
    loop = loop_of()

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run(loop, main())


def test_the_order_of_owners_follows_from_the_seed() -> None:
    def order(seed: int) -> list[str]:
        loop = loop_of(seed)
        seen: list[str] = []

        async def work(name: str) -> None:
            for _ in range(5):
                seen.append(name)
                await asyncio.sleep(0)

        async def main() -> None:
            owners = [Owner(name) for name in "abc"]
            for owner in owners:
                loop.add_owner(owner)
            await asyncio.gather(*(loop.create_task(work(one.name), context=one.context()) for one in owners))

        run(loop, main())
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_a_fault_that_nobody_awaits_is_told() -> None:
    faults: list[str] = []
    loop = loop_of(1, faults)

    async def main() -> None:
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    run(loop, main())
    assert len(faults) == 1
