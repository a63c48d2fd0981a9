"""A real full disk, a real foreign lock, real erasure: what the client is told, and that nothing tears."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest
from helpers.store import Store, create
from sqlalchemy.engine import make_url

from app.errors import StoreFull, StoreLocked
from app.store import writer as writer_module
from app.store.log import Appended, StoredBlob
from app.store.writer import Writer

pytestmark = pytest.mark.anyio

RANDOM = random.Random(1).randbytes(300_000)
"""What does not compress, so that it is stored as it is and can be searched for."""


def file_of(url: str) -> Path:
    return Path(make_url(url).database or "")


async def set_page_limit(store: Store, pages: int) -> None:
    """SQLite keeps at least what it has: with 1 it answers as on a full disk."""
    writer = store.database._sqlite
    assert writer is not None
    await writer._run_in_thread(lambda: writer.connection.execute(f"PRAGMA max_page_count = {pages}").fetchall())


async def test_a_full_database_is_507_and_nothing_acknowledged_is_lost(sqlite_store: Store) -> None:
    store = sqlite_store
    await store.create("s")
    await store.claim("s", 1)
    await set_page_limit(store, 1)
    with pytest.raises(StoreFull):
        await store.commit("s", 2, text=RANDOM)
    await store.head_equals_fold("s")
    assert len(await store.open_turns("s")) == 1, "the claim stands: the turn may be committed later"
    await set_page_limit(store, 1 << 30)
    assert isinstance(await store.commit("s", 2, text=RANDOM), Appended)
    await store.head_equals_fold("s")


async def test_a_batch_that_meets_a_full_store_fails_whole(sqlite_store: Store) -> None:
    await set_page_limit(sqlite_store, 1)
    writer = Writer(sqlite_store.database)
    blob = StoredBlob(0, "metadata", len(RANDOM), "h" * 64, RANDOM)
    tasks = [asyncio.create_task(writer.submit(create(name, blob=blob))) for name in "abc"]
    await asyncio.sleep(0)
    writer.start()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await writer.stop()
    assert all(isinstance(outcome, StoreFull) for outcome in outcomes)
    assert [await sqlite_store.head(name) for name in "abc"] == [None] * 3


async def test_each_write_waits_for_a_foreign_lock_from_when_it_was_asked_for(
    sqlite_store: Store, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one transaction, or queued behind another that waits: the time is its own, and no more of it."""
    writer = Writer(sqlite_store.database)
    monkeypatch.setattr(writer_module, "LOCKED_S", 0.2)
    brief = asyncio.create_task(writer.submit(create("brief")))
    await asyncio.sleep(0)
    monkeypatch.setattr(writer_module, "LOCKED_S", 30.0)
    patient = asyncio.create_task(writer.submit(create("patient")))
    await asyncio.sleep(0)
    foreign = sqlite3.connect(file_of(sqlite_url), isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    writer.start()
    with pytest.raises(StoreLocked):
        await brief
    late = asyncio.create_task(writer.submit(create("late")))
    await asyncio.sleep(0)
    assert not patient.done()
    foreign.execute("ROLLBACK")
    foreign.close()
    assert [type(outcome) for outcome in await asyncio.gather(patient, late)] == [Appended, Appended]
    await writer.stop()
    assert await sqlite_store.head("brief") is None


async def test_what_waits_for_a_foreign_lock_does_not_keep_the_thread(sqlite_store: Store, sqlite_url: str) -> None:
    """What needs no lock goes on meanwhile: an erasure's look at the log file, say."""
    foreign = sqlite3.connect(file_of(sqlite_url), isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(sqlite_store.create("s"))
    await asyncio.sleep(0)
    await sqlite_store.database.give_back()
    assert not waiting.done()
    foreign.execute("ROLLBACK")
    foreign.close()
    assert isinstance(await waiting, Appended)
