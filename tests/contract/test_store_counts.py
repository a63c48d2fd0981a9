"""What the store counts, on both databases."""

from __future__ import annotations

import pytest
from helpers.store import Store, claim, commit, create, release

from app.store.database import Database
from app.store.dialect import StorePoints

pytestmark = pytest.mark.anyio


async def test_a_commit_that_acknowledges_is_told_with_its_time_and_a_claim_is_not(database_url: str) -> None:
    told: list[float] = []
    database = Database(database_url, told.append, points=StorePoints())
    await database.open()
    try:
        async with Store.over(database) as store:
            await store.submit(create("s"))
            before = len(told)
            claimed = await store.submit(claim("s", 1, store.me))
            assert len(told) == before
            assert await store.submit(commit("s", claimed.events[0].seq, store.me))
            assert len(told) == before + 1
            assert all(0 < seconds < 60 for seconds in told)
    finally:
        await database.close()


async def test_the_writer_tallies_what_was_appended_and_nothing_that_was_refused(store: Store) -> None:
    await store.submit(create("s"))
    await store.submit(claim("s", 1, store.me))
    await store.submit(release("s", 2, store.me))
    await store.submit(release("s", 2, store.me))
    assert store.writer.tally.events == {"SessionCreated": 1, "TurnOpened": 1, "TurnRejected": 1}
    assert store.writer.waiting == (0, 0)
