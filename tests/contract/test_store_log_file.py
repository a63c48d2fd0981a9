"""SQLite's log file: it stays short however its readers follow upon each other."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from fault.volumes import volume
from helpers.databases import database_at
from helpers.store import Store
from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from app.errors import StoreFull
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


async def test_small_transactions_count_by_the_pages_that_they_write(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a few bytes changes many pages: its content says nothing of what it adds to the log file."""
    monkeypatch.setattr(sqlite, "RESERVED_LOG_BYTES", 0)
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", MIB)
    monkeypatch.setattr(sqlite, "LOOK_COMMITS", 4)
    async with database_at(sqlite_url) as database, Store.over(database) as store:
        writer = database._sqlite
        assert writer is not None
        most = 0
        for number in range(300):
            await store.create(f"s{number}")
            most = max(most, (await writer._run_in_thread(writer._log_used))[1])
        assert MIB < most < 1.2 * MIB
        _, used = await writer._run_in_thread(writer._log_used)
        _, frames, _ = writer.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert used == frames * (24 + 4096)


async def test_the_log_file_of_a_small_disk_leaves_it_to_the_database(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills with data, not with the log; then whatever room there is again is used at once."""
    monkeypatch.setattr(sqlite, "MAKE_ROOM_S", 0.0)
    with volume(12 * MIB) as disk:
        path = disk.folder / "turnlog.db"
        shutil.copyfile(make_url(sqlite_url).database or "", path)
        async with database_at(f"sqlite+aiosqlite:///{path}") as database, Store.over(database) as store:
            disk.fill(10 * MIB)
            await fill(store, 16384)
            assert path.stat().st_size > 7 * MIB
            disk.clear()
            for number in range(32):
                await store.create(f"again{number}", blob=random_blob(16384))


async def test_a_log_file_that_has_filled_the_disk_is_moved_once_there_is_room(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader, such as a backup, held it; as much room as the database grows by is enough."""
    monkeypatch.setattr(sqlite, "MAKE_ROOM_S", 0.0)
    with volume(12 * MIB) as disk:
        path = disk.folder / "turnlog.db"
        shutil.copyfile(make_url(sqlite_url).database or "", path)
        async with database_at(f"sqlite+aiosqlite:///{path}") as database, Store.over(database) as store:
            await store.create("first")
            disk.fill(10 * MIB)
            with closing(sqlite3.connect(path, isolation_level=None)) as reader:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM sessions").fetchone()
                await fill(store, 64)
            assert (database.log_file_bytes() or 0) > 9 * MIB
            disk.clear()
            await store.create("healed")
            writer = database._sqlite
            assert writer is not None
            assert writer._checkpointing is not None
            await writer._checkpointing
            assert (database.log_file_bytes() or 0) < MIB


async def fill(store: Store, size: int) -> None:
    """Write until the disk is full."""
    with suppress(StoreFull):
        for number in itertools.count():
            await store.create(f"s{number}", blob=random_blob(size))


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
