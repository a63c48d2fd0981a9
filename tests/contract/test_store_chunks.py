"""Chunks of replay payloads and refused replies: staged, committed, tombstoned, freed; on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.log import digest, payload
from helpers.store import CLAIMED_AT, LEASE_S, Store, add_incarnation, end_incarnation, stage
from sqlalchemy import delete

from app.domain import retention
from app.domain.events import BlobsTombstoned, SessionClosed, TurnAbandoned, TurnRejected
from app.store.content import refused_reply, stored_chunks
from app.store.damage import SPAN
from app.store.log import Appended, Refused, StoredChunk
from app.store.log_sessions import Close, FreeChunks, FreeReplay
from app.store.log_turns import REFUSED_KEPT, AbandonDead, Reject
from app.store.schema import chunks as chunks_table
from app.store.sessions import closed_sessions, last_tombstone
from workers import codec

pytestmark = pytest.mark.anyio


def chunk(number: int, text: bytes = b"ab") -> StoredChunk:
    return StoredChunk(number, "routed_experts", len(text), digest("row"), text)


def chunks(*numbers: int) -> list[StoredChunk]:
    return [chunk(number) for number in numbers]


async def claimed(store: Store, session_id: str = "s") -> int:
    """A new session with an open turn; the turn's fence."""
    await store.create(session_id)
    await store.claim(session_id, 1)
    return 2


async def take(store: Store, *numbers: int, shared: int = 0, after: tuple[Any, ...] = ()) -> int:
    """The session's next turn, with a payload of these chunks; its fence."""
    session = await store.session("s")
    assert session is not None
    fence = session.version + 1
    ref = payload(fence, *numbers, shared=shared)
    await store.take_turn("s", payloads=(ref,), chunks=chunks(*numbers), after=after)
    return fence


async def test_only_the_holder_of_an_open_turn_can_stage(store: Store) -> None:
    other = await add_incarnation(store.database)
    assert await store.submit(stage("nobody", 2, store.me, chunk(0))) is False
    fence = await claimed(store)
    for session_id, number, holder in (("s", fence, other), ("s", fence + 1, store.me), ("s", 1, store.me)):
        assert await store.submit(stage(session_id, number, holder, chunk(0))) is False
    assert await store.chunks("s") == {}
    await store.commit("s", fence)
    assert await store.submit(stage("s", fence, store.me, chunk(0))) is False
    assert await store.chunks("s") == {}


async def test_a_close_takes_out_what_was_staged_and_leaves_the_rest(store: Store) -> None:
    await store.create("s")
    fence = await take(store, 0, 1)
    kept = [(fence, 0), (fence, 1)]
    session = await store.session("s")
    assert session is not None
    await store.claim("s", session.version, turn=2, parent=1)
    await store.submit(stage("s", session.version + 1, store.me, chunk(0)))
    closed = await store.close("s")
    assert [type(recorded.event) for recorded in closed.events] == [TurnAbandoned, SessionClosed]
    assert sorted(await store.chunks("s")) == kept
    assert await store.submit(stage("s", session.version + 1, store.me, chunk(1))) is False


@pytest.mark.parametrize("by_claim", [True, False])
async def test_what_a_dead_process_staged_goes_with_its_claim(store: Store, by_claim: bool) -> None:
    dead = await add_incarnation(store.database)
    await store.create("s")
    await store.claim("s", 1, incarnation=dead)
    assert await store.submit(stage("s", 2, dead, *chunks(0, 1))) is True
    await end_incarnation(store.database, dead)
    if by_claim:
        await store.claim("s", 1)
    else:
        await store.submit(AbandonDead("", 10, 9.0, LEASE_S))
    assert await store.chunks("s") == {}
    assert await store.submit(stage("s", 2, dead, chunk(0))) is False
    assert (await store.commit("s", 2, incarnation=dead, chunks=chunks(0))) == Refused("open")
    assert await store.chunks("s") == {}
    await store.head_equals_fold("s")


async def test_a_commit_tombstones_what_its_event_frees(store: Store) -> None:
    await store.create("s")
    first = await take(store, 0, 1)
    second = await take(store, 0, shared=1, after=(BlobsTombstoned((1,), ((first, 1),)),))
    by = (await store.log("s"))[-1].seq
    assert await store.chunks("s") == {(first, 0): (b"ab", None), (first, 1): (None, by), (second, 0): (b"ab", None)}
    session = await store.session("s")
    assert session is not None
    assert sorted(session.payloads) == [2]
    await store.head_equals_fold("s")


async def test_more_chunks_than_one_statement_takes_are_read(store: Store) -> None:
    fence = await claimed(store)
    many = SPAN + 20
    await store.commit("s", fence, chunks=chunks(*range(many)))
    keys = [(fence, number) for number in range(many)]
    found = await store.database.read(lambda connection: stored_chunks(connection, "s", keys))
    assert sorted(found) == keys


async def test_a_closed_session_is_freed_in_steps(store: Store) -> None:
    await store.create("s")
    fences = [await take(store, 0, 1) for _ in range(2)]
    before = await store.log("s")
    await store.close("s")
    session = await store.session("s")
    assert session is not None
    event = retention.tombstone_all(session)
    assert event is not None
    assert await store.submit(FreeReplay("s", session.version - 1, 9.0, event)) == Appended(())
    done = await store.submit(FreeReplay("s", session.version, 9.0, event))
    assert [recorded.event for recorded in done.events] == [event]
    by = done.events[0].seq
    assert await store.database.read(lambda connection: last_tombstone(connection, "s")) == by
    assert await store.submit(FreeChunks("s", by - 1, 3)) is False, "as after a crash that took the event back"
    assert not any(data is None for data, _ in (await store.chunks("s")).values())
    assert [await store.submit(FreeChunks("s", by, 3)) for _ in range(3)] == [True, False, False]
    assert await store.chunks("s") == {(fence, number): (None, by) for fence in fences for number in (0, 1)}
    after = await store.session("s")
    assert after is not None
    assert (after.payloads, after.status, len(after.turns)) == ({}, "closed", 2)
    assert (await store.log("s"))[: len(before)] == before
    await store.head_equals_fold("s")


async def test_a_closed_session_is_found_until_nothing_is_left_to_free(store: Store) -> None:
    async def held(name: str = "s", cutoff: float = 100.0) -> bool:
        places = await store.database.read(
            lambda connection: closed_sessions(
                connection, cutoff, (0.0, ""), 10, points=store.database.points, holding=True
            )
        )
        return name in [session_id for _, session_id in places]

    await store.create("s")
    fence = await take(store, 0)
    assert not await held()
    await store.close("s")
    assert await held()
    assert not await held(cutoff=4.9)
    await store.submit(FreeReplay("s", 4, 9.0, BlobsTombstoned((1,), ((fence, 0),), "closed")))
    assert await held()
    await store.submit(FreeChunks("s", 5, 8))
    assert not await held()
    await reject(store, "r")
    await store.close("r")
    assert await held("r")
    await store.submit(FreeChunks("r", 0, 8))
    assert not await held("r")


async def test_an_idle_session_is_closed(store: Store) -> None:
    await store.create("s", at=10.0)
    assert await store.submit(Close("s", 20.0, "idle", idle_since=9.9)) == Refused("open")
    done = await store.submit(Close("s", 20.0, "idle", idle_since=10.0))
    assert [recorded.event for recorded in done.events] == [SessionClosed("idle")]
    session = await store.session("s")
    assert session is not None
    assert (session.status, session.closed_at) == ("closed", 20.0)
    assert await store.submit(Close("s", 30.0, "idle", idle_since=25.0)) == Refused("closed")
    assert await store.submit(Close("nobody", 30.0, "idle", idle_since=25.0)) == Refused(None)
    await store.head_equals_fold("s")


async def reject(store: Store, session_id: str = "s", text: bytes = b"bad") -> int:
    """A turn that ends because of its reply; its fence."""
    if await store.session(session_id) is None:
        await store.create(session_id)
    session = await store.session(session_id)
    assert session is not None
    fence = session.version + 1
    await store.claim(session_id, session.version)
    event = TurnRejected(1, fence, "upstream_invalid", None, "rule", 99, len(text))
    assert isinstance(
        await store.submit(Reject(session_id, fence, store.me, CLAIMED_AT, 3.0, event, 99, codec.compress(text))),
        Appended,
    )
    return fence


async def refused(store: Store, fence: int, session_id: str = "s") -> tuple[int, bytes] | None:
    return await store.database.read(lambda connection: refused_reply(connection, session_id, fence))


async def test_a_refused_reply_is_kept_and_ends_the_turn(store: Store) -> None:
    fence = await claimed(store)
    await store.submit(stage("s", fence, store.me, chunk(0)))
    event = TurnRejected(1, fence, "upstream_invalid", None, "rule", 99, 3)
    done = await store.submit(Reject("s", fence, store.me, CLAIMED_AT, 3.0, event, 99, codec.compress(b"bad")))
    assert [recorded.event for recorded in done.events] == [event]
    assert await refused(store, fence) == (99, b"bad")
    assert (await store.open_turns("s"), await store.chunks("s")) == ([], {})
    await store.head_equals_fold("s")
    assert await refused(store, fence + 1) is None
    assert await refused(store, fence, "t") is None


async def test_only_the_newest_refused_replies_of_a_session_are_kept(store: Store) -> None:
    elsewhere = await reject(store, "t")
    fences = [await reject(store, text=b"%d" % number) for number in range(REFUSED_KEPT + 3)]
    found = [await refused(store, fence) for fence in fences]
    assert found[:3] == [None] * 3
    assert found[3:] == [(99, b"%d" % number) for number in range(3, REFUSED_KEPT + 3)]
    assert REFUSED_KEPT == 8
    assert await refused(store, elsewhere, "t") == (99, b"bad")


async def test_a_commit_whose_staged_chunks_a_crash_of_the_database_took_writes_nothing(store: Store) -> None:
    """They are not synced one by one: a claim may survive what was staged under it."""
    fence = await claimed(store)
    await store.submit(stage("s", fence, store.me, *chunks(0, 1)))
    gone = delete(chunks_table).where(chunks_table.c.session_id == "s", chunks_table.c.number == 1)
    await store.database.write(lambda tx: tx.run(gone, {}), durable=True)
    assert not isinstance(await store.commit("s", fence, payloads=(payload(fence, 0, 1),)), Appended)
    assert len(await store.log("s")) == 2
    await store.head_equals_fold("s")
