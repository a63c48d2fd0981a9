"""Groups: what is derived from sessions, what is leased to whom, what has been acknowledged; on both databases."""

from __future__ import annotations

import pytest
from helpers.groups import Groups
from helpers.store import Store, reward
from sqlalchemy import select

from app.features.groups.operations import Acknowledged, Measure
from app.features.groups.reads import Candidate
from app.store.dialect import now

pytestmark = pytest.mark.anyio


@pytest.fixture
def made(store: Store) -> Groups:
    return Groups(store)


async def test_a_group_is_complete_when_every_session_is_closed_and_rewarded(made: Groups) -> None:
    await made.create("g", "a", 0)
    await made.create("g", "b", 1)
    assert await made.counts("g") == (2, 0, 2, False)
    await made.finish("a")
    assert await made.counts("g") == (2, 0, 1, False)
    await made.store.close("b")
    assert await made.counts("g") == (2, 0, 1, False), "closed, but not rewarded"
    await made.store.submit(reward("b", 0.5))
    assert await made.counts("g") == (2, 0, 0, True)
    assert await made.free() == ["g"]


async def test_the_order_is_that_of_completion(made: Groups) -> None:
    for name in ("late", "early"):
        await made.create(name, name)
        await made.store.close(name)
    await made.store.submit(reward("early", 1.0))
    await made.settle_groups()
    later = reward("late", 1.0)
    await made.store.submit(type(later)(later.session_id, 40.0, later.event))
    assert await made.free() == ["early", "late"]
    (first, second) = await made.candidates()
    assert [one.group_id for one in await made.candidates(after=first.place)] == ["late"]
    assert await made.free(after=second.place) == []
    assert await made.free(limit=1) == ["early"]
    again = reward("early", 2.0)
    await made.store.submit(type(again)(again.session_id, 50.0, again.event))
    assert await made.free() == ["early", "late"], "another reward does not cost a complete group its place"


async def test_a_leased_group_is_nobody_elses(made: Groups) -> None:
    await made.complete("g")
    (seen,) = await made.candidates()
    (leased,) = await made.lease("one", [seen], 60.0)
    assert (leased.group_id, leased.handed_out) == ("g", 1)
    clock = await made.store.database.read(lambda c: c.execute(select(now())).scalar_one())
    assert 50 < leased.lease_until - clock <= 60
    assert await made.free() == []
    assert await made.lease("other", [seen]) == []
    assert [one.group_id for one in await made.candidates("one")] == ["g"]
    assert await made.candidates("other") == []


async def test_a_lease_that_ended_is_free_and_its_consumer_may_still_acknowledge(made: Groups) -> None:
    await made.complete("g")
    await made.complete("h")
    assert await made.take("one", 2) == ["g", "h"]
    await made.expire("g", "h")
    assert await made.free() == ["g", "h"]
    assert await made.take("other", 1) == ["g"]
    assert await made.ack("one", "g", "h") == Acknowledged(["h"], [], ["g"], [])
    assert await made.ack("other", "g") == Acknowledged(["g"], [], [], [])
    assert await made.free() == []


async def test_an_acknowledgement_is_idempotent_and_says_what_it_did(made: Groups) -> None:
    await made.complete("g")
    await made.complete("free")
    await made.create("open", "o")
    assert await made.take("one", 1) == ["free"]
    assert await made.take("one", 1) == ["g"]
    await made.expire("free")
    assert await made.ack("other", "g", "never", "open", "g") == Acknowledged([], [], ["g", "open"], ["never"])
    assert await made.ack("one", "g") == Acknowledged(["g"], [], [], [])
    assert await made.ack("one", "g") == Acknowledged([], ["g"], [], [])
    assert await made.ack("other", "g") == Acknowledged([], [], ["g"], [])


async def test_a_session_created_in_a_leased_group_ends_the_lease(made: Groups) -> None:
    await made.complete("g")
    (seen,) = await made.candidates()
    await made.lease("one", [seen])
    await made.create("g", "late", at=20.0)
    assert await made.free() == await made.candidates("one") == []
    assert await made.lease("one", [seen]) == [], "what was read of the group is no longer so"
    assert (await made.row("g")).lease_until is None
    await made.finish("late")
    assert (await made.row("g")).completed_at == seen.completed_at
    assert await made.lease("other", [seen]) == [], "it has another session since"
    assert await made.take("other") == ["g"]
    assert (await made.row("g")).handed_out == 2
    assert await made.ack("one", "g") == Acknowledged([], [], ["g"], [])


async def test_age_is_measured_once_and_filters(made: Groups) -> None:
    for name in ("g", "h", "unknown"):
        await made.complete(name)
    g, h, unknown = await made.candidates()
    assert not g.measured
    ages = ((g, 3), (h, 7), (unknown, None))
    await made.store.submit(
        Measure([Candidate(one.group_id, one.completed_at, one.sessions, True, age) for one, age in ages])
    )
    assert [one.oldest_version for one in await made.candidates()] == [3, 7, None]
    assert await made.free(oldest=4) == ["h", "unknown"]
    assert await made.free(oldest=3) == ["g", "h", "unknown"]
    await made.create("h", "late")
    await made.finish("late")
    assert {one.group_id: one.measured for one in await made.candidates()} == {"g": True, "h": False, "unknown": True}
    await made.store.submit(Measure([Candidate("h", h.completed_at, h.sessions, True, 1)]))
    assert not next(one for one in await made.candidates() if one.group_id == "h").measured, "of other sessions"
