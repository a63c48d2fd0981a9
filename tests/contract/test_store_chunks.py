"""Chunks of replay payloads and refused replies: staged, committed, tombstoned, freed; on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.log import digest, payload
from helpers.store import CLAIMED_AT, Store, stage
from sqlalchemy import delete

from app.domain import retention
from app.domain.events import BlobsTombstoned, TurnRejected
from app.store.content import refused_reply
from app.store.log import Appended, StoredChunk
from app.store.log_sessions import FreeChunks, FreeReplay
from app.store.log_turns import REFUSED_KEPT, Reject
from app.store.schema import chunks as chunks_table
from app.store.sessions import last_tombstone
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
