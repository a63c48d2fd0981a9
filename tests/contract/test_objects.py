"""Objects: what a turn uploads, what its reader finds, and what is deleted when; on both databases, over a folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.buckets import TestBucket
from helpers.google_storage import GoogleStorage
from helpers.log import digest, payload
from helpers.store import LEASE_S, Store
from sqlalchemy import insert, select, update
from sqlalchemy.sql import Executable

from app.domain import retention
from app.errors import PayloadsUnavailable, StartupError
from app.features.objects import names, rows
from app.features.objects.bucket import Bucket
from app.features.objects.objects import SMALL_BYTES, Objects
from app.features.objects.schema import dead_objects
from app.store.content import load_chunks
from app.store.dialect import Tx
from app.store.log import Appended, StoredChunk
from app.store.log_sessions import Close, Erase, FreeChunks, FreeReplay
from workers import codec

pytestmark = pytest.mark.anyio

KEEP_S = 600.0


def large(number: int) -> bytes:
    """Rows that no compression makes small."""
    return random.Random(number).randbytes(SMALL_BYTES + 100)


class Yard:
    """A store with objects in a folder."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.bucket = store.database.bucket = Bucket(f"file://{folder}", 5.0)
        self.objects = self.of_process(store.me)

    def of_process(self, incarnation: int) -> Objects:
        """What another process of the same store has."""
        store = self.store
        return Objects(store.database, store.writer, self.bucket, lambda: incarnation, lambda: LEASE_S, keep_s=KEEP_S)

    def there(self) -> list[str]:
        """The objects of sessions."""
        found = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return sorted(name for name in found if names.parsed(name) is not None)

    async def claimed(self, session_id: str) -> None:
        """A new session with an open turn, of fence 2."""
        await self.store.create(session_id)
        await self.store.claim(session_id, 1)

    async def put(self, session_id: str, *frames: bytes, by: Objects | None = None) -> list[StoredChunk]:
        chunks = [
            StoredChunk(number, "routed_experts", len(frame), digest("row"), codec.compress(frame))
            for number, frame in enumerate(frames)
        ]
        return await (by or self.objects).stored(session_id, 2, chunks)

    async def commit(self, session_id: str, stored: Sequence[StoredChunk]) -> None:
        ref = payload(2, *range(len(stored)))
        assert isinstance(await self.store.commit(session_id, 2, payloads=(ref,), chunks=stored), Appended)

    async def turn(self, session_id: str, *frames: bytes) -> None:
        await self.claimed(session_id)
        await self.commit(session_id, await self.put(session_id, *frames))

    async def frames(self, session_id: str, *numbers: int) -> list[bytes | None]:
        found = await load_chunks(self.store.database, session_id, [(2, number) for number in numbers])
        return [None if (frame := found[2, number]) is None else codec.decompress(frame) for number in numbers]

    async def free(self, session_id: str) -> None:
        """Close a session and free its payloads, as the janitor does."""
        await self.store.submit(Close(session_id, 5.0))
        session = await self.store.session(session_id)
        assert session is not None
        event = retention.tombstone_all(session)
        assert event is not None
        freed = await self.store.submit(FreeReplay(session_id, session.version, 6.0, event))
        await self.store.submit(FreeChunks(session_id, freed.events[0].seq, 10))

    async def erase(self, session_id: str) -> None:
        await self.store.submit(Close(session_id, 5.0))
        await self.store.submit(Erase(session_id, 6.0))

    async def is_being_erased(self, session_id: str) -> bool:
        return await self.store.database.read(lambda connection: rows.is_being_erased(connection, session_id))

    async def look(self, after_s: float = 0.0) -> list[str]:
        """A look at the queue so much later; the objects that are left."""
        older = update(dead_objects).values(since=dead_objects.c.since - after_s)
        await self.store.database.write(lambda tx: tx.run(older, {}), durable=True)
        await self.objects.look()
        return self.there()

    async def sweep(self) -> None:
        self.objects._next_sweep = 0.0
        await self.objects.look()


@pytest.fixture
async def yard(store: Store, tmp_path: Path) -> Yard:
    made = Yard(store, tmp_path / "objects")
    await store.database.write(lambda tx: rows.note_objects(tx, made.bucket.url, "owner"), durable=True)
    return made


@pytest.mark.parametrize("session_id", ["s", ".", "..", "...", "a:b.c-d", "turnlog-owner"])
async def test_a_turns_large_chunks_are_objects_and_the_small_ones_stay(yard: Yard, session_id: str) -> None:
    await yard.turn(session_id, large(1), b"small", large(2))
    folder = names.folder_of(session_id)
    assert yard.there() == [f"{folder}{yard.store.me}-2.routed_experts.{number}" for number in (0, 2)]
    assert {names.parsed(name) for name in yard.there()} == {(session_id, 2)}
    assert await yard.frames(session_id, 0, 1, 2) == [large(1), b"small", large(2)]
    chunks = await yard.store.chunks(session_id)
    assert [data is None for data, _ in chunks.values()] == [True, False, True]
    await yard.sweep()
    assert len(await yard.look(2 * KEEP_S)) == 2


async def test_a_payload_that_is_tombstoned_while_it_is_read_is_no_fault(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await yard.turn("s", large(1))
    real = yard.bucket.read

    async def too_late(name: str) -> bytes | None:
        await yard.free("s")
        await yard.look(2 * KEEP_S)
        return await real(name)

    monkeypatch.setattr(yard.bucket, "read", too_late)
    assert await load_chunks(yard.store.database, "s", [(2, 0)]) == {}


BAD_NAMES = ("../victim/", "../victim", "a//b", "a/../../b", "/etc/passwd", "./", "x/\n")


async def test_a_name_that_no_object_has_keeps_nothing_else_from_being_deleted(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    victim = yard.folder.parent / "victim"
    victim.mkdir()
    (victim / "1-1.routed_experts.0").write_text("precious")
    await yard.turn("t", large(1))
    queued = [{"session_id": name, "name": name, "since": 0.0, "incarnation": None} for name in BAD_NAMES]
    await yard.store.database.write(lambda tx: tx.insert(insert(dead_objects), queued), durable=True)
    await yard.erase("t")
    assert await yard.look() == []
    left = await yard.store.database.read(lambda c: c.execute(select(dead_objects.c.name)).scalars().all())
    assert left == []
    assert "../victim/" in caplog.text
    assert (victim / "1-1.routed_experts.0").exists()


async def test_an_object_that_cannot_be_deleted_does_not_stop_the_others(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        await yard.turn(name, large(1))
        await yard.erase(name)
    delete = yard.bucket.delete

    async def some(name: str) -> None:
        if name.startswith("b/"):
            raise PayloadsUnavailable("no permission")
        await delete(name)

    monkeypatch.setattr(yard.bucket, "delete", some)
    with pytest.raises(PayloadsUnavailable):
        await yard.look()
    assert {name[0] for name in yard.there()} == {"b"}
    monkeypatch.undo()
    assert await yard.look() == []


async def test_an_upload_goes_on_when_its_turn_is_cancelled(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the storage might still take it after the erasure."""
    begun, released, ended, real = asyncio.Event(), asyncio.Event(), asyncio.Event(), yard.bucket.put

    async def slow(name: str, body: bytes) -> None:
        begun.set()
        await released.wait()
        await real(name, body)
        ended.set()

    monkeypatch.setattr(yard.bucket, "put", slow)
    await yard.claimed("s")
    turn = asyncio.create_task(yard.put("s", large(1)))
    await begun.wait()
    turn.cancel()
    await yard.erase("s")
    await yard.look()
    assert await yard.is_being_erased("s")
    released.set()
    await ended.wait()
    while yard.objects._uploads:
        await asyncio.sleep(0)
    assert await yard.look() == []
    assert not await yard.is_being_erased("s")


async def test_nothing_is_deleted_in_another_stores_place(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """As after a copy of the database was started beside its original."""
    await yard.bucket.owner("another")
    await yard.turn("s", large(1))
    await yard.erase("s")
    assert await yard.look() != []
    assert await yard.is_being_erased("s")
    assert "belongs to another store" in caplog.text
    (yard.folder / names.OWNER).unlink()
    yard.objects._ask_owner_at = 0.0
    assert await yard.look() == []


class Moving:
    """A transaction of PostgreSQL, whose statements see what others commit between them: here before the read `at`."""

    def __init__(self, at: int, before: dict[int, list[Any]], after: dict[int, list[Any]]) -> None:
        self._at, self._states, self._reads = at, (before, after), 0
        self.written: list[Any] = []

    def one(self, statement: Executable, parameters: object) -> tuple[int]:
        return (1,)

    def all(self, statement: Executable, parameters: object) -> list[Any]:
        self._reads += 1
        return self._states[self._reads > self._at].get(id(statement), [])

    def each(self, statement: object, given: Sequence[object]) -> None:
        self.written += given


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("taken", ["turn", "copies"])
def test_a_sweep_spares_what_is_committed_between_its_reads(taken: str, at: int) -> None:
    name = names.of_turn("s", 1, 2) + "x.0" if taken == "turn" else names.of_copies("s", 1, 1) + "2.x.0"
    parsed = names.parsed(name)
    assert parsed is not None
    line = {id(rows._open_fences): [(2,)]} if taken == "turn" else {id(rows._queued): [(names.of_copies("s", 1, 1),)]}
    tx = Moving(at, line, {id(rows._locations): [(name,)]})
    assert rows.QueueUnreferenced(1, {name: parsed}).apply(cast(Tx, tx)) == 0
    assert tx.written == []


@pytest.fixture(params=["folder", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if request.param == "folder":
        yield Bucket(f"file://{tmp_path}/bucket", 5.0)
        return
    storage = TestBucket()
    for name, value in storage.environment.items():
        monkeypatch.setenv(name, value)
    yield Bucket(f"s3://{storage.name}/run", 5.0)
    storage.close()


async def test_a_bucket(bucket: Bucket) -> None:
    async def listed(folder: str | None = None) -> list[str]:
        return sorted([name async for page in bucket.list(folder) for name in page])

    assert await bucket.probe() is None
    assert await listed("a:b") == []
    await bucket.put("a:b/1-2.x.0", b"abc")
    await bucket.put("a:b/1-2.x.0", b"abc")
    with pytest.raises(PayloadsUnavailable, match="belongs to another store"):
        await bucket.put("a:b/1-2.x.0", b"xyz")
    await bucket.copy("a:b/1-2.x.0", "..!/1-2.x.0")
    await bucket.copy("nothing/1-2.x.0", "c/1-2.x.0")
    assert await listed("a:b") == ["a:b/1-2.x.0"]
    assert await listed() == ["..!/1-2.x.0", "a:b/1-2.x.0", names.PROBE]
    assert [await bucket.read(name) for name in ("..!/1-2.x.0", "c/1-2.x.0")] == [b"abc", None]
    assert [await bucket.owner(name) for name in ("first", "second", "first")] == ["first"] * 3
    for _ in range(2):
        await bucket.delete("a:b/1-2.x.0")
    assert await bucket.read("a:b/1-2.x.0") is None


@pytest.mark.parametrize("url", ["s3:///x", "ftp://a/b"])
def test_a_url_that_names_no_storage(url: str) -> None:
    with pytest.raises(StartupError, match="TURNLOG_PAYLOADS"):
        Bucket(url, 5.0)


@pytest.fixture
def google(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStorage]:
    made = GoogleStorage(keeps_versions=request.param)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


@pytest.mark.parametrize("google", [False, True], indirect=True, ids=["usual", "versioned"])
async def test_a_bucket_of_googles_numbers_objects_whether_it_keeps_versions_or_not(
    google: GoogleStorage, request: pytest.FixtureRequest
) -> None:
    is_versioned = request.node.callspec.params["google"]
    for _ in range(2):
        bucket = Bucket("gs://bucket/run", 5.0)
        assert await bucket.probe() is None
        assert bucket.keeps_versions is is_versioned
    await bucket.put("s/1-1.x.3", b"abc")
    if is_versioned:
        with pytest.raises(PayloadsUnavailable, match="turn versioning off"):
            await bucket.delete("s/1-1.x.3")
    else:
        await bucket.delete("s/1-1.x.3")
        assert list(google.objects) == [f"/bucket/run/{names.PROBE}"]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
async def test_versions_are_deleted_where_the_objects_are(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """The two packages that speak to S3 know different variables."""
    storage = TestBucket()
    storage.keep_versions()
    environment = storage.environment
    environment[variable] = environment.pop("AWS_ENDPOINT_URL")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(f"s3://{storage.name}/run", 5.0)
    await bucket.put("s/1-1.x.3", b"abc")
    await bucket.delete("s/1-1.x.3")
    assert storage.versions() == []
    storage.close()
