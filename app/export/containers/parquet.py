"""`parquet`: a column for each field, row groups of bounded size, lists built from numpy's buffers.

pyarrow is imported here and this module only when a Parquet export runs: it is heavy.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from app.domain.samples import Array
from app.export import jsontext
from app.export.containers.writer import Buffer, Instead, encoded, refuse, weight
from app.export.row import ITEMS, Column, Columns, Fields, depth

GROUP = 4 << 20
"""Bytes of a row group before compression, about; one row may be more."""

ROW_COST = 512
"""Bytes that a row takes in memory beside its content."""

FLOATS = {"float32", "float64"}

IN_RUNS = {"bool", "uint8", "int64"}
"""Items of lists that have one value many times over, as masks and versions do: zstd packs them as small as a
dictionary does, in two thirds of the time."""

SCALARS = {
    "text": pa.string(),
    "json": pa.string(),
    "bytes": pa.binary(),
    **{name: pa.type_for_alias(name) for name in ITEMS - {"text"}},
}


class _Values(msgspec.Struct, frozen=True):
    """A row's values in the order of the columns, and what they take in memory, about."""

    row: Fields
    values: Sequence[object]
    size: int


class ParquetWriter:
    """Lists are nullable, and so are their items to the format, though none is null."""

    media_type = "application/vnd.apache.parquet"
    suffix = ".parquet"

    def __init__(self, columns: Columns, instead: Instead = refuse) -> None:
        self._instead = instead
        self._columns = columns
        self._schema = pa.schema([pa.field(name, _type(column)) for name, column in columns.items()])
        self._out = _Pieces()
        runs = set(_paths(columns, IN_RUNS)) - set(_paths(columns, IN_RUNS, scalars=True))
        distinct = SCALARS.keys() - FLOATS - {"json", "bytes"}
        self._parquet: Any = pq.ParquetWriter(
            self._out,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[path for path in _paths(columns, distinct) if path not in runs],
            use_byte_stream_split=list(_paths(columns, FLOATS)),
            write_statistics=list(_paths(columns, SCALARS.keys() - {"json", "bytes"}, scalars=True)),
        )
        self._rows: list[_Values] = []
        self._batches: list[Any] = []
        self._size = 0

    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        for row in encoded(rows, self._values, self._instead):
            self._rows.append(row)
            self._size += row.size
            if self._size >= GROUP:
                yield from self._group()

    def pack(self, rows: Sequence[Fields]) -> bytes:
        fitting, batch = self._batch(list(encoded(rows, self._values, self._instead)))
        sizes = [row.size for row in fitting]
        out = io.BytesIO()
        with pa.ipc.new_stream(out, self._schema) as stream:
            stream.write_batch(batch)
        return msgspec.msgpack.encode((sizes, out.getbuffer()))

    def add(self, packed: Buffer) -> Iterator[bytes]:
        sizes, content = msgspec.msgpack.decode(packed, type=tuple[list[int], memoryview])
        self._close_batch()
        with pa.ipc.open_stream(content) as stream:
            batch = stream.read_next_batch()
        begun = 0
        for end, size in enumerate(sizes, 1):
            self._size += size
            if self._size >= GROUP:
                self._batches.append(batch.slice(begun, end - begun))
                begun = end
                yield from self._group()
        if begun < len(sizes):
            self._batches.append(batch.slice(begun))

    def _values(self, row: Fields) -> _Values:
        if not row.keys() <= self._columns.keys():
            unknown = row.keys() - self._columns.keys()
            raise ValueError(f"no column was declared for {', '.join(sorted(unknown))}")
        values = [
            None if (value := row.get(name)) is None else _plain(column, value)
            for name, column in self._columns.items()
        ]
        return _Values(row, values, ROW_COST + sum(map(weight, values)))

    def _batch(self, rows: Sequence[_Values]) -> tuple[Sequence[_Values], Any]:
        """The rows that are in the batch, and the batch. Where a column cannot hold a row, each is tried alone."""
        try:
            return rows, self._record_batch(rows)
        except Exception:  # noqa: BLE001 - as in `encoded`, which finds the row
            fitting = [row for placed in rows for row in encoded([placed.row], self._tried, self._instead)]
            return fitting, self._record_batch(fitting)

    def _tried(self, row: Fields) -> _Values:
        """Raises whatever a batch of the row alone does."""
        values = self._values(row)
        self._record_batch([values])
        return values

    def _record_batch(self, rows: Sequence[_Values]) -> Any:
        arrays = [
            _array(column, [row.values[place] for row in rows]) for place, column in enumerate(self._columns.values())
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _close_batch(self) -> None:
        if self._rows:
            fitting, batch = self._batch(self._rows)
            if fitting:
                self._batches.append(batch)
            self._rows = []

    def finish(self) -> Iterator[bytes]:
        if self._rows or self._batches:
            yield from self._group()
        self._parquet.close()
        yield from self._out.taken()

    def close(self) -> None:
        self._out.close()

    def _group(self) -> Iterator[bytes]:
        self._close_batch()
        table = pa.Table.from_batches(self._batches, schema=self._schema)
        if len(self._batches) > 1:
            table = table.combine_chunks()  # a page ends with a chunk
        self._batches, self._size = [], 0
        if len(table):
            self._parquet.write_table(table, row_group_size=len(table))
        del table
        pa.default_memory_pool().release_unused()
        yield from self._out.taken()


class _Pieces(io.RawIOBase):
    """A file that keeps what was written since it was last asked."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.closed:
            self._parts.append(bytes(data))
            self._position += len(self._parts[-1])
        return len(data)

    def tell(self) -> int:
        return self._position

    def taken(self) -> Iterator[bytes]:
        parts, self._parts = self._parts, []
        if whole := b"".join(parts):
            yield whole


def _type(column: Column) -> Any:
    if isinstance(column, Mapping):
        return pa.struct([pa.field(name, _type(inner)) for name, inner in column.items()])
    dimensions, item = depth(column)
    arrow_type = SCALARS[item]
    for _ in range(dimensions):
        arrow_type = pa.list_(pa.field("element", arrow_type))
    return arrow_type


def _paths(columns: Columns, items: Set[str], *, scalars: bool = False) -> Iterator[str]:
    """The leaves that hold one of `items`, by Parquet's path."""
    for name, column in columns.items():
        if isinstance(column, Mapping):
            yield from (f"{name}.{path}" for path in _paths(column, items, scalars=scalars))
            continue
        dimensions, item = depth(column)
        if item in items and not (scalars and dimensions):
            yield name + ".list.element" * dimensions


def _plain(column: Column, value: object) -> object:
    """JSON becomes text (UTF-8) at once: it is smaller than what it was made of."""
    if column == "json":
        return jsontext.encode(value)
    if isinstance(value, np.ndarray):
        # Flat rows in a column of rows with layers are one layer, since a column has one type.
        missing = 0 if isinstance(column, Mapping) or value.ndim < 2 else depth(column)[0] - value.ndim
        return value.reshape(len(value), *[1] * missing, *value.shape[1:]) if missing > 0 else value
    if isinstance(value, str | bytes | float):
        return value
    if isinstance(column, Mapping) and isinstance(value, Mapping):
        there = {name: value.get(name) for name in column}
        return {name: None if values is None else _plain(column[name], values) for name, values in there.items()}
    return value


def _array(column: Column, values: Sequence[Any]) -> Any:
    """An Arrow array of the column's type."""
    if isinstance(column, Mapping):
        inner = [
            _array(type_, [None if value is None else value.get(name) for value in values])
            for name, type_ in column.items()
        ]
        missing = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(inner, fields=list(_type(column)), mask=missing)
    dimensions, item = depth(column)
    if item == "json":
        return pa.array(values, pa.binary()).cast(pa.string())
    if dimensions == 0:
        return pa.array(values, SCALARS[item])
    return _lists(values, dimensions, item)


def _lists(values: Sequence[Any], dimensions: int, item: str) -> Any:
    """Lists in `dimensions` levels, each value a numpy array of as many dimensions, a list, or None."""
    missing = pa.array([value is None for value in values], pa.bool_())
    there = [value for value in values if value is not None]
    lengths = np.array([0 if value is None else len(value) for value in values], np.int64)
    if dimensions > 1:
        if all(isinstance(value, np.ndarray) for value in there):
            inner = _flat([value.reshape(-1) for value in there], item)
            for level in range(dimensions - 1, 0, -1):
                sizes = [np.full(int(np.prod(value.shape[:level])), value.shape[level]) for value in there]
                every = np.concatenate([np.zeros(0, np.int64), *sizes])
                inner = _list_array(every, inner, dimensions - level, item, None)
        else:
            inner = _lists(list(chain.from_iterable(there)), dimensions - 1, item)
    elif item == "text":
        inner = pa.array(list(chain.from_iterable(there)), pa.string())
    else:
        inner = _flat(there, item)
    return _list_array(lengths, inner, dimensions, item, missing)


def _flat(arrays: Iterable[Any], item: str) -> Any:
    """Raises ValueError where the type of the column would change a value."""
    dtype = np.dtype(item)
    parts = [np.zeros(0, dtype)]
    for given in map(np.asarray, arrays):
        parts.append(given.astype(dtype, copy=False))
        if given.dtype != dtype and not np.array_equal(parts[-1], given):
            raise ValueError(f"a column of {dtype.name} cannot hold the values of an array of {given.dtype.name}")
    return pa.array(np.concatenate(parts))


def _list_array(lengths: Array, inner: Any, dimensions: int, item: str, missing: Any) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(
        pa.array(offsets), inner, type=_type("[" * dimensions + item + "]" * dimensions), mask=missing
    )
