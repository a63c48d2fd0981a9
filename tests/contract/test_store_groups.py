"""Groups: what is derived from sessions, what is leased to whom, what has been acknowledged; on both databases."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.databases import connected
from helpers.groups import Groups
from helpers.log import created
from helpers.store import Store, reward
from sqlalchemy import insert, select

from app.domain.events import Failure, SessionClosed
from app.domain.groups import GroupKey
from app.domain.selection import Selection
from app.features.checkpoints import operations
from app.features.checkpoints.operations import FinishRestore, Make, RestoreGroups
from app.features.checkpoints.schema import checkpoint_sessions, checkpoints
from app.features.groups import reads as group_reads
from app.features.groups.operations import Acknowledged, Measure, Settle
from app.features.groups.reads import ACKNOWLEDGEMENTS, Candidate
from app.features.runs.operations import EndRun, RunErased
from app.features.webhooks.rows import Cursor, pending
from app.store.dialect import now
from app.store.feed import START, end
from app.store.log import Appended
from app.store.log_sessions import Close, Create, ShareReward
from app.store.rollouts import in_groups
from app.store.schema import events
from app.store.sessions import closed_sessions, load_head
from ops.verify import verify

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


async def test_a_failed_session_has_arrived_until_its_log_says_otherwise(made: Groups) -> None:
    await made.create("g", "root", 0)
    await made.store.submit(Create("child", 1.0, created(parent="root"), None))
    await made.store.submit(reward("child", 0.25))
    why = Failure("sandbox", "the disk is full")
    await made.store.submit(Close("root", 5.0, failed=why))
    assert await made.counts("g") == (1, 0, 1, False), "a child is open"
    closed = await made.store.submit(Close("child", 5.0, reason="root"))
    assert closed.events[-1].event == SessionClosed("root", why)
    assert await made.counts("g") == (1, 0, 0, True), "a child may have a reward where its root has none"
    assert await made.free() == ["g"]
    key = GroupKey("default", "g")
    attempts = await made.store.database.read(lambda c: group_reads.attempts(c, [key]))
    assert [(one.failed, one.finished) for one in attempts[key]] == [(Failure("sandbox"), True)]
    await made.store.submit(reward("root", 1.0))
    assert await made.counts("g") == (1, 0, 1, False), "the child has not the root's reward yet"
    await made.store.submit(ShareReward("child", 6.0))
    assert await made.counts("g") == (1, 0, 0, True)
    for name in ("root", "child"):
        head = await made.store.database.read(lambda c: load_head(c, name))  # noqa: B023
        assert (head and head.failed) is None
    assert (await verify(made.store.database)).problems == []


async def test_an_equal_reward_ends_the_failure_of_a_child_too(made: Groups) -> None:
    await made.create("g", "root", 0)
    await made.store.submit(Create("child", 1.0, created(parent="root"), None))
    await made.store.submit(reward("root", 1.0))
    await made.store.submit(ShareReward("child", 2.0))
    await made.store.submit(Close("root", 3.0, failed=Failure("sandbox", "the disk is full")))
    await made.store.submit(Close("child", 3.0, reason="root"))
    await made.store.submit(reward("root", 1.0))
    await made.store.submit(ShareReward("child", 4.0))
    head = await made.store.database.read(lambda c: load_head(c, "child"))
    assert head is not None
    assert (head.failed, head.reward) == (None, 1.0)
    assert (await verify(made.store.database)).problems == []


async def test_an_erasure_leaves_a_failures_kind_and_nothing_of_its_message(made: Groups) -> None:
    await made.create("g", "a")
    await made.store.submit(Close("a", 5.0, failed=Failure("agent", "a secret")))
    await made.store.erase("a")
    session = await made.store.session("a")
    assert session.failed == Failure("agent", erased=True)
    data = await made.store.database.read(lambda c: c.execute(select(events.c.data)).scalars().all())
    assert not any(b"secret" in bytes(one) for one in data)
    assert (await verify(made.store.database)).problems == []


async def test_groups_of_evaluations_are_for_who_asks_for_them(made: Groups) -> None:
    for name, group_id, evaluation in (("a", "g", True), ("b", "mixed", True), ("c", "mixed", None)):
        event = created(group_id=group_id, evaluation=evaluation)
        assert isinstance(await made.store.submit(Create(name, 1.0, event, None)), Appended)
    below = await made.store.submit(Create("below", 1.0, created(parent="a"), None))
    assert below.events[0].event.config.evaluation is True
    for name in ("below", "a", "c"):
        await made.finish(name)
    await made.store.submit(ShareReward("below", 6.0))
    assert await made.counts("mixed") == (1, 0, 0, True), "the evaluation is open and does not count"
    assert await made.free() == ["mixed"]
    assert await made.free(evaluation=True) == ["g", "mixed"]
    keys = [GroupKey("default", "g"), GroupKey("default", "mixed")]
    logs = await made.store.database.read(lambda c: group_reads.turn_events(c, keys))
    assert [sorted(logs[key]) for key in keys] == [["a", "below"], ["c"]]
    await made.finish("b")
    assert await made.counts("mixed") == (1, 0, 0, True)
    assert (await verify(made.store.database)).problems == []


async def test_a_turns_reward_is_not_the_sessions(made: Groups) -> None:
    await made.create("g", "a")
    await made.store.take_turn("a")
    await made.store.submit(reward("a", 1.0, turn=1))
    await made.store.close("a")
    assert await made.counts("g") == (1, 0, 1, False)


async def test_an_erased_session_no_longer_counts(made: Groups) -> None:
    await made.create("g", "a")
    await made.create("g", "b")
    await made.finish("a")
    await made.store.close("b")
    await made.store.erase("b")
    assert await made.counts("g") == (1, 1, 0, True)
    assert await made.free(attempts=2) == ["g"], "it will not come again"
    await made.store.erase("a")
    assert await made.counts("g") == (0, 2, 0, False)
    assert await made.free() == []


async def test_a_group_of_an_erased_run_is_not_that_of_the_next_run_of_its_name(made: Groups) -> None:
    for of in ("run", "other"):
        await made.complete("g", run=of)
        await made.lease("one", await made.candidates(run=of))
        assert (await made.ack("one", "g", run=of)).acknowledged == ["g"]
    await made.store.submit(Make("*", "cut", "now"))
    cut = (await made.store.database.read(operations.every))[0].id
    assert await made.store.submit(EndRun("run", erase=True)) == "erasing"
    assert await made.store.submit(RunErased("run")) is False, "no session is erased yet"
    for name in ("run-g-0", "run-g-1"):
        await made.store.erase(name)
    assert await made.store.submit(RunErased("run")) is True
    assert await made.row("g", run="run") is None
    assert await made.store.submit(EndRun("run", erase=True)) == "erased"
    await made.create("g", "new", 0, at=2.0, run="run", group_size=2)
    assert await made.store.submit(RunErased("run")) is True, "a process that is late ends no run of another"
    await made.finish("new")
    row = await made.row("g", run="run")
    assert (row.sessions, row.erased, row.arrived, row.completed_at) == (1, 0, 1, None)
    await made.store.submit(RestoreGroups(cut, "*", GroupKey("", ""), 9))
    assert [(await made.row("g", run=of)).acked_at is None for of in ("run", "other")] == [True, False]
    await made.create("g", "newer", 1, at=2.0, run="run")
    await made.finish("newer")
    assert [one.run for one in await made.candidates()] == ["run"]
    assert (await verify(made.store.database)).problems == []


async def test_a_webhook_of_a_group_has_a_new_id_once_its_run_was_restored_or_erased(made: Groups) -> None:
    database = made.store.database

    async def ids() -> dict[str, str]:
        start = Cursor("1", START, START, 0)
        found = await database.read(lambda c: pending(c, start, end(c), None, Selection()))
        return {notice.data["run"]: notice.id for notice in found.notices}

    for of in ("a", "b"):
        await made.complete("g", run=of)
    seen = [await ids()]
    await made.store.submit(Make("a", "cut", "now"))
    before = await made.store.submit(Make("a", "before-1-cut", "restore", "cut"))
    await made.store.submit(FinishRestore(before.id, "a"))
    seen.append(await ids())
    await made.store.submit(EndRun("a", erase=True))
    for name in ("a-g-0", "a-g-1"):
        await made.store.erase(name)
    await made.store.submit(RunErased("a"))
    for name in ("again-0", "again-1"):
        await made.create("g", name, at=2.0, run="a")
        await made.finish(name)
    seen.append(await ids())
    assert [len({one[of] for one in seen}) for of in ("a", "b")] == [3, 1]


@pytest.mark.parametrize("restored", ["a", "*"])
async def test_a_run_that_is_being_restored_keeps_its_name_until_that_ends(made: Groups, restored: str) -> None:
    """Else the rest of the restore would take the leases and acknowledgements of the next run of this name."""
    await made.complete("g", run="a")
    await made.store.submit(Make(restored, "cut", "now"))
    before = await made.store.submit(Make(restored, "before-1-cut", "restore", "cut"))
    await made.store.submit(EndRun("a", erase=True))
    for name in ("a-g-0", "a-g-1"):
        await made.store.erase(name)
    assert await made.store.submit(RunErased("a")) is None
    await made.store.submit(FinishRestore(before.id, restored))
    assert await made.store.submit(RunErased("a")) is True


async def test_of_a_run_whose_gate_was_shut_a_webhook_calls_no_session_stuck_before_it_is_open(made: Groups) -> None:
    for name, run in (("first", "b"), ("held", "a"), ("last", "b")):
        await made.create(None, name, run=run)
    cursor, told = Cursor("1", START, START, 0), []
    for shut in ({"a"}, {"a"}, set[str]()):
        found = await made.store.database.read(
            lambda c: pending(c, cursor, end(c), math.inf, Selection(), shut)  # noqa: B023
        )
        told.append([notice.data["session_id"] for notice in found.notices])
        cursor = found.cursor
    assert told == [["first"], [], ["held", "last"]]


async def test_notes_are_settled_in_steps(made: Groups) -> None:
    await made.create("g", "a")
    await made.create("h", "b")
    await made.create("h", "c")
    assert await made.store.submit(Settle(2)) is True
    assert await made.store.submit(Settle(2)) is False
    assert await made.counts("g") == (1, 0, 1, False)
    assert await made.counts("h") == (2, 0, 2, False)


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
    assert (leased.key, leased.handed_out) == (GroupKey("default", "g"), 1)
    clock = await made.store.database.read(lambda c: c.execute(select(now())).scalar_one())
    assert 50 < leased.lease_until - clock <= 60
    assert await made.free() == []
    assert await made.lease("other", [seen]) == []
    assert [one.group_id for one in await made.candidates("one")] == ["g"]
    assert await made.candidates("other") == []


async def test_the_same_consumer_may_have_it_again_unless_it_wants_new_ones(made: Groups) -> None:
    await made.complete("g")
    (seen,) = await made.candidates()
    await made.lease("one", [seen])
    assert await made.lease("one", [seen], own_too=False) == []
    (again,) = await made.lease("one", [seen])
    assert again.handed_out == 2


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


async def test_an_acknowledgement_is_final(made: Groups) -> None:
    await made.complete("g")
    await made.take("one")
    await made.ack("one", "g")
    await made.create("g", "late")
    await made.finish("late")
    await made.store.submit(reward("g-0", 9.0))
    assert await made.counts("g") == (3, 0, 0, True)
    assert await made.free() == []
    assert await made.candidates("one") == []


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


async def test_one_that_lost_its_lease_so_may_still_be_acknowledged(made: Groups) -> None:
    await made.complete("g")
    await made.take("one")
    await made.create("g", "late")
    assert await made.ack("one", "g") == Acknowledged(["g"], [], [], [])
    await made.finish("late")
    assert await made.free() == []


async def test_age_is_measured_once_and_filters(made: Groups) -> None:
    for name in ("g", "h", "unknown"):
        await made.complete(name)
    g, h, unknown = await made.candidates()
    assert not g.measured
    ages = ((g, 3), (h, 7), (unknown, None))
    await made.store.submit(
        Measure([Candidate("default", one.group_id, one.completed_at, one.sessions, True, age) for one, age in ages])
    )
    assert [one.oldest_version for one in await made.candidates()] == [3, 7, None]
    assert await made.free(oldest=4) == ["h", "unknown"]
    assert await made.free(oldest=3) == ["g", "h", "unknown"]
    await made.create("h", "late")
    await made.finish("late")
    assert {one.group_id: one.measured for one in await made.candidates()} == {"g": True, "h": False, "unknown": True}
    await made.store.submit(Measure([Candidate("default", "h", h.completed_at, h.sessions, True, 1)]))
    assert not next(one for one in await made.candidates() if one.group_id == "h").measured, "of other sessions"


async def test_two_runs_may_have_groups_of_one_id(made: Groups) -> None:
    """Notes, rows, leases and acknowledgements are by run."""
    await made.complete("g")
    await made.create("g", "of-b", 0, run="b")
    assert await made.counts("g") == (2, 0, 0, True)
    assert (await made.row("g", "b")).unfinished == 1
    assert [one.key for one in await made.candidates(run="b")] == []
    await made.finish("of-b")
    await made.complete("g", run="c")
    assert [tuple(one.key) for one in await made.candidates()] == [("b", "g"), ("c", "g"), ("default", "g")]
    (seen,) = await made.candidates(run="b")
    await made.lease("one", [seen])
    assert [one.key.run for one in await made.candidates()] == ["c", "default"]
    assert await made.ack("one", "g") == Acknowledged([], [], ["g"], [])
    assert await made.ack("one", "g", run="a") == Acknowledged([], [], [], ["g"])
    assert await made.ack("one", "g", run="b") == Acknowledged(["g"], [], [], [])
    assert [one.key.run for one in await made.candidates()] == ["c", "default"]
    await made.create("g", "later", run="c")
    assert [one.key.run for one in await made.candidates()] == ["default"]


async def test_a_group_waits_for_the_largest_size_that_a_session_names(made: Groups) -> None:
    """Arrivals are distinct attempts; a session without a number is one of its own."""
    await made.create("g", "a", 0, group_size=2)
    await made.finish("a")
    assert await made.counts("g") == (1, 0, 0, False)
    await made.create("g", "again", 0, group_size=3)
    await made.finish("again")
    assert await made.counts("g") == (2, 0, 0, False), "both are rewarded, and one attempt"
    await made.create("g", "b", 1)
    await made.finish("b")
    assert (await made.row("g")).arrived == 2
    assert await made.free() == []
    await made.create("g", "alone")
    await made.finish("alone")
    row = await made.row("g")
    assert (row.arrived, row.size, row.sessions) == (3, 3, 4)
    assert await made.free(attempts=3) == ["g"]
    assert await made.free(attempts=4) == []
    await made.store.erase("b")
    assert await made.free(attempts=3) == ["g"], "it will not come again"


async def test_a_later_session_of_an_attempt_replaces_one_without_a_reward(made: Groups) -> None:
    """It neither holds the group up nor counts, whatever it does, until it is rewarded."""
    await made.create("g", "first", 0)
    await made.store.take_turn("first")
    await made.create("g", "b", 1)
    await made.finish("b")
    await made.create("g", "second", 0, at=2.0)
    assert await made.counts("g") == (2, 0, 1, False)
    await made.finish("second")
    assert await made.counts("g") == (2, 0, 0, True)
    assert [(one.session_id, one.replaced) for one in await made.attempts("g")] == [
        ("first", True),
        ("second", False),
        ("b", False),
    ]
    await made.store.close("first")
    assert await made.counts("g") == (2, 0, 0, True)
    key = GroupKey("default", "g")
    logs = await made.store.database.read(lambda c: group_reads.turn_events(c, [key]))
    assert set(logs[key]) == {"b", "second"}, "the age of a group is that of what is handed out"
    await made.create("g", "third", 0, at=3.0)
    assert await made.counts("g") == (3, 0, 1, False), "one that has a reward stays"
    await made.store.submit(reward("first", 1.0))
    assert await made.counts("g") == (4, 0, 1, False)
    for name, attempt in (("x", 7), ("y", None), ("z", None)):
        await made.create("g", name, attempt, at=4.0)
    assert [one.session_id for one in await made.attempts("g") if one.replaced] == [], "nobody else's attempt"


async def test_attempts_are_listed_in_order(made: Groups) -> None:
    for session_id, attempt in (("x", None), ("b", 2), ("a", 10), ("c", 0)):
        await made.create("g", session_id, attempt)
    await made.finish("a", 0.5)
    found = await made.attempts("g")
    assert [(one.session_id, one.attempt, one.reward, one.status) for one in found] == [
        ("c", 0, None, "open"),
        ("b", 2, None, "open"),
        ("a", 10, 0.5, "closed"),
        ("x", None, None, "open"),
    ]


async def test_the_age_is_measured_by_the_turns_of_closed_sessions(made: Groups) -> None:
    for name in ("a", "b", "open"):
        await made.create("g", name)
        await made.store.take_turn(name)
    await made.finish("a")
    await made.store.take_turn("b")
    await made.store.close("b")
    here, none = GroupKey("default", "g"), GroupKey("default", "none")
    found = await made.store.database.read(lambda c: group_reads.turn_events(c, [here, none]))
    assert {name: [row.seq for row in rows] for name, rows in found[here].items()} == {
        "a": [1, 3],
        "b": [1, 3, 5],
    }
    assert found[none] == {}


async def test_retention_can_wait_for_the_acknowledgement(made: Groups) -> None:
    """What a checkpoint has is not freed, acknowledged or not."""
    await made.complete("g", size=3)
    await made.create(None, "alone")
    await made.finish("alone")
    await made.create("g", "open")
    pin = {"session_id": "g-2", "checkpoint_id": 1, "seq": 1, "is_done": False}
    cut = {"id": 1, "run": "default", "name": "cut", "state": "made", "cut": "", "created_at": 0.0}
    async with connected(made.store.database.url, writes=True) as connection:
        await connection.execute(insert(checkpoints).values(**cut, sessions=1, groups=0))
        await connection.execute(insert(checkpoint_sessions).values(pin))
    points = made.store.database.points

    async def closed(where: Any) -> list[str]:
        found = await made.store.database.read(
            lambda c: closed_sessions(c, 9.0, (0.0, ""), 10, points=points, holding=False, where=where)
        )
        return [session_id for _, session_id in found]

    assert await closed(None) == ["alone", "g-0", "g-1"]
    assert await closed(ACKNOWLEDGEMENTS.is_given) == ["alone"]
    await made.finish("open")
    await made.take("one")
    assert await closed(ACKNOWLEDGEMENTS.is_given) == ["alone"]
    await made.ack("one", "g")
    assert await closed(ACKNOWLEDGEMENTS.is_given) == ["alone", "g-0", "g-1", "open"]
    (place,) = await made.store.database.read(lambda c: ACKNOWLEDGEMENTS.groups(c, (0.0, "", ""), 10))
    key = GroupKey(*place[1:])
    assert key == GroupKey("default", "g")
    assert await closed(in_groups([key])) == ["g-0", "g-1", "open"]
    assert await made.store.database.read(lambda c: ACKNOWLEDGEMENTS.groups(c, place, 10)) == []
