"""Leases of background work, on both databases."""

from __future__ import annotations

import asyncio

import pytest
from helpers.databases import transaction
from helpers.store import Store, add_incarnation, end_incarnation, silence_incarnation

from app.store.database import Database
from app.store.incarnations import ReleaseLease, TakeLease, holds_lease

pytestmark = pytest.mark.anyio

HOUR = 3600.0


async def take(
    store: Store, who: int, *, name: str = "sweep", for_s: float = HOUR, lease_s: float = HOUR
) -> int | None:
    fence: int | None = await store.submit(TakeLease(name, who, for_s, lease_s))
    return fence


async def holds(database: Database, fence: int, name: str = "sweep") -> bool:
    return await database.write(lambda tx: holds_lease(tx, name, fence), durable=True)


async def test_one_process_has_it_and_renews_it_under_its_fence(store: Store) -> None:
    other = await add_incarnation(store.database)
    assert [await take(store, who) for who in (store.me, other, store.me, other)] == [1, None, 1, None]
    assert await take(store, other, name="archive") == 1, "another work is another lease"
    assert await holds(store.database, 1)
    assert not await holds(store.database, 2)
    assert not await holds(store.database, 1, "unheard of")


async def test_after_its_time_another_process_takes_it_with_the_next_fence(store: Store) -> None:
    other = await add_incarnation(store.database)
    assert await take(store, store.me, for_s=-1.0) == 1
    assert await holds(store.database, 1), "late, but nobody has taken it"
    assert await take(store, store.me, for_s=-1.0) == 1
    assert await take(store, other) == 2
    assert [await holds(store.database, fence) for fence in (1, 2)] == [False, True]
    assert await take(store, store.me) is None


@pytest.mark.parametrize("silent", [False, True])
async def test_a_dead_process_loses_it_at_once(store: Store, silent: bool) -> None:
    other = await add_incarnation(store.database)
    assert await take(store, other) == 1
    assert await take(store, store.me) is None
    if silent:
        await silence_incarnation(store.database, other, 5.0)
        assert await take(store, store.me) is None
    else:
        await end_incarnation(store.database, other)
    assert await take(store, store.me, lease_s=0.01) == 2


async def test_a_released_lease_is_free_and_its_fence_never_comes_back(store: Store) -> None:
    other = await add_incarnation(store.database)
    assert await take(store, store.me) == 1
    await store.submit(ReleaseLease("sweep", 1))
    assert not await holds(store.database, 1)
    assert await take(store, other) == 2
    await store.submit(ReleaseLease("sweep", 1))
    assert await take(store, store.me) is None, "only its holder can release it"
    await store.submit(ReleaseLease("sweep", 2))
    assert await take(store, other) == 3


async def test_of_two_who_take_it_at_the_same_time_one_gets_it(pair: tuple[Store, Store]) -> None:
    first, second = pair
    for number in range(10):
        name = f"work-{number}"
        fences = await asyncio.gather(take(first, first.me, name=name), take(second, second.me, name=name))
        assert sorted(fences, key=str) == [1, None]


async def test_nobody_takes_it_before_the_write_that_asked_for_it_has_ended(pair: tuple[Store, Store]) -> None:
    first, second = pair
    assert await take(first, first.me, for_s=-1.0) == 1
    async with transaction(first.database.url) as run:
        held = await run(lambda tx: holds_lease(tx, "sweep", 1))
        taking = asyncio.create_task(take(second, second.me))
        done, _ = await asyncio.wait({taking}, timeout=0.3)
        assert (held, done) == (True, set())
    assert await taking == 2
