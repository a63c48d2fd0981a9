"""Archives that somebody else has deleted or damaged, and the erasure of sessions that are not in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.store import Store

from app.store.archives import rows
from app.store.archives.format import object_of, samples_of
from app.store.archives.parquet import encode
from app.store.archives.rows import AddArchive, Archive, places_in
from app.store.log_sessions import Erase
from app.store.packs.bucket import Bucket
from app.store.packs.collector import Collector
from app.store.packs.rows import erasures
from app.store.packs.writer import PackWriter

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(store: Store, tmp_path: Path) -> Path:
    store.database.bucket = Bucket(f"file://{tmp_path}/bucket", 5.0)
    return tmp_path / "bucket"


async def archived(store: Store, session_id: str) -> None:
    """A closed session in an archive of its own, named as the session."""
    bucket = store.database.bucket
    assert bucket is not None
    await store.create(session_id)
    await store.close(session_id)
    archive_id = await store.submit(AddArchive(session_id, None))
    [whole] = await store.database.read(lambda connection: rows.read_whole(connection, [session_id]))
    for name in (object_of(session_id), samples_of(session_id)):
        await bucket.put(name, encode([[whole]]))
    assert await store.submit(Archive(session_id, whole.head["version"], archive_id, 0, *places_in(whole.rows)))


async def being_erased(store: Store, folder: Path) -> set[str]:
    """The erased sessions of which bytes may be left, after a round of the collector."""
    bucket = store.database.bucket
    assert bucket is not None
    packs = PackWriter(store.database, bucket, lambda: store.me)
    await Collector(
        store.database, store.writer, packs, lambda: store.me, lambda: 8.0, lambda: 0.0, keep_s=600.0
    ).round()
    return await store.database.read(erasures)


@pytest.mark.parametrize(
    "lost", [(object_of, samples_of), (object_of,), (samples_of,)], ids=["both", "rows", "samples"]
)
async def test_an_archive_that_somebody_deleted_keeps_no_erasure_waiting(
    store: Store, folder: Path, lost: tuple[Callable[[str], str], ...]
) -> None:
    await archived(store, "kept")
    await store.create("erased")
    await store.close("erased")
    await store.submit(Erase("erased", 6.0, has_packs=True))
    for name_of in lost:
        (folder / name_of("kept")).unlink()
    assert await being_erased(store, folder) == set()
