"""`safetensors`: a tensor for each array of each row, and all else as JSON in one more tensor.

An array in a column of JSON stays there. The format is 8 bytes of the header's length, a JSON header and the data,
without holes (https://github.com/huggingface/safetensors). Its own package writes it from tensors that are all in
memory; here they wait in temporary files. Tensors stand in the order of their item size, largest first, so that each is
aligned: torch refuses a view that is not.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from app.domain.samples import Array
from app.errors import InvalidRequest
from app.export import jsontext
from app.export.containers.writer import EXCLUDED, PIECE, Buffer, Instead, encoded, little_endian, refuse
from app.export.row import Column, Columns, Fields, depth
from workers.codec import describe

META = "_rows_meta"
"""The tensor (uint8) with the JSON of what is no array: `{"rows": [...], "excluded": [...]}`."""

MAX_HEADER = 100_000_000
"""What readers of the format accept."""

SIZES = (8, 4, 2, 1)

NAMES = {
    **{f"{kind}{size}": f"{kind[0].upper()}{size}" for kind in ("int", "uint") for size in (64, 32, 16, 8)},
    **{f"float{size}": f"F{size}" for size in (64, 32, 16)},
    "bool": "BOOL",
}
"""The format's name for each dtype."""

ITEM_SIZES = {short: np.dtype(name).itemsize for name, short in NAMES.items()}

ENTRY = struct.Struct("<BQQI")
"""Of a tensor that waits: which of SIZES, its start and end among those, the length of its header's beginning."""


class Spool:
    """Bytes that wait in an anonymous temporary file, in memory as long as they are few."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=PIECE)  # noqa: SIM115
        self.size = 0

    def add(self, data: bytes | memoryview) -> None:
        self.size += self._file.write(data)

    def pieces(self) -> Iterator[bytes]:
        self._file.seek(0)
        while piece := self._file.read(PIECE):
            yield piece

    def entries(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Of a spool of ENTRY, each with its header's beginning."""
        self._file.seek(0)
        while head := self._file.read(ENTRY.size):
            place, start, end, length = ENTRY.unpack(head)
            yield place, start, end, self._file.read(length)

    def close(self) -> None:
        self._file.close()


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a row: the beginning of its name, the row's number, and what the header says of it."""

    path: str
    row: int
    dtype: str
    shape: tuple[int, ...]
    size: int

    @property
    def place(self) -> int:
        return SIZES.index(ITEM_SIZES[self.dtype])


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a file: their tensors, and the tensors' data in their order by item size, as in SIZES. `rows` and
    `excluded` are the JSON of the rest."""

    tensors: list[Tensor]
    data: list[memoryview]
    rows: list[memoryview]
    excluded: list[memoryview]


describe(PackedRows)


class TensorFile:
    """Tensors in the order in which they come, written at the end."""

    def __init__(self) -> None:
        self._data = [Spool() for _ in SIZES]
        self._entries = Spool()

    def add(self, name: str, array: Array) -> None:
        """Raises InvalidRequest for more tensors than a reader of the format accepts."""
        place = SIZES.index(array.itemsize)
        start = self._data[place].size
        self._data[place].add(little_endian(array))
        self._enter(name, NAMES[array.dtype.name], array.shape, place, start, self._data[place].size)

    def add_all(self, packed: PackedRows, first_row: int) -> None:
        """The tensors of rows of which the first has this number. Raises InvalidRequest as `add`."""
        ends = [spool.size for spool in self._data]
        for spool, data in zip(self._data, packed.data, strict=True):
            spool.add(data)
        for tensor in packed.tensors:
            start = ends[tensor.place]
            ends[tensor.place] += tensor.size
            name = f"{tensor.path}.{first_row + tensor.row}"
            self._enter(name, tensor.dtype, tensor.shape, tensor.place, start, ends[tensor.place])

    def pieces(self, name: str, texts: Sequence[Spool]) -> Iterator[bytes]:
        """The file; `texts` one after the other are its last tensor, of bytes."""
        size = sum(text.size for text in texts)
        place = SIZES.index(1)
        start = self._data[place].size
        self._enter(name, "U8", (size,), place, start, start + size)
        before = [sum(spool.size for spool in self._data[:place]) for place in range(len(SIZES))]
        with closing(Spool()) as header:
            separator = b"{"
            for place, start, end, head in self._entries.entries():
                header.add(b"%b%b%d,%d]}" % (separator, head, before[place] + start, before[place] + end))
                separator = b","
            header.add(b"}")
            header.add(b" " * (-header.size % 8))  # so that the data begins at a multiple of 8
            yield struct.pack("<Q", header.size)
            yield from header.pieces()
        for spool in (*self._data, *texts):
            yield from spool.pieces()

    def close(self) -> None:
        for spool in (*self._data, self._entries):
            spool.close()

    def _enter(self, name: str, dtype: str, shape: Sequence[int], place: int, start: int, end: int) -> None:
        head = jsontext.encode(name) + b':{"dtype":"%b","shape":%b,"data_offsets":[' % (
            dtype.encode(),
            jsontext.encode(shape),
        )
        self._entries.add(ENTRY.pack(place, start, end, len(head)) + head)
        if self._entries.size > MAX_HEADER:
            raise InvalidRequest(
                "the export has more tensors than a safetensors file can hold; "
                "ask for fewer rows at a time with limit and cursor, or for another format"
            )


class _PackedRow(msgspec.Struct, frozen=True):
    """A row's arrays with the beginnings of their names, and the JSON of the rest."""

    arrays: list[tuple[str, Array]]
    text: bytes
    is_excluded: bool


class SafetensorsWriter:
    """Nothing leaves before the last row, whose place in the header has to be known."""

    media_type = "application/octet-stream"
    suffix = ".safetensors"

    def __init__(self, columns: Columns, instead: Instead = refuse) -> None:
        self._instead = instead
        self._apart = {name: column for name, column in columns.items() if _holds_arrays(column)}
        self._file = TensorFile()
        self._rows, self._excluded = Spool(), Spool()
        self._rows.add(b'{"rows":[')
        self._excluded.add(b'],"excluded":[')
        self._count = self._left_out = 0

    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        return self._add(self._packed(rows))

    def pack(self, rows: Sequence[Fields]) -> bytes:
        return msgspec.msgpack.encode(self._packed(rows))

    def add(self, packed: Buffer) -> Iterator[bytes]:
        return self._add(msgspec.msgpack.decode(packed, type=PackedRows))

    def _packed(self, rows: Iterable[Fields]) -> PackedRows:
        tensors: list[Tensor] = []
        data: list[list[memoryview | bytes]] = [[] for _ in SIZES]
        texts: list[memoryview] = []
        excluded: list[memoryview] = []
        for row in encoded(rows, self._packed_row, self._instead):
            if row.is_excluded:
                excluded.append(memoryview(row.text))
                continue
            for path, array in row.arrays:
                content = little_endian(array)
                tensors.append(Tensor(path, len(texts), NAMES[array.dtype.name], array.shape, len(content)))
                data[tensors[-1].place].append(content)
            texts.append(memoryview(row.text))
        return PackedRows(tensors, [memoryview(b"".join(parts)) for parts in data], texts, excluded)

    def _packed_row(self, row: Fields) -> _PackedRow:
        """Raises ValueError for an array of a type that the format does not have."""
        arrays: list[tuple[str, Array]] = []

        def take(path: str, array: Array) -> None:
            if array.dtype.name not in NAMES:
                raise ValueError(f"{path} is an array of {array.dtype.name}")
            arrays.append((path, array))

        rest = _without_arrays("", self._apart, row, take)
        return _PackedRow(arrays, jsontext.encode(rest), EXCLUDED in row)

    def _add(self, packed: PackedRows) -> Iterator[bytes]:
        self._file.add_all(packed, self._count)
        for text in packed.rows:
            self._rows.add(b"," if self._count else b"")
            self._rows.add(text)
            self._count += 1
        for text in packed.excluded:
            self._excluded.add(b"," if self._left_out else b"")
            self._excluded.add(text)
            self._left_out += 1
        return iter(())

    def finish(self) -> Iterator[bytes]:
        self._excluded.add(b"]}")
        yield from self._file.pieces(META, (self._rows, self._excluded))

    def close(self) -> None:
        for held in (self._file, self._rows, self._excluded):
            held.close()


def _without_arrays(prefix: str, columns: Columns, value: Fields, take: Callable[[str, Array], None]) -> Fields:
    """Have the arrays in these columns taken, and give what is left."""
    rest = dict(value)
    for name, column in columns.items():
        if _holds_arrays(column) and rest.get(name) is not None:
            left = _without(f"{prefix}{name}", column, rest.pop(name), take)
            if left is not None:
                rest[name] = left
    return rest


def _without(path: str, column: Column, value: Any, take: Callable[[str, Array], None]) -> object:
    """Have the arrays in a value that is not None taken, and give what is left of it: None if nothing is."""
    if isinstance(column, Mapping):
        return _without_arrays(f"{path}.", column, value, take)
    dimensions, item = depth(column)
    if dimensions > 1 and not isinstance(value, np.ndarray):
        inner = "[" * (dimensions - 1) + item + "]" * (dimensions - 1)
        return [_without(f"{path}.{number}", inner, one, take) for number, one in enumerate(value)]
    if item == "bytes":
        array = np.frombuffer(value, np.uint8)
    else:
        # An array keeps its own type; a list of numbers takes its column's.
        array = value if isinstance(value, np.ndarray) else np.array(value, item)
    take(path, array)
    return None


def _holds_arrays(column: Column) -> bool:
    if isinstance(column, Mapping):
        return any(_holds_arrays(inner) for inner in column.values())
    dimensions, item = depth(column)
    return item == "bytes" or (dimensions > 0 and item != "text")
