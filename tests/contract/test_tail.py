"""Following the log over all sessions: nothing is skipped, and a log that lost its end is noticed."""

from __future__ import annotations

import pytest
from helpers.store import Store, reward

from app.features.page.watch import Tail, events_since
from app.store import feed
from app.store.feed import START, Position

pytestmark = pytest.mark.anyio


async def since(store: Store, after: Position, limit: int = 100) -> Tail:
    return await store.database.read(lambda connection: events_since(connection, after, limit))


async def end(store: Store) -> Position:
    return await store.database.read(feed.end)


async def test_each_session_is_named_once_and_the_next_look_begins_behind(store: Store) -> None:
    await store.create("a")
    await store.create("b")
    await store.take_turn("a")
    found = await since(store, START)
    assert sorted(found.session_ids) == ["a", "b"]
    assert found.events == 4
    assert found.last == await end(store)
    assert (await since(store, found.last)).session_ids == []
    await store.submit(reward("b", 1.0))
    assert (await since(store, found.last)).session_ids == ["b"]


async def test_a_long_way_is_gone_in_steps(store: Store) -> None:
    for number in range(7):
        await store.create(f"s{number}")
    seen: list[str] = []
    place = START
    while True:
        found = await since(store, place, 3)
        if not found.events:
            break
        assert found.events <= 3
        seen += found.session_ids
        place = found.last
    assert seen == [f"s{number}" for number in range(7)]


async def test_an_event_that_is_gone_is_noticed(store: Store) -> None:
    await store.create("a")
    await store.submit(reward("a", 1.0))
    place = await end(store)
    await store.forget_event("a", 2)
    found = await since(store, place)
    assert not found.holds
    assert found.session_ids == []
    assert not (await since(store, Position(place.tx + 5, place.position + 5))).holds
