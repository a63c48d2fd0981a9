"""Archives that somebody else has deleted or damaged, and the erasure of sessions that are not in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.store import Store, add_incarnation, end_incarnation

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


async def written(store: Store, session_id: str, writer: int | None = None) -> Archive:
    """A closed session in an archive of its own, named as the session; what lets the session refer to it."""
    bucket = store.database.bucket
    assert bucket is not None
    await store.create(session_id)
    await store.close(session_id)
    archive_id = await store.submit(AddArchive(session_id, writer))
    [whole] = await store.database.read(lambda connection: rows.read_whole(connection, [session_id]))
    for name in (object_of(session_id), samples_of(session_id)):
        await bucket.put(name, encode([[whole]]))
    return Archive(session_id, whole.head["version"], archive_id, 0, *places_in(whole.rows))


async def erase(store: Store, session_id: str) -> None:
    await store.submit(Erase(session_id, 6.0, has_packs=True))


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
    assert await store.submit(await written(store, "kept"))
    await store.create("erased")
    await store.close("erased")
    await erase(store, "erased")
    for name_of in lost:
        (folder / name_of("kept")).unlink()
    assert await being_erased(store, folder) == set()


async def test_a_writer_that_was_taken_for_dead_archives_nothing_after_an_erasure(store: Store, folder: Path) -> None:
    """It was frozen before its upload: the archive may hold any session."""
    frozen = await add_incarnation(store.database)
    archive = await written(store, "late", frozen)
    for name_of in (object_of, samples_of):
        (folder / name_of("late")).unlink()
    await end_incarnation(store.database, frozen)
    await store.create("erased")
    await store.close("erased")
    await erase(store, "erased")
    assert await being_erased(store, folder) == set()
    assert not await store.submit(archive)


async def test_an_archive_of_an_erased_session_that_arrives_later_is_deleted_at_once(
    store: Store, folder: Path
) -> None:
    await written(store, "erased")
    await erase(store, "erased")
    moved = {name_of: (folder / name_of("erased")).read_bytes() for name_of in (object_of, samples_of)}
    assert await being_erased(store, folder) == set()
    for name_of, body in moved.items():
        assert not (folder / name_of("erased")).exists()
        (folder / name_of("erased")).write_bytes(body)
    await being_erased(store, folder)
    assert not any((folder / name_of("erased")).exists() for name_of in moved)
