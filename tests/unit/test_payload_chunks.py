"""Chunks of rows: shared only where rows are equal, small ones joined, large ones split, checked when read."""

from __future__ import annotations

import base64
import contextlib
import json
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from app.domain.events import ChunkRef
from app.domain.session import Payload
from app.sessions.replay_payloads import keys_of, masks_of
from workers import codec, payloads, sampling_masks
from workers.codec import CorruptContent, Cut
from workers.payloads import CHUNK_BYTES, MERGE_BYTES, Chunk, NewChunk, Parent, PayloadSpec, StoredPayload

KIND = "indexer_topk"
Rows = npt.NDArray[Any]


def text_of(rows: Rows) -> memoryview:
    return memoryview(b'"' + base64.b64encode(rows.astype("<i4").tobytes()) + b'"')


def table(rows: int, width: int = 16, high: int = 200, seed: int = 1) -> Rows:
    return np.random.default_rng(seed).integers(0, high, (rows, width), dtype=np.int64)


class Kept:
    """A session's payloads of one kind as they are kept, turn after turn."""

    def __init__(self) -> None:
        self.chunks: list[NewChunk] = []
        self.start = self.stop = 0
        self.row_ids = 0
        self.written = 0
        self.most = 0

    @property
    def parent(self) -> Parent | None:
        chunks = [new.chunk for new in self.chunks]
        return Parent(self.start, self.stop, self.row_ids, chunks) if chunks else None

    def turn(self, rows: Rows, start: int = 0) -> StoredPayload:
        """Keep a payload whose first row is `start`; what is kept must give the rows again."""
        want = PayloadSpec(KIND, start=start, parent=self.parent)
        stored, _ = payloads.read(text_of(rows), want, start + 1, start + len(rows) + 1, npy=False)
        known = self.rows() if stored.start < start else rows[:0]
        self.chunks = [*self.chunks[: stored.shared], *stored.new]
        self.start, self.stop, self.row_ids = stored.start, stored.stop, rows.shape[1]
        self.written += sum(new.chunk.size for new in stored.new)
        self.most = max(self.most, len(self.chunks))
        assert self.rows().tolist() == np.concatenate([known, rows]).tolist()
        self._in_order()
        return stored

    def rows(self) -> Rows:
        return payloads.join([payloads.load(new.chunk, new.frame) for new in self.chunks])

    def _in_order(self) -> None:
        ends = [self.start, *(new.chunk.start + new.chunk.rows for new in self.chunks)]
        assert [new.chunk.start for new in self.chunks] == ends[:-1]
        assert ends[-1] == self.stop


@pytest.mark.parametrize(
    ("stops", "changed", "shared", "new"),
    [
        ((1000, 2000), None, 1, [(1000, 1000)]),
        ((1000, 2000, 2000), None, 2, []),
        ((1000, 2000, 1500), None, 1, [(1000, 500)]),
        ((1000, 2000), 0, 0, [(0, 2000)]),
        ((1000, 2000), 999, 0, [(0, 2000)]),
        ((1000, 2000, 3000, 4000), 1500, 1, [(1000, 3000)]),
    ],
    ids=["longer", "again", "shorter", "another first row", "another last row", "another row in the middle"],
)
def test_a_payload_shares_the_chunks_that_it_repeats(
    stops: tuple[int, ...], changed: int | None, shared: int, new: list[tuple[int, int]]
) -> None:
    """Turns of so many rows, in the last of which a row was routed anew: the chunks before it are shared."""
    kept, rows = Kept(), table(4000, 64)
    for stop in stops[:-1]:
        kept.turn(rows[:stop])
    if changed is not None:
        rows = rows.copy()
        rows[changed, 5] += 1
    stored = kept.turn(rows[: stops[-1]])
    assert (stored.start, stored.stop, stored.shared) == (0, stops[-1], shared)
    assert [(one.chunk.start, one.chunk.rows) for one in stored.new] == new


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("width", [32, 63, 65, 128])
def test_rows_of_another_width_share_nothing(width: int, start: int) -> None:
    """Also where they are the same bytes, and where those before them were left out as known."""
    kept, rows = Kept(), table(1000, 64)
    kept.turn(rows)
    other = np.resize(rows, (2000 - start, width))
    stored = kept.turn(other, start=start)
    assert (stored.start, stored.stop, stored.sent, stored.shared) == (start, 2000, start, 0)
    assert (stored.shape, kept.rows().tolist()) == ((width,), other.tolist())


def test_rows_that_were_left_out_as_known_follow_the_parents() -> None:
    kept, rows = Kept(), table(2000, 64)
    kept.turn(rows[:1000])
    patch = kept.turn(rows[1000:], start=1000)
    assert (patch.start, patch.stop, patch.sent, patch.shared) == (0, 2000, 1000, 1)
    assert kept.rows().tolist() == rows.tolist()
    nothing, _ = payloads.read(
        memoryview(b'""'), PayloadSpec(KIND, start=2000, parent=kept.parent), 2001, 2001, npy=False
    )
    assert (nothing.start, nothing.stop, nothing.shared, nothing.new) == (0, 2000, len(kept.chunks), [])


@pytest.mark.parametrize(("known", "start"), [(0, 1), (0, 999), (0, 1001), (500, 0)])
def test_a_patch_that_does_not_begin_where_the_parent_ends_stands_alone(known: int, start: int) -> None:
    """Nor is a parent compared that begins later."""
    kept, rows = Kept(), table(1000, 64)
    kept.turn(rows[known:], start=known)
    want = PayloadSpec(KIND, start=start, parent=kept.parent)
    stored, _ = payloads.read(text_of(rows), want, start + 1, start + 1001, npy=False)
    assert (stored.start, stored.sent, stored.shared, stored.new[0].chunk.start) == (start, start, 0, start)


def test_equal_rows_are_one_chunk_whatever_stands_beside_them() -> None:
    """A single id needs a wider type, and all earlier chunks are still shared."""
    kept, rows = Kept(), table(3000, 64)
    kept.turn(rows[:1000])
    rows[1500, 7] = 100_000
    stored = kept.turn(rows[:2000])
    assert (stored.shared, [new.chunk.dtype for new in stored.new]) == (1, ["int32"])
    rows[2500, 7] = -1
    stored = kept.turn(rows)
    assert (stored.shared, [new.chunk.dtype for new in stored.new]) == (2, ["int16"])
    assert kept.rows().dtype == np.int32
    narrow = kept.turn(rows[:1000])
    assert (narrow.shared, narrow.new, kept.rows().dtype) == (1, [], np.dtype(np.uint8))


@pytest.mark.parametrize("patches", [False, True])
def test_many_short_turns_are_few_chunks_and_written_a_few_times(patches: bool) -> None:
    """Chunks double as they are joined, so each row is written about log times; patches cannot be joined again."""
    turns, step, width = 300, 8, 16
    rows = table(turns * step, width)
    kept = Kept()
    for turn in range(turns):
        start = turn * step if patches else 0
        kept.turn(rows[start : (turn + 1) * step], start)
    raw = rows.size
    doublings = int(np.log2(MERGE_BYTES / (step * width))) + 1
    if patches:
        assert kept.written == raw
        return
    assert kept.written <= raw * (doublings + 1)
    assert kept.most <= 2 * raw // MERGE_BYTES + doublings + 1


def test_what_is_large_is_written_once_and_split() -> None:
    """Neither turns that are larger than a joined chunk are written again, nor a large turn behind a small one."""
    step = MERGE_BYTES // 64 + 1
    kept, rows = Kept(), table(12 * step, 64)
    for stop in range(step, len(rows) + 1, step):
        kept.turn(rows[:stop])
    assert (kept.written, len(kept.chunks)) == (rows.size, 12)
    kept, rows = Kept(), table(20_010, 64)
    kept.turn(rows[:20_000])
    written = kept.written
    kept.turn(rows)
    assert kept.written - written == 10 * 64
    stored = Kept().turn(table(2 * (CHUNK_BYTES // 1000) + 7, 1000))
    assert [new.chunk.size for new in stored.new] == [CHUNK_BYTES // 1000 * 1000] * 2 + [7000]
    assert [new.chunk.rows for new in Kept().turn(table(3, CHUNK_BYTES + 5)).new] == [1, 1, 1]


def one() -> NewChunk:
    [new] = payloads.read(text_of(table(50)), PayloadSpec(KIND), 0, 51, npy=False)[0].new
    return new


def test_what_is_not_what_was_stored_is_found() -> None:
    """Another frame, a damaged one, a chunk of another size, and one that would unpack to too much."""
    new = one()
    for frame in (None, b"", b"x", codec.compress(b""), codec.compress(bytes(800))):
        with pytest.raises(CorruptContent):
            payloads.load(new.chunk, frame)
    for size in (0, 799, 801):
        with pytest.raises(CorruptContent):
            payloads.load(msgspec.structs.replace(new.chunk, size=size), new.frame)
    with pytest.raises(CorruptContent, match="declares"):
        payloads.load(Chunk(0, 1, "uint8", 800, "0" * 32), codec.compress(bytes(64 << 20)))
    good = payloads.load(new.chunk, new.frame).tolist()
    for at in range(len(new.frame)):
        with contextlib.suppress(CorruptContent):
            assert (
                payloads.load(new.chunk, new.frame[:at] + bytes([new.frame[at] ^ 0x20]) + new.frame[at + 1 :]).tolist()
                == good
            )


def test_masks_of_tokens_that_a_prompt_trims_are_those_that_follow() -> None:
    """Their chunk stands, a later one begins before its end; the turn's own rows are in chunks of its own."""
    before, after = [[1, 9], [2], [3, 4]], [[5], [6, 7]]
    chunks: list[tuple[Chunk, bytes]] = []
    parent = None
    # Tokens 3 to 5 are sampled; the next prompt has but the first of these two, and two of its own.
    for base, prompt, sets in ((0, 3, before), (5, 7, after)):
        output = np.array([row[0] for row in sets], "<i4").tobytes()
        want = PayloadSpec(sampling_masks.KIND, parent=parent)
        stored, _ = sampling_masks.read(memoryview(json.dumps(sets).encode()), want, base, prompt, output)
        chunks = [*chunks[: stored.shared], *((new.chunk, new.frame) for new in stored.new)]
        parent = Parent(stored.start, stored.stop, 0, [chunk for chunk, _ in chunks])
    refs = tuple(ChunkRef(number, 0, *msgspec.to_builtins(chunk)) for number, (chunk, _) in enumerate(chunks))
    frames = {ref.key: frame for ref, (_, frame) in zip(refs, chunks, strict=True)}
    payload = Payload("sampling_mask", stored.start, stored.stop, stored.sent, (), refs)
    assert [(chunk.start, chunk.rows) for chunk, _ in chunks] == [(0, 5), (4, 4)]
    masks = masks_of(payload, frames, payload.start, payload.stop)
    rows = [masks.ids[first:stop].tolist() for first, stop in pairwise(masks.offsets)]
    assert rows == [[], [], *before[:2], [], [], *after]
    assert sampling_masks.render(Cut(sampling_masks.KIND, 0, "sets"), masks_of(payload, frames, 6, 8)) == b"[[5],[6,7]]"
    first = msgspec.structs.replace(refs[0], rows=1)
    assert keys_of(msgspec.structs.replace(payload, chunks=(first,))) == [first.key]
