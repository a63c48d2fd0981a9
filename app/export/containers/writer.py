"""What every container does, and the two whose rows are each complete by themselves: `ndjson` and `msgpack`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from app.domain.samples import Array
from app.export import jsontext
from app.export.row import Column, Fields

Buffer = bytes | memoryview

T = TypeVar("T")

EXCLUDED = "excluded"
"""The key, beside those of EXCLUSION, by which a row says why something is not in the export."""

EXCLUSION: dict[str, Column] = {
    "session_id": "text",
    "segment": "int64",
    "turn": "int64",
    EXCLUDED: "text",
    "lost_tokens": "int64",
    "cursor": "text",
}
"""The columns of such a row."""

PIECE = 1 << 20
"""Bytes of a piece, about."""

Instead = Callable[[Fields, Exception], Fields | None]
"""What stands in the place of a row that a container cannot hold; None: nothing does."""


def refuse(row: Fields, error: Exception) -> Fields | None:
    raise error


def encoded(rows: Iterable[Fields], encode: Callable[[Fields], T], instead: Instead) -> Iterator[T]:
    """Each row, encoded; one that cannot be leaves nothing behind but what stands in its place."""
    for row in rows:
        try:
            made = encode(row)
        except Exception as error:  # noqa: BLE001 - a row's fault, whatever it is, is its session's business
            other = instead(row, error)
            if other is None:
                continue
            made = encode(other)
        yield made


class ContainerWriter(Protocol):
    """Turns rows into pieces of one file. The same rows give the same bytes, however they were divided into calls.

    A row that it cannot hold is replaced by what its `Instead` gives, and the others are written.

    `pack` does what needs no knowledge of other rows; it may run in another process, whose result `add` takes. No
    piece is empty. `finish` is called once, after the last row; `close` in any case.
    """

    @property
    def media_type(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        """As `add(pack(rows))`."""

    def pack(self, rows: Sequence[Fields]) -> bytes: ...
    def add(self, packed: Buffer) -> Iterator[bytes]: ...
    def finish(self) -> Iterator[bytes]: ...
    def close(self) -> None:
        """Free what is held outside memory."""


def weight(value: object) -> int:
    """About how many bytes a field takes in memory beside its object."""
    match value:
        case None:
            return 0
        case int() | float():  # most fields
            return 8
        case str() | bytes():
            return len(value)
        case np.ndarray():
            return value.nbytes
        case msgspec.Raw():
            return len(memoryview(value))
        case dict():
            return sum(map(weight, value.values()))
        case list() | tuple():
            return sum(map(weight, value))
    return 8


def little_endian(array: Array) -> memoryview | bytes:
    """An array's content as a file has it."""
    little = array.astype(array.dtype.newbyteorder("<")) if sys.byteorder == "big" else array
    # memoryview.cast refuses an array without items.
    return np.ascontiguousarray(little).data.cast("B") if array.size else b""


class RowWriter:
    """A row after the other: it need not know the columns, nor has anything to say at the end."""

    def __init__(self, media_type: str, suffix: str, encode: Callable[[Fields], bytes], instead: Instead) -> None:
        self.media_type = media_type
        self.suffix = suffix
        self._encode = encode
        self._instead = instead

    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        pending: list[bytes] = []
        size = 0
        for line in encoded(rows, self._encode, self._instead):
            pending.append(line)
            size += len(line)
            if size >= PIECE:
                yield b"".join(pending)
                pending, size = [], 0
        if pending:
            yield b"".join(pending)

    def pack(self, rows: Sequence[Fields]) -> bytes:
        return b"".join(encoded(rows, self._encode, self._instead))

    def add(self, packed: Buffer) -> Iterator[bytes]:
        return iter((bytes(packed),) if packed else ())

    def finish(self) -> Iterator[bytes]:
        return iter(())

    def close(self) -> None:
        pass


def ndjson(instead: Instead = refuse) -> RowWriter:
    """One JSON object a line."""
    return RowWriter("application/x-ndjson", ".ndjson", partial(jsontext.encode, ends=True), instead)


def msgpack(instead: Instead = refuse) -> RowWriter:
    """One map a row; an array is a map of `dtype` (numpy's name with its byte order, little), `shape` and `data`."""
    encoder = msgspec.msgpack.Encoder(enc_hook=_array)

    def encode(row: Fields) -> bytes:
        parsed = _parsed(row)
        try:
            return encoder.encode(parsed)
        except OverflowError:
            return encoder.encode(_parsed(parsed, narrows=True))

    return RowWriter("application/vnd.msgpack", ".msgpack", encode, instead)


def _parsed(value: object, *, narrows: bool = False) -> object:
    """The same, raw JSON parsed: a reader of msgpack shall not need a second one. `narrows`: and integers of more than
    64 bits as their decimal text, which JSON has and MessagePack does not."""
    match value:
        case msgspec.Raw():
            return msgspec.json.decode(value)
        case bool() | str() | bytes() | np.ndarray():
            return value
        case int() if narrows and not -(1 << 63) <= value < 1 << 64:
            return str(value)
        case Mapping():
            return {key: _parsed(item, narrows=narrows) for key, item in value.items()}
        case Sequence():
            return [_parsed(item, narrows=narrows) for item in value]
    return value


def _array(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no place in a row")
    return {"dtype": value.dtype.newbyteorder("<").str, "shape": value.shape, "data": little_endian(value)}
