"""What a step of the archiver leaves behind when it is cut short, and who finishes it; on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.log import digest, payload
from helpers.store import Meanwhile, Store
from integration.reading import read
from integration.test_damaged_export import add

from app.errors import StoreFull
from app.export import formats
from app.export.archiver import CLEAN_EVERY_S, Archiver
from app.export.exporter import Exporter
from app.export.row import Fields, Row
from app.sessions.archives import Archives
from app.store.archives import rows
from app.store.archives.rows import DROPPED_AT_ONCE, DropArchived
from app.store.dialect import Tx
from app.store.log import StoredChunk, StoreOperation
from app.store.packs.bucket import Bucket
from app.store.writer import Writer
from workers import codec

pytestmark = pytest.mark.anyio

CHUNKS = 3 * DROPPED_AT_ONCE
"""More than the transaction that archives a session deletes."""


class DiskFull(StoreOperation, frozen=True):
    def apply(self, tx: Tx) -> None:
        raise StoreFull("the database is full")


class Yard:
    """A store with object storage in a folder; its archivers' clock is set by hand."""

    def __init__(self, store: Store, folder: Path) -> None:
        store.database.bucket = Bucket(f"file://{folder}", 5.0)
        self.store = store
        self.now = 100.0

    def archiver(self, writer: Writer | None = None) -> Archiver:
        """A process's archiver."""
        database, used = self.store.database, writer or self.store.writer
        exporter = Exporter(database, "test")
        archives = Archives(database, used)
        return Archiver(
            database, used, archives, exporter, None, lambda: self.now, lambda: self.store.me, closed_for_s=None
        )

    async def close_one(self, session_id: str) -> None:
        """A closed session with many chunks."""
        await self.store.create(session_id)
        await self.store.claim(session_id, 1)
        frame = codec.compress(b"rows")
        stored = [StoredChunk(number, "routed_experts", 4, digest("row"), frame) for number in range(CHUNKS)]
        await self.store.commit(session_id, 2, payloads=(payload(2, *range(CHUNKS)),), chunks=stored)
        await self.store.close(session_id)

    async def left_over(self) -> list[str]:
        return await self.store.database.read(lambda connection: rows.left_over(connection, "", 10))

    async def cut_short(self, session_id: str) -> Archiver:
        """The archiver of a process that has left some of a session in the database."""
        await self.close_one(session_id)
        archiver = self.archiver(Meanwhile(self.store.writer, DropArchived, DiskFull()).as_writer)
        with pytest.raises(StoreFull):
            await archiver.step(0.0)
        assert await self.left_over() == [session_id]
        return archiver


@pytest.fixture
async def yard(store: Store, tmp_path: Path) -> Yard:
    return Yard(store, tmp_path / "bucket")


async def test_a_step_leaves_nothing_in_the_database(yard: Yard) -> None:
    await yard.close_one("s")
    assert (await yard.archiver().step(0.0)).archived == 1
    assert await yard.left_over() == []


async def test_the_next_step_drops_what_one_that_failed_has_left(yard: Yard) -> None:
    archiver = await yard.cut_short("s")
    await archiver.step(0.0)
    assert await yard.left_over() == []


async def test_what_another_process_has_left_is_dropped_within_a_day(yard: Yard) -> None:
    other = yard.archiver()
    await other.step(0.0)
    await yard.cut_short("s")
    await other.step(0.0)
    assert await yard.left_over() == ["s"]
    yard.now += CLEAN_EVERY_S
    await other.step(0.0)
    assert await yard.left_over() == []


async def test_a_row_that_cannot_be_written_is_missing_in_the_samples_alone(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session_id in ("bad", "good"):
        await add(yard.store, session_id, None, 1.0)
    of_row = formats.of_row

    def unwritable(format: str, shape: str, row: Row) -> Fields:
        fields = of_row(format, shape, row)
        return {**fields, "messages": object()} if row.session.session_id == "bad" else fields

    monkeypatch.setattr(formats, "of_row", unwritable)
    step = await yard.archiver().step(0.0)
    assert (step.archived, step.left) == (2, 0)
    [samples] = tmp_path.rglob("samples/*.parquet")
    assert [row["session_id"] for row in read("parquet", samples.read_bytes())] == ["good"]
