"""Two processes on one PostgreSQL: whoever is second is told so, and neither pays for the other."""

from __future__ import annotations

import asyncio
import random

import pytest
from helpers.store import Store, add_incarnation, create, end_incarnation, reward
from sqlalchemy.util import await_only

from app.domain.events import TurnAbandoned, TurnOpened
from app.store.dialect import Tx
from app.store.feed import EventFilter, Position, changed_sessions
from app.store.log import Appended, Refused
from app.store.log_sessions import Existing
from app.store.log_turns import AbandonDead, Busy, Stale

pytestmark = pytest.mark.anyio

ROUNDS = 12


async def test_of_two_processes_that_claim_one_session_one_wins(pair: tuple[Store, Store]) -> None:
    one, other = pair
    for number in range(ROUNDS):
        name = f"s{number}"
        await one.create(name)
        outcomes = await asyncio.gather(one.claim(name, 1), other.claim(name, 1))
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Appended", "Busy"]
        winner = one if isinstance(outcomes[0], Appended) else other
        (lost,) = [outcome for outcome in outcomes if isinstance(outcome, Busy)]
        assert (lost.fence, lost.incarnation) == (2, winner.me)
        await one.head_equals_fold(name)


async def test_of_two_processes_that_create_one_id_one_finds_it_existing(pair: tuple[Store, Store]) -> None:
    """The second waits for the first's commit and then meets its row."""
    one, other = pair
    made, waiting = asyncio.Event(), asyncio.Event()

    def slow(tx: Tx) -> object:
        outcome = create("s").apply(tx)
        made.set()
        await_only(asyncio.wait_for(waiting.wait(), 5))
        await_only(asyncio.sleep(0.2))
        return outcome

    first = asyncio.ensure_future(one.database.write(slow, durable=True))
    await made.wait()
    second = asyncio.ensure_future(other.create("s"))
    waiting.set()
    assert isinstance(await first, Appended)
    assert isinstance(await second, Existing)
    assert len(await one.log("s")) == 1


async def test_close_and_commit_of_two_processes_leave_one_truth(pair: tuple[Store, Store]) -> None:
    one, other = pair
    for number in range(ROUNDS):
        name = f"s{number}"
        await one.create(name)
        await one.claim(name, 1)
        done, closed = await asyncio.gather(one.commit(name, 2), other.close(name))
        assert isinstance(closed, Appended)
        assert isinstance(done, Appended) or done == Refused("closed")
        head = await one.head(name)
        assert head is not None
        assert head.turns == int(isinstance(done, Appended))
        assert head.status == "closed"
        await one.head_equals_fold(name)


async def test_reward_and_commit_of_two_processes_both_count(pair: tuple[Store, Store]) -> None:
    one, other = pair
    for number in range(ROUNDS):
        name = f"s{number}"
        await one.create(name)
        await one.claim(name, 1)
        done, given = await asyncio.gather(one.commit(name, 2), other.submit(reward(name, 0.5)))
        assert isinstance(done, Appended)
        assert isinstance(given, Appended)
        await one.head_equals_fold(name)


async def test_two_sweeps_and_a_claim_abandon_a_dead_turn_once(pair: tuple[Store, Store]) -> None:
    one, other = pair
    dead = await add_incarnation(one.database)
    names = [f"s{number:02}" for number in range(20)]
    for name in names:
        await one.create(name)
        await one.claim(name, 1, incarnation=dead)
    await end_incarnation(one.database, dead)
    outcomes = await asyncio.gather(
        one.submit(AbandonDead("", 50, 9.0, 8.0)),
        other.submit(AbandonDead("", 50, 9.0, 8.0)),
        *(other.claim(name, 2) for name in reversed(names)),
    )
    for name, outcome in zip(reversed(names), outcomes[2:], strict=True):
        assert isinstance(outcome, Stale | Appended)
        kinds = [type(recorded.event) for recorded in (await one.log(name))[1:]]
        opened_again = [TurnOpened] if isinstance(outcome, Appended) else []
        assert kinds == [TurnOpened, TurnAbandoned, *opened_again]
        await one.head_equals_fold(name)


async def test_batches_over_the_same_sessions_do_not_wait_for_each_other(pair: tuple[Store, Store]) -> None:
    """Two writers whose batches touch the same sessions, submitted in opposite orders."""
    one, other = pair
    names = [f"s{number:02}" for number in range(20)]
    await asyncio.gather(*(one.create(name) for name in names))
    for round_number in range(10):
        outcomes = await asyncio.gather(
            *(one.submit(reward(name, float(round_number))) for name in names),
            *(other.submit(reward(name, -float(round_number))) for name in reversed(names)),
        )
        assert all(isinstance(outcome, Appended) for outcome in outcomes)
    for name in names:
        await one.head_equals_fold(name)


async def test_a_reader_that_pages_changed_sessions_skips_and_repeats_nothing(pair: tuple[Store, Store]) -> None:
    """Writers on many connections end in another order than they began; each session is created once."""
    reader = pair[1]
    rng = random.Random(5)
    names = [f"s{number:03}" for number in range(60)]

    async def make(store: Store, name: str) -> None:
        pause = rng.random() * 0.05

        def run(tx: Tx) -> None:
            create(name).apply(tx)
            await_only(asyncio.sleep(pause))

        await store.database.write(run, durable=True)

    async def tail(after: Position, seen: list[str]) -> Position:
        """Everything new up to the horizon, three sessions at a time."""
        upto = await reader.horizon()
        while page := await created_sessions(reader, after, upto, limit=3):
            assert [place for _, place in page] == sorted(place for _, place in page)
            seen.extend(name for name, _ in page)
            after = page[-1][1]
        return max(after, upto)

    at, seen, early = Position(0, 0), list[str](), 0
    lanes = [names[lane::6] for lane in range(6)]

    async def write_lane(lane: int) -> None:
        for name in lanes[lane]:
            await make(pair[lane % 2], name)

    writing = asyncio.ensure_future(asyncio.gather(*(write_lane(lane) for lane in range(6))))
    while not writing.done():
        at = await tail(at, seen)
        early = early or len(seen)
    await writing
    assert 0 < early < len(names), "the reader must have read while they wrote"
    await tail(at, seen)
    assert sorted(seen) == names


async def created_sessions(store: Store, after: Position, upto: Position, limit: int) -> list[tuple[str, Position]]:
    return await store.database.read(
        lambda c: changed_sessions(c, EventFilter(("SessionCreated",)), after=after, upto=upto, limit=limit)
    )
