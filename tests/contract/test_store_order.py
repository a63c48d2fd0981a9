"""The order of commits: positions, the horizon, and paging through changed sessions."""

from __future__ import annotations

import pytest
from helpers.databases import transaction
from helpers.store import Store, claim, commit, create, reward
from sqlalchemy import select

from app.store.content import read_logs
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.feed import Position
from app.store.schema import events
from app.store.sessions import decode_events

pytestmark = pytest.mark.anyio

START = Position(0, 0)


async def pages(store: Store, upto: Position, limit: int, after: Position = START) -> list[tuple[str, Position]]:
    """Everything in (after, upto], read `limit` at a time."""
    found: list[tuple[str, Position]] = []
    while page := await store.changed(after, upto, limit):
        assert len(page) <= limit
        found += page
        after = page[-1][1]
    return found


async def test_positions_grow_within_and_across_commits(store: Store) -> None:
    for name in ("b", "a"):
        await store.create(name)
        await store.take_turn(name)
        await store.take_turn(name)
    query = select(events.c.session_id, events.c.seq).order_by(events.c.tx, events.c.position)
    rows = await store.database.read(lambda c: [tuple(row) for row in c.execute(query)])
    assert rows == [(name, seq) for name in ("b", "a") for seq in range(1, 6)]


async def test_numbering_goes_on_after_the_store_is_opened_again(database_url: str) -> None:
    found: list[Position] = []
    for name in ("first", "second"):
        database = Database(database_url, points=StorePoints())
        await database.open()
        async with Store.over(database) as store:
            await store.create(name)
            await store.take_turn(name)
            found.append((await store.changed())[-1][1])
        await database.close()
    assert found[0] < found[1]


async def test_each_session_once_in_order_of_its_last_commit(store: Store) -> None:
    for name in "abc":
        await store.create(name)
        await store.take_turn(name)
    await store.take_turn("a")
    await store.submit(reward("b", 1.0))
    assert [name for name, _ in await store.changed(upto=await store.horizon())] == ["c", "a", "b"]


async def test_as_of_a_position_later_commits_are_not_seen(store: Store) -> None:
    for name in "ab":
        await store.create(name)
        await store.take_turn(name)
    then = await store.horizon()
    before = await store.changed(upto=then)
    await store.take_turn("a")
    await store.create("c")
    await store.take_turn("c")
    assert await store.changed(upto=then) == before
    assert [name for name, _ in await store.changed(after=then)] == ["a", "c"]
    as_of = await store.database.read(lambda c: decode_events(read_logs(c, ["a"], then)["a"]))
    assert [recorded.seq for recorded in as_of] == [1, 2, 3]


async def test_a_batch_of_many_sessions_is_paged_inside_one_transaction(store: Store) -> None:
    names = [f"s{number}" for number in range(6)]
    await store.together(*(create(name) for name in names))
    await store.together(*(claim(name, 1, store.me) for name in names))
    await store.together(*(commit(name, 2, store.me) for name in names))
    upto = await store.horizon()
    assert [name for name, _ in await pages(store, upto, 1)] == names


async def test_a_late_commit_is_not_skipped(postgres_store: Store) -> None:
    """Positions are taken in one order and committed in another: the horizon waits for the slow one."""
    store = postgres_store
    for name in ("slow", "fast"):
        await store.create(name)
        await store.claim(name, 1)
    async with transaction(store.database.url) as run:
        await run(reward("slow", 1.0).apply)
        await store.commit("fast", 2)
        held = await store.horizon()
        early = await store.changed(upto=held)
        assert "fast" not in [name for name, _ in early]
    later = await store.changed(after=held, upto=await store.horizon())
    assert [name for name, _ in early + later] == ["slow", "fast"]


async def test_events_of_a_session_are_in_order_where_an_older_transaction_wrote_last(postgres_store: Store) -> None:
    """Its transaction began with another session, before those that wrote the events in between."""
    store = postgres_store
    for name in ("other", "s"):
        await store.create(name)
    async with transaction(store.database.url) as run:
        await run(reward("other", 0.0).apply)
        for value in (1.0, 2.0):
            await store.submit(reward("s", value))
        for value in (3.0, 4.0):
            await run(reward("s", value).apply)
    query = select(events.c.seq).where(events.c.session_id == "s").order_by(events.c.tx, events.c.position)
    assert await store.database.read(lambda c: list(c.execute(query).scalars())) == [1, 2, 3, 4, 5]
