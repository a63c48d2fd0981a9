"""Containers: what is written is what a reader of the format gets back, to the bit."""

from __future__ import annotations

import base64
import io
import json
import struct
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from integration.reading import read

from app.errors import InvalidRequest
from app.export.containers import parquet
from app.export.containers import safetensors as tensors
from app.export.containers.parquet import ParquetWriter
from app.export.containers.safetensors import SafetensorsWriter, TensorFile
from app.export.containers.writer import EXCLUSION, ContainerWriter, Instead, msgpack, ndjson, refuse
from app.export.row import Column, Columns, Fields

COLUMNS: Columns = {
    "name": "text",
    "count": "int64",
    "score": "float64",
    "done": "bool",
    "extra": "json",
    "tokens": "[int32]",
    "mask": "[uint8]",
    "flags": "[bool]",
    "logprobs": "[float64]",
    "coarse": "[float32]",
    "versions": "[int64]",
    "names": "[text]",
    "experts": "[[[uint8]]]",
    "ragged": "[[int32]]",
    "blob": "bytes",
    "inner": {"ids": "[int32]", "label": "text"},
}

WRITERS: dict[str, Callable[[Columns, Instead], ContainerWriter]] = {
    "ndjson": lambda columns, instead: ndjson(instead),
    "msgpack": lambda columns, instead: msgpack(instead),
    "safetensors": SafetensorsWriter,
    "parquet": ParquetWriter,
}


def written(
    format: str,
    rows: Sequence[Fields],
    columns: Columns = COLUMNS,
    *,
    page: int = 3,
    instead: Instead = refuse,
    is_packed: bool = False,
) -> bytes:
    writer = WRITERS[format](columns, instead)
    try:
        pages = [rows[start : start + page] for start in range(0, len(rows), page)]
        pieces = [
            piece for part in pages for piece in (writer.add(writer.pack(part)) if is_packed else writer.write(part))
        ]
        pieces += writer.finish()
    finally:
        writer.close()
    assert all(pieces)
    return b"".join(pieces)


def array(dtype: str, dimensions: int = 1) -> st.SearchStrategy[Any]:
    shape = hnp.array_shapes(min_dims=dimensions, max_dims=dimensions, min_side=0, max_side=5)
    elements = {"allow_nan": False, "allow_infinity": False, "allow_subnormal": True} if "float" in dtype else None
    return hnp.arrays(dtype, shape, elements=elements)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text(st.characters(exclude_categories=["Cs"])),
    "count": st.integers(-(2**63), 2**63 - 1),
    "score": st.floats(allow_nan=False, allow_infinity=False),
    "done": st.booleans(),
    "extra": st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    "tokens": array("int32"),
    "mask": array("uint8"),
    "flags": array("bool"),
    "logprobs": array("float64"),
    "coarse": array("float32"),
    "versions": array("int64"),
    "names": st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
    "experts": array("uint8", 3),
    "ragged": st.lists(array("int32"), max_size=3),
    "blob": st.binary(max_size=9),
    "inner": st.fixed_dictionaries({"ids": array("int32"), "label": st.just("x")}),
}

ROWS = st.lists(st.fixed_dictionaries({name: st.none() | value for name, value in VALUES.items()}), max_size=7)


def same(given: Any, found: Any, path: str) -> None:
    """Equal to the bit; a list stands for an array where the format has none."""
    if isinstance(given, np.ndarray):
        again = np.array(found, given.dtype).reshape(given.shape)
        assert again.tobytes() == given.tobytes(), path
        assert given.size == 0 or len(found) == len(given), path
        return
    if isinstance(given, dict):
        assert set(given) == set(found), path
        for key, value in given.items():
            same(value, found[key], f"{path}.{key}")
        return
    if isinstance(given, list):
        assert len(given) == len(found), path
        for number, (one, other) in enumerate(zip(given, found, strict=True)):
            same(one, other, f"{path}.{number}")
        return
    assert (type(given), given) == (type(found), found), path


@pytest.mark.parametrize("format", ["ndjson", "msgpack", "parquet"])
@settings(max_examples=cases(200), deadline=None)
@given(rows=ROWS)
def test_round_trip(format: str, rows: list[dict[str, Any]]) -> None:
    """What a reader gets is what was given."""
    found = read(format, written(format, rows))
    assert len(found) == len(rows)
    for row, again in zip(rows, found, strict=True):
        assert set(row) == set(again)
        for name, value in row.items():
            got = again[name]
            if value is not None and format == "ndjson" and name == "blob":
                got = base64.b64decode(got)
            if value is not None and format == "parquet" and name == "extra":
                got = json.loads(got)
            same(value, got, name)


@settings(max_examples=cases(200), deadline=None)
@given(rows=ROWS)
def test_round_trip_of_safetensors(rows: list[dict[str, Any]]) -> None:
    """Arrays and bytes are tensors of the same type and shape, by their path; all else is in the JSON."""
    data = written("safetensors", rows)
    found = safetensors.numpy.load(data)
    meta = json.loads(found.pop("_rows_meta").tobytes())
    assert (len(meta["rows"]), meta["excluded"]) == (len(rows), [])
    expected: dict[str, Any] = {}
    for index, row in enumerate(rows):
        _tensors(row, "", index, expected)
        rest = meta["rows"][index]
        for name in ("name", "count", "score", "done", "extra", "names"):
            same(row[name], rest[name], name)
        assert "tokens" not in rest or row["tokens"] is None
        assert (rest["inner"] is None) == (row["inner"] is None)
        assert rest["ragged"] == (None if row["ragged"] is None else [None] * len(row["ragged"]))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def _tensors(value: Any, path: str, index: int, found: dict[str, Any]) -> None:
    if isinstance(value, bytes):
        found[f"{path}.{index}"] = np.frombuffer(value, np.uint8)
    elif isinstance(value, np.ndarray):
        found[f"{path}.{index}"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _tensors(item, f"{path}.{key}" if path else key, index, found)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _tensors(item, f"{path}.{number}", index, found)


def test_tensors_are_aligned_and_without_holes() -> None:
    """torch refuses a view that does not begin at a multiple of its item size; the format refuses holes."""
    rows = [{"a": np.arange(3, dtype=np.uint8), "b": np.arange(5, dtype=np.int64), "c": np.arange(1, dtype=np.int32)}]
    data = written("safetensors", rows * 3)
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 8 == 0
    header = json.loads(data[8 : 8 + length])
    sizes = {"U8": 1, "I64": 8, "I32": 4}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), len(data) - 8 - length]
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_more_tensors_than_a_header_may_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_HEADER", 1000)
    file = TensorFile()
    for number in range(10):
        file.add(f"x.{number}", np.zeros(1, np.int32))
    with pytest.raises(InvalidRequest, match="limit and cursor"):
        file.add("x" * 500, np.zeros(1, np.int32))
    file.close()


@pytest.mark.parametrize("format", WRITERS)
def test_the_same_rows_give_the_same_bytes_however_they_are_divided(format: str) -> None:
    rows = [row(number) for number in range(20)]
    assert len({written(format, rows, page=page) for page in (1, 7, 20)}) == 1


@pytest.mark.parametrize("format", WRITERS)
def test_what_is_left_out_is_told(format: str) -> None:
    left_out = {"session_id": "s", "segment": 1, "turn": None, "excluded": "erased", "cursor": "c"}
    columns: dict[str, Column] = {**EXCLUSION, "tokens": "[int32]"}
    found = read(
        format, written(format, [{"session_id": "r", "tokens": np.arange(2, dtype=np.int32)}, left_out], columns)
    )
    assert [(one["session_id"], one.get("excluded")) for one in found] == [("r", None), ("s", "erased")]
    assert {name: found[1][name] for name in left_out} == left_out


def row(number: int) -> dict[str, Any]:
    return {
        "name": f"row {number}",
        "extra": msgspec.Raw(b'{"a":\n [1, {"b": null}]}'),
        "tokens": np.arange(number, dtype=np.int32),
        "logprobs": np.linspace(-1, 0, number),
        "experts": np.arange(number * 6, dtype=np.uint8).reshape(number, 2, 3),
        "inner": {"ids": np.arange(number, dtype=np.int32), "label": None},
    }


@pytest.mark.parametrize("format", WRITERS)
def test_raw_json_is_read_as_json(format: str) -> None:
    (found,) = read(format, written(format, [row(1)]))
    extra = json.loads(found["extra"]) if format == "parquet" else found["extra"]
    assert extra == {"a": [1, {"b": None}]}


def test_a_narrower_column_refuses_what_it_cannot_hold() -> None:
    narrow: Columns = {"ids": "[uint8]"}
    (found,) = read("parquet", written("parquet", [{"ids": np.array([255], np.int64)}], narrow))
    assert found["ids"].tolist() == [255]
    with pytest.raises(ValueError, match="cannot hold"):
        written("parquet", [{"ids": np.array([256], np.int64)}], narrow)


def test_parquet_says_the_types() -> None:
    schema = pq.read_schema(io.BytesIO(written("parquet", [])))
    types = {field.name: str(field.type) for field in schema}
    assert types["tokens"] == "list<element: int32>"
    assert types["coarse"] == "list<element: float>"
    assert types["experts"] == "list<element: list<element: list<element: uint8>>>"
    assert types["inner"] == "struct<ids: list<element: int32>, label: string>"
    assert (types["extra"], types["blob"], types["done"]) == ("string", "binary", "bool")


def test_arrays_that_do_not_lie_in_one_piece() -> None:
    wide = np.arange(10, dtype=np.int32)[::2]
    for format in WRITERS:
        (found,) = read(format, written(format, [{"tokens": wide}]))
        same(wide, found["tokens"], format)


@pytest.mark.parametrize("format", WRITERS)
def test_memory_is_bounded(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB of arrays; Arrow's own memory stands beside Python's and is bounded by the row group."""
    monkeypatch.setattr(parquet, "GROUP", 1 << 20)
    random = np.random.default_rng(1)
    writer = WRITERS[format](COLUMNS, refuse)
    tracemalloc.start()
    size = 0
    try:
        for number in range(100):
            page = [{"name": str(number), "logprobs": random.random(50_000)}]
            size += sum(len(piece) for piece in writer.write(page))
            assert pyarrow.total_allocated_bytes() < 8 << 20
        size += sum(len(piece) for piece in writer.finish())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        writer.close()
    assert size > 20_000_000
    assert peak < 8 << 20


UNHOLDABLE: dict[str, tuple[object, ...]] = {
    "name": ("\ud800", object(), 2**70),
    "count": (2**70, object()),
    "extra": (2**70, [object()], {"a": "\ud800"}),
    "tokens": (np.array([2**40]), np.array([1 + 1j]), object()),
    "names": (["\ud800"], [object()]),
    "blob": (object(),),
    "inner": ({"ids": object(), "label": "x"},),
}
"""Values that a column cannot have. Some container or other holds one nevertheless."""

FAULTS = st.sampled_from([(name, value) for name, values in UNHOLDABLE.items() for value in values])


@pytest.mark.parametrize("is_packed", [False, True], ids=["written", "packed"])
@pytest.mark.parametrize("format", WRITERS)
@settings(max_examples=cases(30))
@given(rows=ROWS, faults=st.dictionaries(st.integers(0, 6), FAULTS, min_size=1, max_size=3))
def test_a_row_that_cannot_be_written_leaves_the_others_as_they_are(
    format: str, is_packed: bool, rows: list[dict[str, Any]], faults: dict[int, tuple[str, object]]
) -> None:
    """The file is that of the others with what stands in its place; nothing does in the place of every second one."""
    columns: Columns = {**EXCLUSION, **COLUMNS}
    given: list[Fields] = [{**row, "turn": number} for number, row in enumerate(rows)]
    bad = {number: {**given[number], name: value} for number, (name, value) in faults.items() if number < len(rows)}
    replaced: dict[object, Fields | None] = {}

    def instead(row: Fields, error: Exception) -> Fields | None:
        number = row["turn"]
        assert isinstance(number, int)
        replaced[number] = {"session_id": "bad", "turn": number, "excluded": str(number)} if number % 2 else None
        return replaced[number]

    faulty = [bad.get(number, row) for number, row in enumerate(given)]
    found = written(format, faulty, columns, instead=instead, is_packed=is_packed)
    expected = [replaced.get(row["turn"], row) for row in faulty]
    assert replaced.keys() <= bad.keys()
    assert found == written(format, [row for row in expected if row is not None], columns)
