"""SQLite's log file: it stays short however its readers follow upon each other."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from helpers.databases import database_at
from helpers.store import Store
from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from app.store import sqlite
from app.store.log import StoredBlob
from app.store.schema import events

pytestmark = pytest.mark.anyio

MIB = 1 << 20
BLOB_BYTES = 256 << 10


@contextmanager
def always_read(path: str) -> Iterator[None]:
    """Two readers in turns: the next has begun before the last has ended, so that at no moment there is none."""
    over = threading.Event()

    def read() -> None:
        old, new = (sqlite3.connect(path, isolation_level=None) for _ in range(2))
        while not over.wait(0.002):
            new.execute("BEGIN")
            new.execute("SELECT count(*) FROM sessions").fetchone()
            if old.in_transaction:
                old.execute("COMMIT")
            old, new = new, old
        old.close()
        new.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def test_the_log_file_begins_anew_though_somebody_always_reads(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "RESERVED_LOG_BYTES", 0)
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", MIB)
    monkeypatch.setattr(sqlite, "LONG_LOG_BYTES", 2 * MIB)
    path = make_url(sqlite_url).database or ""
    async with database_at(sqlite_url) as database, Store.over(database) as store:
        with always_read(path):
            for number in range(64):
                await store.create(f"s{number}", blob=random_blob(BLOB_BYTES))
        assert 2 * MIB < (database.log_file_bytes() or 0) < 6 * MIB, "of 16 MiB that were written"


def random_blob(size: int) -> StoredBlob:
    return StoredBlob(0, "metadata", size, os.urandom(32).hex(), os.urandom(size))


async def test_a_read_that_is_cut_off_keeps_nothing_open(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves in the middle of a read: a browser, an export's client. Nobody collects garbage meanwhile."""
    monkeypatch.setattr(sqlite, "EMPTY_TRIES", 2)
    database = sqlite_store.database
    for number in range(40):
        await sqlite_store.create(f"s{number}")

    def read(connection: Connection) -> int:
        return sum(len(connection.execute(events.select()).all()) for _ in range(4))

    gc.disable()
    try:
        for step in range(100):
            reading = asyncio.ensure_future(database.read(read))
            await asyncio.sleep(step * 0.0001)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        await database.empty_log_file()
    finally:
        gc.enable()
    assert database.log_file_bytes() == 0
