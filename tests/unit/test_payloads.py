"""Replay payloads: what is refused, and that rows survive being read, stored, shared and written again to the byte."""

from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import payloads
from workers.codec import Cut
from workers.parse import Rejected
from workers.payloads import PayloadSpec, StoredPayload

EXPERTS = PayloadSpec("routed_experts")
POSITIONS = PayloadSpec("indexer_topk")
Rows = npt.NDArray[Any]
Spell = Callable[[Rows], bytes]


def quoted(raw: bytes) -> bytes:
    return b'"' + base64.b64encode(raw) + b'"'


def in_base64(rows: Rows) -> bytes:
    return quoted(rows.astype("<i4").tobytes())


def in_npy(rows: Rows, dtype: str = "<i4", version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, rows.astype(dtype), version=version)
    return quoted(file.getvalue())


def in_lists(rows: Rows) -> bytes:
    return str(rows.tolist()).encode()


def in_compact_lists(rows: Rows) -> bytes:
    return in_lists(rows).replace(b" ", b"")


def read(text: bytes, spec: PayloadSpec = EXPERTS, *, tokens: int = 4, npy: bool = False) -> tuple[StoredPayload, Cut]:
    return payloads.read(memoryview(text), spec, 0, tokens, npy=npy)


def rows_in(stored: StoredPayload) -> Rows:
    """The rows of a payload that shares nothing."""
    assert stored.shared == 0
    return payloads.join([payloads.load(new.chunk, new.frame) for new in stored.new])


def table(rows: int, width: int = 2, high: int = 200, seed: int = 1) -> Rows:
    return np.random.default_rng(seed).integers(0, high, (rows, width), dtype=np.int64)


def test_base64_with_bits_to_spare_is_kept_as_it_is_spelled() -> None:
    """Two spellings decode alike; the rows tell only one of them."""
    ids = np.array([[7], [8]])
    text = in_base64(ids)
    stored, cut = read(text, tokens=3)
    assert (cut.form, payloads.render(cut, rows_in(stored))) == ("base64", text)
    assert text.endswith(b'A="')
    odd, left = read(text[:-3] + b'B="', tokens=3)
    assert odd == stored
    assert (left.form, left.length) == ("text", len(text))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<i2", "|i1", "|u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2), (3,)])
def test_a_npy_file_of_integers(version: tuple[int, int], dtype: str, shape: tuple[int, ...]) -> None:
    rows = np.arange(np.prod(shape)).reshape(shape)
    text = in_npy(rows, dtype, version)
    stored, cut = read(text, npy=True)
    assert stored.shape == (shape[1:] or (1,))
    assert rows_in(stored).reshape(-1).tolist() == rows.reshape(-1).tolist()
    assert (cut.form, cut.dtype) == ("npy", dtype)
    assert payloads.render(cut, rows_in(stored)) == text


def test_a_negative_zero_stays_as_it_is() -> None:
    stored, cut = read(b"[-0,1,2]")
    assert (rows_in(stored).tolist(), cut.form) == ([[0], [1], [2]], "text")


def test_a_first_row_that_is_too_long_costs_nothing() -> None:
    """What a list would be like is not written down before it is known that the text is as long."""
    text = b"[[" + b",".join([b"1"] * 4000) + b"]]"
    tracemalloc.start()
    try:
        with pytest.raises(Rejected):
            read(text, tokens=4001)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(text)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        ([0, 255], "uint8"),
        ([0, 256], "uint16"),
        ([65535], "uint16"),
        ([65536], "int32"),
        ([-1, 255], "int16"),
        ([-1, 32767], "int16"),
        ([-1, 32768], "int32"),
    ],
)
def test_chunks_have_the_smallest_type_that_holds_them(ids: list[int], dtype: str) -> None:
    [new] = read(in_base64(np.array(ids)), POSITIONS, tokens=2)[0].new
    assert (new.chunk.dtype, new.chunk.size) == (dtype, len(ids) * np.dtype(dtype).itemsize)


@pytest.mark.parametrize(
    ("tokens", "spec", "ids", "shape"),
    [
        (4, PayloadSpec("routed_experts", shape=(1, 2)), 6, (1, 2)),
        (4, PayloadSpec("routed_experts", shape=(2, 1)), 6, (2, 1)),
        (4, PayloadSpec("routed_experts", start=1), 6, (3,)),
        (4, PayloadSpec("routed_experts", start=2), 6, (6,)),
        (4, PayloadSpec("routed_experts", start=1, shape=(3,)), 6, (3,)),
        (2, EXPERTS, 6, (6,)),
        (1, EXPERTS, 0, ()),
        (0, EXPERTS, 0, ()),
        (4, PayloadSpec("routed_experts", start=3), 0, ()),
        (4, PayloadSpec("routed_experts", start=3, shape=(1, 2)), 0, (1, 2)),
    ],
)
def test_rows_are_tokens_less_one_and_the_start(
    tokens: int, spec: PayloadSpec, ids: int, shape: tuple[int, ...]
) -> None:
    for spell in (in_base64, in_lists):
        stored, cut = read(spell(np.arange(ids)), spec, tokens=tokens)
        assert (stored.start, stored.sent, stored.shape) == (spec.start, spec.start, shape)
        assert stored.stop == max(tokens - 1, spec.start)
        assert payloads.render(cut, rows_in(stored)) == spell(np.arange(ids))


@pytest.mark.parametrize("spell", [in_lists, in_npy])
def test_a_shape_of_its_own_must_be_the_one_expected(spell: Spell) -> None:
    rows = np.arange(24).reshape(3, 4, 2)
    npy = spell is in_npy
    expected = PayloadSpec("routed_experts", shape=(4, 2))
    for one in (rows, rows.reshape(3, 8)):
        assert read(spell(one), expected, npy=npy)[0].shape == (4, 2)


@st.composite
def any_rows(draw: st.DrawFn, lowest: int = 0) -> Rows:
    shape = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2), (4, 2, 2), (2, 1, 3)]))
    high = draw(st.sampled_from([1, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1]))
    count = int(np.prod(shape))
    ids = draw(st.lists(st.integers(lowest, high), min_size=count, max_size=count))
    return np.array(ids, np.int64).reshape(shape)


@given(any_rows(lowest=-1), st.sampled_from([in_base64, in_npy, in_lists, in_compact_lists]))
def test_any_rows_survive_to_the_byte(rows: Rows, spell: Spell) -> None:
    text = spell(rows)
    stored, cut = read(text, POSITIONS, tokens=len(rows) + 1, npy=spell is in_npy)
    found = rows_in(stored)
    assert found.reshape(rows.shape).tolist() == rows.tolist()
    assert payloads.render(cut, found) == text
    assert cut.form != "text"


@pytest.mark.parametrize(
    ("spell", "npy"), [(in_base64, False), (in_npy, True), (lambda rows: in_npy(rows, "<i8"), True), (in_lists, False)]
)
def test_long_payloads_survive_over_their_pieces(spell: Spell, npy: bool) -> None:
    """Types differ from piece to piece, and no chunk is larger than it may be."""
    rows = table(2500, 120)
    rows[100, 3], rows[-1, -1] = 70_000, 300
    text = spell(rows)
    stored, cut = read(text, tokens=2501, npy=npy)
    assert rows_in(stored).tolist() == rows.tolist()
    assert payloads.render(cut, rows_in(stored)) == text
    assert {new.chunk.dtype for new in stored.new} >= {"int32"}
    assert all(new.chunk.size <= payloads.CHUNK_BYTES for new in stored.new)
