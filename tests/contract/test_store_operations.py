"""What each operation promises, on both databases."""

from __future__ import annotations

import msgspec
import pytest
from helpers.log import BODY
from helpers.store import (
    CLAIMED_AT,
    LEASE_S,
    Store,
    add_incarnation,
    claim,
    commit,
    end_incarnation,
    release,
    reward,
    silence_incarnation,
    stage,
)
from sqlalchemy import select, update

from app.domain.events import (
    RewardAssigned,
    SessionClosed,
    SessionErased,
    TurnAbandoned,
    TurnCommitted,
    TurnRejected,
    UnknownEvent,
)
from app.store.content import load_blobs, load_exchanges, load_tokens
from app.store.log import Appended, Refused, StoredBlob
from app.store.log_sessions import (
    UNREADABLE,
    AssignReward,
    Close,
    Erase,
    EraseTexts,
    Existing,
    TextRow,
    text_rows,
    without_text,
)
from app.store.log_turns import AbandonDead, AbandonLost, AbsorbAttempt, Busy, Known, Stale
from app.store.schema import events
from app.store.sessions import load_snapshot
from app.store.writer import apply_all
from workers import codec
from workers.codec import CorruptContent

pytestmark = pytest.mark.anyio


async def test_the_operations_of_a_sessions_life(store: Store) -> None:
    """What each answers while it may, and when it may not any more; what is refused writes nothing."""
    assert await store.claim("s", 1) == Refused(None)
    assert [recorded.seq for recorded in (await store.create("s", at=7.5)).events] == [1]
    assert await store.create("s", body_hash="c" * 32) == Existing("s", "open", BODY)
    assert [await store.claim("s", expected) for expected in (0, 2, 99)] == [Stale()] * 3
    taken = await store.claim("s", 1, retry_key="k" * 32)
    assert [recorded.seq for recorded in taken.events] == [2]
    assert [(row.turn, row.fence, row.incarnation) for row in await store.open_turns("s")] == [(1, 2, store.me)]
    other = await add_incarnation(store.database)
    # The last knows of the open turn: only that it is open stands in its way.
    for expected, turn in ((1, 1), (2, 1), (2, 2)):
        busy = await store.claim("s", expected, incarnation=other, turn=turn, turns=0)
        assert busy == Busy(1, 2, store.me, BODY, "k" * 32, CLAIMED_AT)
    for fence, holder in ((1, store.me), (3, store.me), (2, other)):
        assert await store.commit("s", fence, incarnation=holder) == Refused("open")
    assert len(await store.log("s")) == 2
    with pytest.raises(CorruptContent):
        await store.database.read(lambda c: load_exchanges(c, "s", [1]))
    assert isinstance((await store.release("s", 2)).events[0].event, TurnRejected)
    assert [await store.release("s", 2), await store.commit("s", 2)] == [Refused("open")] * 2

    assert isinstance(await store.claim("s", 3, turn=2), Appended)
    blob = StoredBlob(0, "params", 2, "h" * 64, codec.compress(b"{}"))
    done = await store.commit("s", 4, turn=2, text=b'{"a":1}', blobs=[blob])
    assert [recorded.seq for recorded in done.events] == [5]
    assert (await store.database.read(lambda c: load_exchanges(c, "s", [2])))[2].reply == b'{"a":1}'
    assert len((await store.database.read(lambda c: load_tokens(c, "s", [2])))[2].output_ids) == 8
    assert await store.database.read(lambda c: load_blobs(c, "s", [0])) == {0: b"{}"}
    assert isinstance(await store.submit(reward("s", 0.25, turn=2)), Appended)
    await store.head_equals_fold("s")

    assert isinstance(await store.claim("s", 6, turn=3, parent=2), Appended)
    assert await store.submit(Close("s", 8.0, "idle", idle_since=1.0)) == Refused("open")
    closed = await store.close("s")
    assert [type(recorded.event) for recorded in closed.events] == [TurnAbandoned, SessionClosed]
    for refused in (store.commit("s", 7, turn=3), store.release("s", 7), store.close("s"), store.claim("s", 9)):
        assert await refused == Refused("closed")
    assert isinstance(await store.submit(reward("s", 1.5)), Appended)
    head = await store.head("s")
    assert head is not None
    assert (head.version, head.status, head.turns, head.reward, head.created_at) == (10, "closed", 1, 1.5, 7.5)
    await store.head_equals_fold("s")
    await store.erase("s")
    assert await store.submit(reward("s", 2.0)) == Refused("erased")
    assert await store.submit(reward("nobody", 2.0)) == Refused(None)


async def test_what_their_process_does_not_know_is_looked_at_for_a_whole_batch(store: Store) -> None:
    """Each gets what its own session says, and those that can be written are, behind what has come meanwhile."""
    for name in "abcde":
        await store.create(name)
    for name in "bce":
        await store.claim(name, 1)
    for name in "bd":
        await store.submit(reward(name, 0.5))
    me = store.me
    operations = [
        claim("a", 1, me),
        commit("b", 2, me),
        claim("c", 1, me),
        claim("d", 1, me),
        commit("e", 2, me, known=Known(2, CLAIMED_AT, 1)),
        claim("none", 1, me),
    ]
    outcomes = await store.database.write(lambda tx: apply_all(tx, operations), durable=True)
    written = (outcomes[0], outcomes[1], outcomes[3])
    assert [[recorded.seq for recorded in appended.events] for appended in written] == [[2], [4], [3]]
    assert outcomes[2] == Busy(1, 2, me, BODY, None, CLAIMED_AT)
    assert outcomes[4:] == [Stale(), Refused(None)]
    for name in "abcde":
        await store.head_equals_fold(name)


async def test_a_turn_absorbs_so_many_attempts_that_came_before_it(store: Store) -> None:
    """By the database's clock, whatever the clock of the process shows."""
    await store.create("s")
    await store.take_turn("s")

    async def absorbs(age_s: float, turn: int = 1) -> bool:
        return bool(await store.submit(AbsorbAttempt("s", turn, 2, -age_s, lambda: 0.0)))

    assert [await absorbs(age_s) for age_s in (0.0, 60.0, 60.0, 60.0)] == [False, True, True, False]
    assert not await absorbs(60.0, turn=2)


async def test_erase_takes_content_and_keeps_the_skeleton(store: Store) -> None:
    blob = StoredBlob(0, "metadata", 2, "h" * 64, codec.compress(b"{}"))
    await store.create("s", blob=blob)
    await store.take_turn("s")
    assert await store.erase("s") == Refused("open"), "only a closed session is erased"
    await store.close("s")
    session = await store.session("s")
    assert session is not None
    await store.save_snapshot(session)
    erased = await store.erase("s")
    assert [type(recorded.event) for recorded in erased.events] == [SessionErased]
    assert await store.erase("s") == Refused("erased")
    assert await store.create("s") == Existing("s", "erased", BODY)
    with pytest.raises(CorruptContent):
        await store.database.read(lambda c: load_tokens(c, "s", [1]))
    with pytest.raises(CorruptContent):
        await store.database.read(lambda c: load_blobs(c, "s", [0]))
    assert await store.database.read(lambda c: load_snapshot(c, "s")) is None
    await store.save_snapshot(session)
    assert await store.database.read(lambda c: load_snapshot(c, "s")) is None, "a late snapshot brings nothing back"
    assert any(isinstance(recorded.event, TurnCommitted) for recorded in await store.log("s"))
    await store.head_equals_fold("s")


REWARDS = (
    RewardAssigned(0.25, {"style": 0.5}),
    RewardAssigned(0.75),
    RewardAssigned(1.0, {"length": 2.0, "style": 0.125}, 1),
)
BARE = [
    RewardAssigned(0.25, components_erased=True),
    RewardAssigned(0.75),
    RewardAssigned(1.0, turn=1, components_erased=True),
]


async def a_rewarded_session(store: Store, session_id: str = "s") -> None:
    await store.create(session_id)
    await store.take_turn(session_id)
    for event in REWARDS:
        assert isinstance(await store.submit(AssignReward(session_id, 4.0, event)), Appended)


async def assigned(store: Store, session_id: str = "s") -> list[RewardAssigned]:
    return [one.event for one in await store.log(session_id) if isinstance(one.event, RewardAssigned)]


async def places(store: Store) -> list[tuple[object, ...]]:
    """Where each event stands, in both orders."""
    columns = (events.c.session_id, events.c.seq, events.c.type, events.c.at, events.c.tx, events.c.position)
    query = select(*columns).order_by(events.c.session_id, events.c.seq)
    return [tuple(row) for row in await store.database.read(lambda c: c.execute(query).all())]


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_an_erasure_takes_components_out_of_rewards_and_moves_nothing(store: Store, steps: int) -> None:
    """`steps`: rewards seen before the end; what was assigned meanwhile is taken out in the end's own transaction."""
    await a_rewarded_session(store)
    await a_rewarded_session(store, "other")
    await store.close("s")
    before, upto = await places(store), 0
    for _ in range(steps):
        rows = await store.database.read(lambda c, after=upto: text_rows(c, "s", after, 1))
        await store.submit(EraseTexts("s", without_text(rows), 100))
        upto = rows[-1].seq
    erased = await store.submit(Erase("s", 6.0, upto))
    assert isinstance(erased, Appended)
    assert await assigned(store) == BARE
    assert await assigned(store, "other") == list(REWARDS)
    after = await places(store)
    assert [place for place in after if place in before] == before
    assert len(after) == len(before) + 1
    await store.head_equals_fold("s")


async def test_of_a_damaged_reward_an_erasure_leaves_nothing(store: Store) -> None:
    await a_rewarded_session(store)
    await store.close("s")
    [first, *_] = await store.database.read(lambda c: text_rows(c, "s", 0, 9))
    damaged = first.data.replace(b"style", b"stale")
    change = update(events).where(events.c.session_id == "s", events.c.seq == first.seq).values(data=damaged)
    await store.database.write(lambda tx: tx.run(change, {}), durable=True)
    assert isinstance(await store.submit(Erase("s", 6.0)), Appended)
    rows = await store.database.read(lambda c: text_rows(c, "s", 0, 9))
    assert rows[0] == TextRow(first.seq, first.type, first.version, UNREADABLE)
    assert without_text(rows) == [], "once is enough"
    with pytest.raises(UnknownEvent):
        await store.log("s")


async def test_the_claim_of_a_dead_process_is_abandoned_by_the_next_claim(store: Store) -> None:
    for death in ("ended", "silent", "unknown"):
        dead = await add_incarnation(store.database) + (1000 if death == "unknown" else 0)
        await store.create(death)
        assert isinstance(await store.claim(death, 1, incarnation=dead), Appended)
        if death == "ended":
            await end_incarnation(store.database, dead)
        elif death == "silent":
            await silence_incarnation(store.database, dead, LEASE_S + 1)
        assert await store.claim(death, 2) == Stale(), "the log has moved: the caller must look again"
        assert (await store.log(death))[-1].event == TurnAbandoned(1, 2, "owner_dead")
        assert isinstance(await store.claim(death, 3, turn=2), Appended)
        assert await store.commit(death, 2, incarnation=dead) == Refused("open"), "the dead one's late commit"
        assert isinstance(await store.commit(death, 4, turn=2), Appended)
        await store.head_equals_fold(death)


async def test_the_sweep_abandons_all_dead_claims_and_only_those(store: Store) -> None:
    dead = await add_incarnation(store.database)
    names = [f"dead-{number}" for number in range(7)]
    for name in (*names, "alive"):
        await store.create(name)
        await store.claim(name, 1, incarnation=store.me if name == "alive" else dead)
    await end_incarnation(store.database, dead)
    after: str | None = ""
    found = 0
    for _ in range(4):
        assert after is not None
        after, count = await store.submit(AbandonDead(after, 3, 9.0, LEASE_S))
        found += count
        if after is None:
            break
    assert after is None
    assert found == 7
    for name in names:
        assert (await store.log(name))[-1].event == TurnAbandoned(1, 2, "owner_dead")
        await store.head_equals_fold(name)
    assert len(await store.open_turns("alive")) == 1
    assert await store.submit(AbandonDead("", 3, 9.0, LEASE_S)) == (None, 0)


async def test_claims_of_no_turn_in_flight_are_abandoned_by_their_process(store: Store) -> None:
    other = await add_incarnation(store.database)
    for name in ("known", "lost", "others"):
        await store.create(name)
        await store.claim(name, 1, incarnation=other if name == "others" else store.me)
    assert await store.submit(AbandonLost(store.me, 9.0, {("known", 2.0), ("lost", 3.0)})) == 1
    assert (await store.log("lost"))[-1].event == TurnAbandoned(1, 2, "not_released")
    await store.head_equals_fold("lost")
    assert [len(await store.open_turns(name)) for name in ("known", "others")] == [1, 1]
    assert await store.submit(AbandonLost(store.me, 9.0, {("known", 2.0)})) == 0


async def test_a_fence_that_was_given_again_is_not_the_first_claims(store: Store) -> None:
    """A crash of PostgreSQL undid a claim, and another turn of the same process has its fence."""
    await store.create("s")
    await store.claim("s", 1)
    first, second = 1.0, 2.0
    for operation in (commit("s", 2, store.me), release("s", 2, store.me)):
        assert await store.submit(msgspec.structs.replace(operation, opened_at=first)) == Refused("open")
    assert not await store.submit(msgspec.structs.replace(stage("s", 2, store.me), opened_at=first))
    done = await store.submit(msgspec.structs.replace(commit("s", 2, store.me), opened_at=second))
    assert isinstance(done, Appended)
    await store.head_equals_fold("s")


async def test_only_a_session_that_is_being_erased_loses_components(store: Store) -> None:
    await a_rewarded_session(store)
    rows = await store.database.read(lambda c: text_rows(c, "s", 0, 9))
    assert await store.submit(EraseTexts("s", without_text(rows), 100)) is False
    assert await store.submit(EraseTexts("none", without_text(rows), 100)) is False
    assert await assigned(store) == list(REWARDS)
