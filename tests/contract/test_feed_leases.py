"""Several askers at once: two processes on one PostgreSQL, and the feed itself on either database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers.groups import Groups
from helpers.log import rolled_back
from helpers.store import Store, two_stores

from app.export.exporter import Exporter
from app.features.groups.feed import Feed, FeedQuery
from workers.reply import VersionSpan

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[tuple[Groups, Groups]]:
    async with two_stores(postgres_url) as (one, other):
        yield Groups(one), Groups(other)


async def test_two_processes_that_finish_one_group_make_it_complete(pair: tuple[Groups, Groups]) -> None:
    """Neither sees the other's change while it writes its own; and nobody waits in circles."""
    one, other = pair
    rounds = 20

    async def attempt(made: Groups, who: str) -> None:
        for number in range(rounds):
            await made.create(f"g{number}", f"{who}-{number}")
        await asyncio.gather(*(made.finish(f"{who}-{number}") for number in range(rounds)), made.settle_groups())

    await asyncio.gather(attempt(one, "a"), attempt(other, "b"))
    await asyncio.gather(one.settle_groups(), other.settle_groups())
    for number in range(rounds):
        assert await one.counts(f"g{number}") == (2, 0, 0, True)


def feed_over(made: Groups) -> Feed:
    database = made.store.database
    return Feed(database, made.store.writer, Exporter(database, "test"))


async def given(feed: Feed, consumer: str, size: int = 1, **wish: Any) -> list[dict[str, Any]]:
    """The reply's lines; there is no content in this store, so sessions are left out of them with a reason."""
    lines = await feed.hand_out(FeedQuery(consumer=consumer, size=size, lease_s=60.0, **wish))
    return [json.loads(line) for line in b"".join([piece async for piece in lines]).splitlines()]


async def a_group(made: Groups, name: str, *versions: str) -> None:
    """Of one session, a turn under each version."""
    await made.create(name, name)
    for version in versions:
        await made.store.take_turn(name, weight_versions=(VersionSpan(version, 0, 2),))
    await made.finish(name)


async def test_the_feed_finds_young_groups_behind_many_stale_ones(store: Store) -> None:
    made = Groups(store)
    for number in range(7):
        await a_group(made, f"old{number}", "9", str(number), "9")
    await a_group(made, "young", "9", "8")
    await a_group(made, "named", "step-1")
    feed = feed_over(made)
    for _ in range(2):
        lines = await given(feed, "one", 2, max_staleness=1, weight_version=9)
        assert [(line["group_id"], line["staleness"]) for line in lines] == [("named", None), ("young", 1)]
    assert len([one for one in await made.candidates() if one.measured]) == 7, "their logs are not read again"
    lines = await given(feed, "other", 9, max_staleness=5, weight_version=9)
    assert [(line["group_id"], line["staleness"]) for line in lines] == [("old4", 5), ("old5", 4), ("old6", 3)]


async def test_a_turn_that_was_rolled_back_makes_no_group_stale(store: Store) -> None:
    made = Groups(store)
    await made.create("g", "g")
    await made.store.take_turn("g", weight_versions=(VersionSpan("1", 0, 2),))
    await made.store.claim("g", 3, turn=2)
    again = {"turn": 2, "before": [rolled_back(0, 1)], "weight_versions": (VersionSpan("8", 0, 2),)}
    await made.store.commit("g", 4, **again)
    await made.finish("g")
    (line,) = await given(feed_over(made), "one", weight_version=9)
    assert line["staleness"] == 1


async def test_two_feeds_of_two_processes_share_the_groups_out(pair: tuple[Groups, Groups]) -> None:
    names = [f"g{number:02}" for number in range(20)]
    for name in names:
        await a_group(pair[0], name, "1")

    async def consume(made: Groups, consumer: str) -> list[str]:
        feed, taken = feed_over(made), list[str]()
        while lines := await given(feed, consumer, 2):
            mine = [line["group_id"] for line in lines]
            assert (await feed.acknowledge(consumer, mine)).acknowledged == sorted(mine)
            taken += mine
        return taken

    found = await asyncio.gather(*(consume(made, who) for made, who in zip(pair, ("a", "b"), strict=True)))
    assert sorted(found[0] + found[1]) == names


async def test_one_consumer_that_prefetches_twice_at_once_gets_no_group_twice(pair: tuple[Groups, Groups]) -> None:
    for number in range(8):
        await a_group(pair[0], f"g{number}", "1")
    calls = [given(feed_over(made), "one", 4, new_only=True) for made in pair for _ in range(2)]
    lines = [line["group_id"] for part in await asyncio.gather(*calls) for line in part]
    assert sorted(lines) == [f"g{number}" for number in range(8)]
