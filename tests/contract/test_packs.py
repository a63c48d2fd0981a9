"""Packs: what the writer puts together, what the collector deletes and copies, and how payloads are moved; on both
databases, over a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers.buckets import TestBucket
from helpers.google_storage import GoogleStorage
from helpers.log import digest, payload
from helpers.store import Meanwhile, Store
from sqlalchemy import select

from app.domain import retention
from app.errors import PayloadsUnavailable, PayloadTombstoned, StartupError
from app.sessions.replay_payloads import payload_of, values
from app.store import reads
from app.store.log import StoredChunk
from app.store.log_sessions import Close, Erase, FreeChunks, FreeReplay
from app.store.packs import rows
from app.store.packs.bucket import GAP_BYTES, Bucket
from app.store.packs.collector import Collector
from app.store.packs.format import Packed, build, frame_bytes, read_index
from app.store.packs.move import START, Key, Mover
from app.store.packs.reader import load_chunks
from app.store.packs.rows import MoveChunks, Moved, NotePlace, TakeKeeping
from app.store.packs.writer import PackWriter
from app.store.schema import chunks as chunks_table
from app.store.writer import Writer
from workers import codec
from workers.codec import Cut, Wire

pytestmark = pytest.mark.anyio

KEEP_S = 600.0


class Yard:
    """A store with packs, whose collector's clock is set by hand."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.now = 0.0
        self.bucket = Bucket(f"file://{folder}", 5.0)
        store.database.bucket = self.bucket
        self.packs = PackWriter(store.database, self.bucket, lambda: store.me)
        self.collector = self.collector_of(store.writer)

    def collector_of(self, writer: Writer) -> Collector:
        """A process's collector."""
        return Collector(
            self.store.database,
            writer,
            self.packs,
            lambda: self.store.me,
            lambda: 8.0,
            lambda: self.now,
            keep_s=KEEP_S,
        )

    def objects(self) -> list[str]:
        return sorted(
            name
            for path in self.folder.rglob("*")
            if path.is_file() and frame_bytes(name := str(path.relative_to(self.folder))) is not None
        )

    async def put(self, session_id: str, fence: int, *frames: bytes) -> list[StoredChunk]:
        """Chunks of a turn, in a pack of their own."""
        made = [
            StoredChunk(number, "routed_experts", len(frame), digest("row"), codec.compress(frame))
            for number, frame in enumerate(frames)
        ]
        return await self.packs.stored(session_id, fence, made)

    async def turn(self, session_id: str, *frames: bytes) -> int:
        """A committed turn of a new session with these frames; its fence."""
        await self.store.create(session_id)
        await self.store.claim(session_id, 1)
        stored = await self.put(session_id, 2, *frames)
        await self.commit(session_id, stored)
        return 2

    async def commit(self, session_id: str, stored: Sequence[StoredChunk]) -> None:
        ref = payload(2, *range(len(stored)))
        await self.store.commit(session_id, 2, payloads=(ref,), chunks=stored)

    async def round(self, after_s: float = 0.0) -> list[str]:
        """One round of the collector; the packs that are left."""
        self.now += after_s
        await self.collector.round()
        return self.objects()

    async def frames(self, session_id: str, *numbers: int) -> list[bytes | None]:
        found = await load_chunks(self.store.database, session_id, [(2, number) for number in numbers])
        return [None if (frame := found[2, number]) is None else codec.decompress(frame) for number in numbers]

    async def erase(self, session_id: str) -> None:
        await self.store.submit(Close(session_id, 5.0))
        await self.store.submit(Erase(session_id, 6.0, has_packs=True))

    async def is_being_erased(self, session_id: str) -> bool:
        return await self.store.database.read(lambda connection: rows.is_being_erased(connection, session_id))

    def left_of(self, frame: bytes) -> list[str]:
        """The packs that hold a frame."""
        stored = codec.compress(frame)
        return [name for name in self.objects() if stored in (self.folder / name).read_bytes()]


@pytest.fixture
async def yard(store: Store, tmp_path: Path) -> Yard:
    return Yard(store, tmp_path / "packs")


def text(number: int) -> bytes:
    """A frame that no other is part of."""
    return f"frame {number} ".encode() * 20


def test_a_pack_is_its_frames_and_an_index_of_them() -> None:
    pack = build("1/2/00000003", [Packed("a", 2, 0, b"one"), Packed("b", 7, 1, b"three")])
    assert pack.name == "1/2/00000003-8"
    assert frame_bytes(pack.name) == 8
    assert [(place.offset, place.length) for place in pack.places] == [(0, 3), (3, 5)]
    assert pack.body[:8] == b"onethree"
    assert [entry.turn for entry in read_index(pack.body[8:])] == [("a", 2), ("b", 7)]
    assert [frame_bytes(name) for name in ("turnlog-owner", "1/2/x-y", "a-1")] == [None, None, None]


async def test_turns_that_end_while_packs_are_uploaded_share_one(yard: Yard) -> None:
    await yard.put("first", 2, text(99))
    stored = await asyncio.gather(*(yard.put(f"s{number}", 2, text(number)) for number in range(20)))
    assert len(yard.objects()) == 1 + 2
    for number, [chunk] in enumerate(stored):
        assert chunk.data == b""
        assert chunk.place is not None
        frame = await yard.bucket.read(chunk.place.pack, chunk.place.offset, chunk.place.length)
        assert frame is not None
        assert codec.decompress(frame) == text(number)


async def test_a_small_pack_does_not_wait_for_a_slow_upload(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, begun, real = asyncio.Event(), asyncio.Event(), yard.bucket.put

    async def slow(name: str, body: bytes) -> None:
        monkeypatch.setattr(yard.bucket, "put", real)
        begun.set()
        await ends.wait()
        await real(name, body)

    monkeypatch.setattr(yard.bucket, "put", slow)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(yard.put("slow", 2, text(1)))
        await begun.wait()
        await asyncio.gather(*(yard.put(f"s{number}", 2, text(number)) for number in range(3)))
        assert not first.done()
        ends.set()


async def test_a_name_is_never_written_twice(yard: Yard) -> None:
    await yard.bucket.put("1/1/1-3", b"abc")
    await yard.bucket.put("1/1/1-3", b"abc")
    with pytest.raises(PayloadsUnavailable, match="another store's"):
        await yard.bucket.put("1/1/1-3", b"xyz")


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


async def test_a_part_behind_the_end_of_an_object_is_not_there(bucket: Bucket) -> None:
    """The object is damaged; the storage is not away."""
    await bucket.put("1/1/1-100", b"abc")
    await bucket.put("1/1/2-100", b"")
    for part in ((2, 3), (3, 3), (90, 3), (GAP_BYTES + 9, 3)):
        for parts in ([part], [(0, 3), part], [part, (0, 3)]):
            assert await bucket.read_parts("1/1/1-100", parts) is None
            assert await bucket.read_parts("1/1/2-100", parts) is None
            assert await bucket.read_parts("1/1/3-100", parts) is None


async def test_parts_come_in_the_order_in_which_they_are_asked_for(bucket: Bucket) -> None:
    body = bytes(range(250)) * (GAP_BYTES // 50)
    await bucket.put("1/1/1-100", body)
    last = len(body) - 7
    parts = [(last, 7), (0, 3), (5, 1), (0, 9), (GAP_BYTES + 20, 8), (2 * GAP_BYTES, 5), (2 * GAP_BYTES, 5)]
    expected = [body[offset : offset + length] for offset, length in parts]
    assert await bucket.read_parts("1/1/1-100", parts) == expected
    assert await bucket.read_parts("1/1/1-100", []) == []


async def test_what_is_committed_stays_and_is_read(yard: Yard) -> None:
    await yard.turn("s", text(1), text(2))
    assert await yard.round(KEEP_S) == await yard.round(KEEP_S) != []
    assert await yard.frames("s", 0, 1) == [text(1), text(2)]


async def test_a_pack_of_an_open_turn_waits_for_its_end(yard: Yard) -> None:
    await yard.store.create("s")
    await yard.store.claim("s", 1)
    stored = await yard.put("s", 2, text(1))
    assert await yard.round() == await yard.round(2 * KEEP_S) != []
    await yard.commit("s", stored)
    assert await yard.round(2 * KEEP_S) != []
    assert await yard.frames("s", 0) == [text(1)]


async def test_a_pack_of_a_turn_that_came_to_nothing_is_deleted_after_a_while(yard: Yard) -> None:
    await yard.store.create("s")
    await yard.store.claim("s", 1)
    await yard.put("s", 2, text(1))
    await yard.store.release("s", 2)
    assert await yard.round() != []
    assert await yard.round(KEEP_S / 2) != []
    assert await yard.round(KEEP_S / 2) == []


async def test_dead_parts_are_left_behind_in_a_copy(yard: Yard) -> None:
    """One pack for two turns, of which one comes to nothing."""
    for session_id in ("kept", "lost"):
        await yard.store.create(session_id)
        await yard.store.claim(session_id, 1)
    packed = [Packed("kept", 2, 0, codec.compress(text(1))), Packed("lost", 2, 0, codec.compress(text(2)))]
    [place, _] = await yard.packs.put(packed)
    await yard.commit("kept", [StoredChunk(0, "routed_experts", 5, digest("row"), b"", place)])
    [first] = yard.objects()
    await yard.store.release("lost", 2)
    [old, new] = await yard.round()
    assert old == first
    assert yard.left_of(text(2)) == [first]
    assert await yard.frames("kept", 0) == [text(1)]
    await yard.round()
    assert await yard.round(KEEP_S) == [new]
    assert await yard.frames("kept", 0) == [text(1)]


async def test_an_erasure_takes_the_bytes_out_of_shared_packs_at_once(yard: Yard) -> None:
    for session_id in ("erased", "kept"):
        await yard.store.create(session_id)
        await yard.store.claim(session_id, 1)
    chunks = await asyncio.gather(yard.put("erased", 2, text(1), text(2)), yard.put("kept", 2, text(3), text(4)))
    for session_id, stored in zip(("erased", "kept"), chunks, strict=True):
        await yard.commit(session_id, stored)
    await yard.erase("erased")
    assert await yard.is_being_erased("erased")
    await yard.round()
    assert (yard.left_of(text(1)), yard.left_of(text(2))) == ([], [])
    assert not await yard.is_being_erased("erased")
    assert await yard.frames("kept", 0, 1) == [text(3), text(4)]


async def test_an_erasure_waits_for_turns_that_share_the_pack(yard: Yard) -> None:
    for session_id in ("erased", "open"):
        await yard.store.create(session_id)
        await yard.store.claim(session_id, 1)
    packed = [Packed(one, 2, 0, codec.compress(text(number))) for number, one in enumerate(("erased", "open"))]
    gone, place = await yard.packs.put(packed)
    await yard.commit("erased", [StoredChunk(0, "routed_experts", 5, digest("row"), b"", gone)])
    await yard.erase("erased")
    await yard.round()
    assert await yard.is_being_erased("erased")
    await yard.commit("open", [StoredChunk(0, "routed_experts", 5, digest("row"), b"", place)])
    await yard.round()
    assert not await yard.is_being_erased("erased")
    assert yard.left_of(text(0)) == []
    assert await yard.frames("open", 0) == [text(1)]


async def test_tombstoned_chunks_are_deleted_after_a_while(yard: Yard) -> None:
    await yard.turn("s", text(1))
    await yard.store.submit(Close("s", 5.0))
    closed = await yard.store.session("s")
    assert closed is not None
    event = retention.tombstone_all(closed)
    assert event is not None
    freed = await yard.store.submit(FreeReplay("s", closed.version, 6.0, event))
    await yard.store.submit(FreeChunks("s", freed.events[0].seq, 10))
    assert await yard.round() != []
    assert await yard.round(KEEP_S) == []
    left = select(chunks_table.c.location).where(chunks_table.c.location.is_not(None))
    assert await yard.store.database.read(lambda connection: connection.execute(left).all()) == []


async def test_a_payload_that_is_tombstoned_after_its_session_was_read_is_no_damage(yard: Yard) -> None:
    await yard.turn("s", text(1))
    await yard.store.close("s")
    session = await yard.store.session("s")
    assert session is not None
    event = retention.tombstone_all(session)
    assert event is not None
    freed = await yard.store.submit(FreeReplay("s", session.version, 6.0, event))
    await yard.store.submit(FreeChunks("s", freed.events[0].seq, 10))
    await yard.round()
    assert await yard.round(KEEP_S) == []
    with pytest.raises(PayloadTombstoned):
        await payload_of(yard.store.database, session, 1, "routed_experts")
    cut = Cut("routed_experts", 0, "base64")
    wire = Wire(messages=[], message=b"", reply=b"", headers=[], cuts=[cut])
    assert await values(yard.store.database, session, 1, wire, ["routed_experts"]) == {}


async def test_a_stale_token_moves_and_deletes_nothing(yard: Yard) -> None:
    await yard.turn("s", text(1))
    await yard.store.submit(TakeKeeping("mine"))
    places = await yard.store.database.read(lambda connection: rows.places_of(connection, "s", [(2, 0)]))
    [other] = await yard.packs.put([Packed("s", 2, 0, codec.compress(text(1)))])
    await yard.store.submit(TakeKeeping("another's"))
    assert await yard.store.submit(MoveChunks("mine", [Moved("s", 2, 0, places[2, 0], other)])) == 0
    assert await yard.store.submit(rows.ForgetPacks("mine", [other.pack])) == []


async def test_the_store_knows_which_places_have_objects_of_it(yard: Yard) -> None:
    async def used() -> list[str]:
        return await yard.store.database.read(rows.places_in_use)

    await yard.round()
    assert await used() == []
    await yard.turn("s", text(1))
    await yard.round()
    await yard.store.submit(NotePlace("s3://another", True))
    assert await used() == [yard.bucket.url, "s3://another"]
    await moved(Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=False))
    await yard.round()
    assert await used() == [yard.bucket.url, "s3://another"], "the pack is kept for a while"
    await yard.round(KEEP_S)
    await yard.round()
    assert await used() == ["s3://another"]


async def test_an_erasure_does_not_end_with_a_round_that_lost_its_token(yard: Yard) -> None:
    """As when payloads are moved meanwhile."""
    await yard.turn("s", text(1))
    await yard.erase("s")
    writer = Meanwhile(yard.store.writer, rows.ForgetPacks, TakeKeeping("another's"))
    await yard.collector_of(writer.as_writer).round()
    assert yard.left_of(text(1)) != []
    assert await yard.is_being_erased("s")
    await yard.round()
    assert yard.left_of(text(1)) == []
    assert not await yard.is_being_erased("s")


async def test_nothing_is_collected_in_another_stores_place(yard: Yard) -> None:
    """As after a copy of the database was started beside its original."""
    await yard.round()
    await yard.bucket.own("another")
    await yard.store.create("s")
    await yard.store.claim("s", 1)
    await yard.put("s", 2, text(1))
    await yard.store.release("s", 2)
    await yard.round()
    assert await yard.round(2 * KEEP_S) != []
    await yard.collector.adopt()
    await yard.round()
    assert await yard.round(2 * KEEP_S) == []


async def test_of_two_stores_that_begin_at_once_in_one_place_one_owns_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bucket.owner

    async def too_early() -> str | None:
        monkeypatch.setattr(bucket, "owner", real)
        owner = await real()
        assert await bucket.owned_by("first") == "first"
        return owner

    monkeypatch.setattr(bucket, "owner", too_early)
    assert await bucket.owned_by("second") == "first"
    assert await bucket.owner() == "first"


async def test_an_object_that_is_shorter_than_its_name_says_stops_nothing(yard: Yard) -> None:
    """A machine that crashed in the middle of an upload into a folder may leave one."""
    await yard.turn("s", text(1))
    await yard.erase("s")
    short = yard.folder / "1" / "9" / "00000001-1000"
    short.parent.mkdir(parents=True)
    short.write_bytes(b"frame")
    await yard.round()
    assert yard.left_of(text(1)) == []
    assert not await yard.is_being_erased("s")
    assert await yard.round(KEEP_S) == []


async def test_a_damaged_index_keeps_an_erasure_waiting_until_its_pack_is_deleted(yard: Yard) -> None:
    await yard.turn("s", text(1))
    await yard.put("nobody's", 2, text(2))
    await yard.erase("s")
    for name in yard.objects():
        if yard.left_of(text(2)) == [name]:
            whole = (yard.folder / name).read_bytes()
            (yard.folder / name).write_bytes(whole[:-4] + bytes(4))
    await yard.round()
    assert yard.left_of(text(1)) == []
    assert await yard.is_being_erased("s")
    assert await yard.round(KEEP_S) == []
    assert not await yard.is_being_erased("s")


async def test_bytes_of_an_erased_session_that_arrive_later_are_deleted_at_once(yard: Yard) -> None:
    """Of a turn that was in flight in another process, whose upload began or ended after the erasure."""
    await yard.store.create("s")
    await yard.store.claim("s", 1)
    await yard.erase("s")
    await yard.round()
    assert not await yard.is_being_erased("s")
    await yard.put("s", 2, text(1))
    assert await yard.round() == []


async def test_a_damaged_frame_of_another_session_does_not_stop_an_erasure(yard: Yard) -> None:
    for session_id in ("erased", "kept"):
        await yard.store.create(session_id)
        await yard.store.claim(session_id, 1)
    packed = [Packed(one, 2, 0, codec.compress(text(number))) for number, one in enumerate(("erased", "kept"))]
    for session_id, place in zip(("erased", "kept"), await yard.packs.put(packed), strict=True):
        await yard.commit(session_id, [StoredChunk(0, "routed_experts", 5, digest("row"), b"", place)])
    [name] = yard.objects()
    damaged = codec.compress(text(1))[:-4] + bytes(4)
    path = yard.folder / name
    path.write_bytes(path.read_bytes().replace(codec.compress(text(1)), damaged))
    await yard.erase("erased")
    await yard.round()
    assert yard.left_of(text(0)) == []
    assert not await yard.is_being_erased("erased")
    [copy] = yard.objects()
    assert damaged in (yard.folder / copy).read_bytes()


async def test_payloads_are_moved_there_and_back(yard: Yard) -> None:
    for number in range(10):
        await yard.store.create(f"s{number}")
        await yard.store.claim(f"s{number}", 1)
        frame = codec.compress(text(number))
        stored = [StoredChunk(0, "routed_experts", 5, digest("row"), frame)]
        await yard.commit(f"s{number}", stored)
    assert await moved(Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=True)) == 10
    assert len(yard.objects()) == 1
    assert [await yard.frames(f"s{number}", 0) for number in range(10)] == [[text(number)] for number in range(10)]
    assert await moved(Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=False)) == 10
    assert not await yard.store.database.read(rows.has_packs)
    found = await yard.store.database.read(lambda connection: reads.load_chunks(connection, "s3", [(2, 0)]))
    assert found == {(2, 0): codec.compress(text(3))}


async def test_an_erasure_ends_while_payloads_are_moved(yard: Yard) -> None:
    for number in range(4):
        await yard.turn(f"s{number}", text(number))
    await yard.erase("s0")
    mover = Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=False)

    async def move() -> None:
        while await yard.is_being_erased("s0"):
            await mover.step(START)

    moving = asyncio.create_task(move())
    await asyncio.sleep(0)
    await yard.round()
    assert not await yard.is_being_erased("s0")
    await moving


async def test_a_payload_whose_pack_is_collected_meanwhile_is_read_where_it_is_now(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its row and the read of its pack, it left the pack, and the pack was deleted."""
    await yard.turn("s", text(1))
    real = yard.bucket.read_parts

    async def too_late(name: str, parts: Sequence[tuple[int, int]]) -> list[bytes] | None:
        monkeypatch.setattr(yard.bucket, "read_parts", real)
        assert await moved(Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=False)) == 1
        await yard.round()
        assert await yard.round(KEEP_S) == []
        return await real(name, parts)

    monkeypatch.setattr(yard.bucket, "read_parts", too_late)
    assert await yard.frames("s", 0) == [text(1)]


@pytest.mark.parametrize("damage", [b"", b"frame"])
async def test_a_move_counts_what_is_lost(yard: Yard, damage: bytes) -> None:
    await yard.turn("kept", text(1))
    await yard.turn("lost", text(2))
    [name] = yard.left_of(text(2))
    whole = (yard.folder / name).read_bytes()
    (yard.folder / name).write_bytes(damage + whole[len(damage) :] if damage else b"")
    mover = Mover(yard.store.database, yard.store.writer, yard.packs, to_packs=False)
    step = await mover.step(START)
    assert (step.moved, step.lost) == (1, 1)
    assert (await mover.step(step.after or START)).after is None
    assert await yard.frames("kept", 0) == [text(1)]


async def moved(mover: Mover) -> int:
    after: Key | None = START
    count = 0
    while after is not None:
        step = await mover.step(after)
        count, after = count + step.moved, step.after
    return count


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
        assert (bucket.versions is not None) is is_versioned
    await bucket.put("1/1/1-3", b"abc")
    if is_versioned:
        with pytest.raises(PayloadsUnavailable, match="turn versioning off"):
            await bucket.delete(["1/1/1-3"])
    else:
        await bucket.delete(["1/1/1-3"])
        assert list(google.objects) == ["/bucket/run/turnlog-probe"]


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
    await bucket.put("1/1/1-3", b"abc")
    await bucket.delete(["1/1/1-3"])
    assert storage.versions() == []
    storage.close()
