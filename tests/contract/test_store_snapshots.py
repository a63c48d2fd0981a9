"""Snapshots are a cache: with one, without one or with a bad one, a session loads the same."""

from __future__ import annotations

import asyncio

import pytest
from helpers.store import Store

from app.domain.events import SessionRestored
from app.domain.session import Session, encode_session
from app.sessions.cache import SessionCache
from app.store.dialect import Tx
from app.store.log import advance_head
from app.store.sessions import load_snapshot
from workers import codec

pytestmark = pytest.mark.anyio


async def snapshot(store: Store) -> Session | None:
    return await store.database.read(lambda c: load_snapshot(c, "s"))


async def session_of(store: Store, turns: int) -> Session:
    """A session after so many more turns."""
    if await store.head("s") is None:
        await store.create("s")
    for _ in range(turns):
        await store.take_turn("s")
    session = await store.session("s")
    assert session is not None
    return session


async def test_a_snapshot_and_the_rest_of_the_log_are_the_whole_fold(store: Store) -> None:
    await store.save_snapshot(await session_of(store, 3))
    session = await session_of(store, 1)
    assert await store.loaded("s") == session


async def test_a_snapshot_is_used(store: Store) -> None:
    """With an event before it gone, only the snapshot can give the state."""
    session = await session_of(store, 1)
    await store.save_snapshot(session)
    await store.forget_event("s", 1)
    assert await store.loaded("s") == session


async def test_a_long_log_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.sessions.cache.SNAPSHOT_EVENTS", 3)
    session, cache = await session_of(store, 1), SessionCache(store.database, store.writer, 1 << 20)
    await cache.get("s")
    await asyncio.gather(*cache._saving)
    assert await snapshot(store) == session


@pytest.mark.parametrize("damage", ["bytes", "flipped", "shape", "format"])
async def test_a_damaged_or_foreign_snapshot_is_ignored(store: Store, damage: str) -> None:
    session = await session_of(store, 1)
    sound = codec.compress(encode_session(session))
    flipped = bytearray(sound)
    flipped[len(flipped) // 2] ^= 0x10
    data = {"bytes": b"no frame", "flipped": bytes(flipped), "shape": codec.pack([1, 2]), "format": sound}[damage]
    await store.save_snapshot(session, data, "session-0" if damage == "format" else None)
    assert await snapshot(store) is None
    assert await store.loaded("s") == session


async def test_after_a_restore_the_whole_log_is_read_until_there_is_a_newer_snapshot(store: Store) -> None:
    await store.save_snapshot(await session_of(store, 3))

    def restore(tx: Tx) -> None:
        advance_head(tx, "s", 9.0, [SessionRestored("checkpoint", 3)])

    await store.database.write(restore, durable=True)
    session = await session_of(store, 1)
    assert [turn.number for turn in session.turns] == [1, 4]
    assert await store.loaded("s") == session
    await store.save_snapshot(session)
    await store.forget_event("s", 1)
    assert await store.loaded("s") == session
